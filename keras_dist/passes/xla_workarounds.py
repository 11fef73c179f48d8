"""Operations of a traced step that XLA cannot compile, or partitions with wrong numbers, in a form that it can.

Scatters: XLA pads the indices of shards of unequal sizes. Where they are not int32, it makes the padding in the wrong
dtype, and ends the process. JAX's gradients of sorts have indices in uint32, and with `jax_enable_x64` most indices are
int64. So they are cast.

Fourier transforms: XLA:CPU computes them of arrays in row-major layout only, but chooses another one where an array is
gathered along dim 1, and fails when the step runs. So the layout is required.

Convolutions, and gradients of maxima over windows: XLA's partitioner computes them with wrong numbers where windows
reach into other shards, as those of a convolution before `Flatten` do if the kernel of the next layer is sharded. So
the dims of windows are gathered.

Convolutions in bfloat16: XLA:CPU of JAX 0.11 and 0.12 fuses some of them, the layers between them and a mean of the
result, as at the end of a network for images, into one call of its library YNNPACK, which computes NaN. So an option
of the compiler restricts that library to single products and convolutions.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import with_sharding_constraint
from jax.sharding import AbstractMesh, Mesh

from keras_dist.sharding.resharding import unsharded_along
from keras_dist.tracing.jaxpr_evaluation import with_equations

_INT32 = np.iinfo("int32")
_SINGLE_CALLS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,"
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Returns the options, by name, with which XLA compiles right numbers for the devices of a mesh."""
    fuses_too_much = (0, 11) <= jax.__version_info__ < (0, 13) and mesh.devices.flat[0].platform == "cpu"
    return _SINGLE_CALLS if fuses_too_much else {}


def with_workarounds(program: Any, mesh: Mesh) -> Any:
    """Returns a traced program with the right numbers when XLA compiles it for the devices of a mesh."""
    platform = mesh.devices.flat[0].platform

    def replaced(equation: Any) -> Any:
        name = equation.primitive.name
        if name.startswith("scatter") and _has_other_indices(equation):
            return _called(equation, _scatter)
        if name == "fft" and platform == "cpu":
            return _called(equation, _fft)
        windows = _window_dims(equation)
        partitioned = _partitioned_mesh(equation, mesh) if any(windows) else None
        if partitioned is None:
            return equation
        return _called(equation, functools.partial(_unsharded, partitioned, windows))

    return with_equations(program, replaced)


def _has_other_indices(equation: Any) -> bool:
    operand, indices = (variable.aval for variable in equation.invars[:2])
    return indices.dtype != "int32" and max(operand.shape, default=0) <= _INT32.max


def _scatter(scatter: Callable, operand: Any, indices: Any, updates: Any) -> Any:
    own = np.iinfo(indices.dtype)
    # What is beyond int32 is out of bounds, and stays so.
    indices = jnp.clip(indices, max(own.min, _INT32.min), min(own.max, _INT32.max)).astype("int32")
    return scatter(operand, indices, updates)


def _partitioned_mesh(equation: Any, mesh: Mesh) -> Mesh | AbstractMesh | None:
    """Returns the mesh over which XLA partitions an equation; None in a `jax.shard_map` of all axes."""
    inner = equation.invars[0].aval.sharding.mesh
    if not inner.manual_axes:
        return mesh
    return None if {*inner.manual_axes} == {*inner.axis_names} else inner


def _window_dims(equation: Any) -> list[Collection[int]]:
    """Returns the dims with windows of each operand, and of the result, where XLA may get wrong numbers."""
    if equation.primitive.name == "select_and_scatter_add":
        return [[dim for dim, size in enumerate(equation.params["window_dimensions"]) if size > 1]] * 3
    if equation.primitive.name != "conv_general_dilated":
        return []
    dims = [spec[2:] for spec in equation.params["dimension_numbers"]]  # after those of rows and channels
    inputs, kernel = (
        [each.aval.shape[dim] for dim in own] for each, own in zip(equation.invars, dims[:2], strict=True)
    )
    numbers = {*equation.params["window_strides"], *equation.params["lhs_dilation"], *equation.params["rhs_dilation"]}
    is_plain = numbers <= {1} and not any(map(any, equation.params["padding"]))
    # A kernel of one position, and its gradient, a sum over all of them: products of matrices.
    return [] if is_plain and (kernel == inputs or {*kernel} <= {1}) else dims


def _unsharded(mesh: Mesh | AbstractMesh, dims: list[Collection[int]], function: Callable, *operands: Any) -> Any:
    def unshard(array: Any, dims: Collection[int]) -> Any:
        return with_sharding_constraint(array, unsharded_along(dims, array.ndim, mesh))

    *of_operands, of_result = dims
    return unshard(function(*map(unshard, operands, of_operands)), of_result)


def _fft(fft: Callable, operand: Any) -> Any:
    return _row_major(fft(_row_major(operand)))


def _row_major(array: Any) -> Any:
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def _called(equation: Any, function: Callable) -> Any:
    """Returns an equation that calls a function of another one's operation and operands, in place of that one."""

    def call(*operands: Any) -> Any:
        return function(lambda *operands: equation.primitive.bind(*operands, **equation.params), *operands)

    (called,) = jax.make_jaxpr(jax.jit(call))(*(variable.aval for variable in equation.invars)).eqns
    return called.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)
