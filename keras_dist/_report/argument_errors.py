"""Errors about names and arguments that do not exist, with the closest ones that do."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from keras_dist._report.units import counted

# What other libraries call what this package has, in lower case without underscores.
_NAMES_ELSEWHERE = {
    "FullyShardedDataParallel": ("fsdp", "fsdp2", "fullyshard", "zero3"),
    "FullyShardedDataParallel(mesh) of two axes": ("hsdp",),
    "DataParallel(shard_optimizer_state=True)": ("zero1",),
    "DataParallel": ("dp", "ddp", "distributeddataparallel", "mirroredstrategy"),
    "tensor_parallel_layout_map": ("tp", "tensorparallel", "parallelizemodule"),
    "create_device_mesh": ("mesh", "makemesh", "initdevicemesh"),
    "TensorLayout": ("partitionspec", "namedsharding", "p"),
    "distribute_tensor": ("deviceput", "withshardingconstraint"),
    "initialize": ("initprocessgroup",),
    "TrainingCheckpoint": ("checkpoint", "checkpointmanager"),
    "list_devices": ("devices",),
    "get_device_count": ("devicecount",),
    "deferred": ("metadevice",),
    "visualize": ("visualizesharding",),
}
_CUSTOMARY = {customary: name for name, names in _NAMES_ELSEWHERE.items() for customary in names}


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Returns a question with the closest known word, as a sentence after another one; nothing if none is close.

    >>> did_you_mean("microbatch", ["remat", "microbatches"])
    " Did you mean 'microbatches'?"
    """
    close = difflib.get_close_matches(word, known, 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def attribute_error(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Returns the error about a public name that a module does not have.

    >>> attribute_error("keras_dist", "FSDP", ["plan"])
    AttributeError("module 'keras_dist' has no attribute 'FSDP'. Did you mean `keras_dist.FullyShardedDataParallel`?")
    """
    key = name.lower().replace("_", "")
    by_key = {known.lower().replace("_", ""): known for known in names}
    close = [] if name.startswith("_") else difflib.get_close_matches(key, by_key, 1, 0.7)
    suggested = _CUSTOMARY.get(key) or (by_key[close[0]] if close else None)
    hint = f". Did you mean `{module}.{suggested}`?" if suggested else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def with_explained_arguments(function: Callable, name: str) -> Callable:
    """Returns a function that raises a TypeError with the fix for arguments that it does not take.

    The signature is looked at only after Python has refused the arguments. `name` is what the error calls it.
    """

    @functools.wraps(function)
    def explained(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # Python refuses arguments in the frame that calls: the function itself has none.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            message = _explain(function, name, args, kwargs)
            if message is None:
                raise
        raise TypeError(message)

    return explained


def explain_arguments(public: Mapping[str, Any]) -> dict[str, Any]:
    """Explains arguments of public functions and constructors. Returns the functions that take the place of others."""
    replaced = {}
    for name, value in public.items():
        if inspect.isfunction(value):
            replaced[name] = with_explained_arguments(value, name)
        elif isinstance(value, type) and inspect.isfunction(vars(value).get("__init__")):
            setattr(value, "__init__", with_explained_arguments(vars(value)["__init__"], name))  # noqa: B010
    return replaced


def _what_to_write(name: str, unknown: str, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Returns the fix, as a sentence after another one, for an argument that a function is often expected to have."""
    if (name, unknown) == ("plan", "target"):
        mesh = "keras_dist.create_device_mesh('data:8', devices=keras_dist.target('v5e:2x4'))"
        return f" The distribution has the devices: keras_dist.DataParallel({mesh})."
    if name == "create_device_mesh" and not args and all(isinstance(size, int) for size in kwargs.values()):
        axes = ",".join(f"{axis}:{size}" for axis, size in kwargs.items())
        return f" Axes are one argument: create_device_mesh({axes!r})."
    return ""


def _explain(function: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> str | None:
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
        return None  # another error
    except TypeError as error:
        fault = str(error)
    parameters = list(signature.parameters.values())
    if function.__name__ == "__init__":
        parameters, args = parameters[1:], args[1:]
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    text = f"{name}{inspect.Signature(plain)}"
    names = [each.name for each in parameters]
    most = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    unknown = next((key for key in kwargs if key not in names), None)
    fix = ""
    if unknown is not None:
        fault = f"there is no argument {unknown!r}"
        fix = _what_to_write(name, unknown, args, kwargs) or did_you_mean(unknown, names)
    elif len(args) > most:
        by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        kinds = ", ".join(type(each).__name__ for each in args[most:])
        fault = f"it takes {counted(most, 'positional argument')}, but got {len(args)} (too many: {kinds})"
        if by_name:
            passed = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(each).__name__).lower() for each in args]
            passed = ", ".join(f"{each}={each}" for each in passed) if {*passed} <= {*names} else f"{by_name[0]}=..."
            fix = f" Pass arguments by name: {name}({passed})."
    return f"{name}() cannot be called like this: {fault}.{fix} Its arguments are {text}."
