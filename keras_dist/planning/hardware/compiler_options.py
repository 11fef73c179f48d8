"""Options of XLA: their validation, and sets of them that others publish for some hardware."""

import contextlib
from collections.abc import Iterator, Mapping
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
        {
            name.removeprefix("--"): spelled.get(value.lower(), value) if isinstance(value, str) else value
            for name, value in options.items()
        }
    )


def is_unknown(error: RuntimeError, name: str) -> bool:
    """Whether a compiler does not know an option."""
    return f"No such compile option: '{name}'" in str(error)


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


_MAXTEXT = "MaxText, '{}', https://github.com/AI-Hypercomputer/maxtext/blob/main/benchmarks/xla_flags_library.py"
_TOOLBOX = (
    "NVIDIA JAX-Toolbox, 'GPU performance', https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/GPU_performance.md"
)
_RECIPES = (
    "Google, 'tpu-recipes', Llama 3.1 70B, https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/ironwood"
)

_OVERLAP_ALL_GATHERS = CompilerOptions(
    {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": True,
    },
    "overlaps all-gathers with the matrix multiplications around them",
    _MAXTEXT.format("CF_FOR_ALL_GATHER"),
)
_OVERLAP_ALL_REDUCES = CompilerOptions(
    {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_reduce": True,
    },
    "overlaps all-reduces with the matrix multiplications around them",
    _MAXTEXT.format("CF_FOR_ALL_REDUCE"),
)
_OVERLAP_SLICES = CompilerOptions(
    {
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
    },
    "overlaps all-reduces between slices",
    _MAXTEXT.format("DATA_PARALLEL_OVERLAP"),
)
_WITHOUT_COLLECTIVE_MATMUL = CompilerOptions(
    {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
    "keeps collectives whole instead of splitting them into permutes around matrix multiplications",
    _MAXTEXT.format("DISABLE_COLLECTIVE_MATMUL"),
)
_LARGE_SCOPED_VMEM = CompilerOptions(
    {"xla_tpu_scoped_vmem_limit_kib": 98304},
    "gives each operation of a dense model more on-chip memory, and prefetches less",
    _MAXTEXT.format("DENSE_VMEM_LIMIT_FLAG"),
)
_REDUCE_SCATTER_LAYOUT = CompilerOptions(
    {
        "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
        "xla_tpu_assign_all_reduce_scatter_layout": True,
    },
    "chooses layouts for reduce-scatters",
    _MAXTEXT.format("LAYOUT_FOR_ALL_REDUCE_SCATTER"),
)
_IRONWOOD = CompilerOptions(
    {"xla_tpu_scoped_vmem_limit_kib": 61440, "xla_tpu_bf16_emission_mode": "NATIVE_EMISSION"},
    "gives each operation more on-chip memory, and computes in bfloat16 where it can",
    _RECIPES,
)
_ON_ALL_TPUS = {
    "overlap_slices": _OVERLAP_SLICES,
    "without_collective_matmul": _WITHOUT_COLLECTIVE_MATMUL,
}
_ON_TPUS = {
    # Newer versions of libtpu refuse this overlap ("continuation fusion") on other TPUs.
    "v5e": {
        **_ON_ALL_TPUS,
        "overlap_all_gathers": _OVERLAP_ALL_GATHERS,
        "overlap_all_reduces": _OVERLAP_ALL_REDUCES,
    },
    "v5p": {**_ON_ALL_TPUS, "large_scoped_vmem": _LARGE_SCOPED_VMEM},
    "v6e": {
        **_ON_ALL_TPUS,
        "large_scoped_vmem": _LARGE_SCOPED_VMEM,
        "reduce_scatter_layout": _REDUCE_SCATTER_LAYOUT,
    },
    "tpu7x": {"native_bfloat16": _IRONWOOD},
}
_ON_GPUS = FrozenMapping(
    {
        "overlap": CompilerOptions(
            {
                "xla_gpu_enable_latency_hiding_scheduler": True,
                "xla_gpu_enable_while_loop_double_buffering": True,
            },
            "overlaps collectives with compute",
            _TOOLBOX,
        ),
        "combine_collectives": CompilerOptions(
            {
                "xla_gpu_all_gather_combine_threshold_bytes": 8589934592,
                "xla_gpu_reduce_scatter_combine_threshold_bytes": 8589934592,
                "xla_gpu_all_reduce_combine_threshold_bytes": 8589934592,
            },
            "combines collectives of FSDP, up to 8 GiB",
            _TOOLBOX,
        ),
        "collective_matmul": CompilerOptions(
            {
                "xla_gpu_multi_streamed_windowed_einsum": True,
                "xla_gpu_threshold_for_windowed_einsum_mib": 0,
            },
            "overlaps the collectives of TP with its matrix multiplications",
            _TOOLBOX,
        ),
    }
)


def options_for_tpus(generation: str) -> Mapping[str, CompilerOptions]:
    """Returns the sets for a generation of TPUs, such as `"v5e"`, by name."""
    return FrozenMapping(_ON_TPUS.get(generation, {}))


def options_for_gpus() -> Mapping[str, CompilerOptions]:
    """Returns the sets for NVIDIA GPUs by name."""
    return _ON_GPUS
