"""Options of XLA: their validation, and sets of them that others publish (`compiler_options.toml`)."""

import contextlib
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import jax

from keras_dist.planning.frozen_mapping import FrozenMapping


class CompilerOptions(FrozenMapping):
    """A set of XLA options, an immutable mapping from names to values.

    Attributes:
        purpose: What the set is for.
        source: Who publishes it.
    """

    def __init__(self, options: Mapping[str, Any], purpose: str, source: str):
        super().__init__(options)
        self.purpose, self.source = purpose, source


def checked_compiler_options(options: Any) -> FrozenMapping:
    """Returns compiler options that a user passes, also as they are written in flags; None is no options."""
    if options is None:
        return FrozenMapping()
    if not isinstance(options, Mapping):
        raise TypeError(
            f"compiler_options must be a mapping from names of XLA options to values, but got {options!r} "
            f"({type(options).__name__}). Pass, for example, {{'xla_tpu_scoped_vmem_limit_kib': 98304}}."
        )
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, (str, bool, int, float)):
            raise TypeError(
                f"compiler_options must map names to strings, booleans or numbers, but got {name!r}: {value!r}. Write "
                "each option as JAX's `compile(compiler_options=...)` takes it."
            )
    # As flags, XLA's options and libtpu's take true and false; as options, XLA's take booleans only.
    spelled = {"true": True, "false": False}
    return FrozenMapping(
        (name.removeprefix("--"), spelled.get(value.lower(), value) if isinstance(value, str) else value)
        for name, value in options.items()
    )


def is_refused(error: RuntimeError) -> bool:
    """Whether a compiler refuses its options. It may refuse a model for the same reason."""
    return str(error).startswith(("INVALID_ARGUMENT", "FAILED_PRECONDITION"))


@contextlib.contextmanager
def refused_options_explained(options: Mapping[str, Any]) -> Iterator[None]:
    """Raises what a compiler reports of options again, as a ValueError with the options."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not options or not is_refused(error):
            raise
        reason = str(error).splitlines()[0].partition(": ")[2][:400].rstrip(" .:")
        raise ValueError(
            f"The compiler refuses compiler_options {options_text(options)}: {reason}. Correct or remove the option; "
            "targets and versions of JAX differ in the options that they know, see "
            "keras_dist.hardware[...].recommended_compiler_options."
        ) from error


def options_text(options: Mapping[str, Any]) -> str:
    """Returns options as text, as they are written on the command line.

    >>> options_text({"xla_enable_async_all_gather": True, "xla_tpu_scoped_vmem_limit_kib": 98304})
    'xla_enable_async_all_gather=true, xla_tpu_scoped_vmem_limit_kib=98304'
    """
    return ", ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in options.items())


_PUBLISHED = tomllib.loads(
    resources.files("keras_dist.planning.hardware").joinpath("compiler_options.toml").read_text()
)


def published_options(hardware: str) -> Mapping[str, CompilerOptions]:
    """Returns the sets for a generation of TPUs, such as `"v5e"`, or for `"gpu"`, by name."""
    return FrozenMapping(
        (name, CompilerOptions(entry["options"], entry["purpose"], entry["source"]))
        for name, entry in _PUBLISHED.items()
        if hardware in entry["hardware"]
    )
