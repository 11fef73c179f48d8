"""Evaluates a `TokenPart` for some of the tokens.

Values of a chunk have the dims that they have in the program, with a size of 1 for each dim of tokens but the last,
which has all tokens of the chunk. So the operations of the program are applied as they are; only those that name the
shape of their result get another one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.layout.tensor_layout import axis_tuple
from keras_dist.passes.token_part import TokenPart
from keras_dist.sharding.per_device import free_axes
from keras_dist.sharding.resharding import changed_shardings
from keras_dist.tracing.jaxpr_evaluation import shape_of
from keras_dist.tracing.kept_dims import activation, inverse_order


def as_rows(part: TokenPart, variable: Any, value: jax.Array, tokens: Sequence[int]) -> jax.Array:
    """Returns the value of a variable with its dims of tokens first, in sizes such as `part.tokens`."""
    return value.transpose(_tokens_first(part, variable)).reshape(*tokens, *part.inner_shape(variable))


def from_rows(part: TokenPart, variable: Any, rows: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns the value of a variable in a shape, given it as `as_rows` returns it."""
    order = _tokens_first(part, variable)
    return rows.reshape([shape[dim] for dim in order]).transpose(inverse_order(order))


def evaluate_chunk(
    part: TokenPart, operands: Mapping[Any, jax.Array], sums: Mapping[Any, jax.Array]
) -> list[jax.Array]:
    """Returns the results of a part, each (tokens of the chunk, ...), given its operands by variable.

    Args:
        part: The part.
        operands: Those with tokens are (tokens of the chunk, ...), too.
        sums: For operands of the product without tokens, arrays of their shapes in a wider dtype. Their values do not
            matter: the gradient of the operand in the product is theirs, so that it is not rounded before it is added.
    """
    size = next(value.shape[0] for variable, value in operands.items() if part.places[variable])
    values: dict[Any, Any] = {}
    for variable, value in operands.items():
        if part.places[variable]:
            value = from_rows(part, variable, value, _shape_in_chunk(part, variable, size))
        values[variable] = value
    for equation in part.equations:
        inputs = [each.val if isinstance(each, Literal) else values[each] for each in equation.invars]
        shapes = [_shape_in_chunk(part, variable, size) for variable in equation.outvars]
        with jax.named_scope(str(equation.source_info.name_stack)):
            if equation is part.product and (summed := [n for n, v in enumerate(equation.invars) if v in sums]):
                outputs = [_product(equation, inputs, summed[0], sums[equation.invars[summed[0]]])]
            else:
                outputs = _applied(equation, inputs, shapes[0], part)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [as_rows(part, each, values[each], [size]) for each in part.results]


def _applied(equation: Any, operands: Sequence[Any], shape: Sequence[int], part: TokenPart) -> Sequence[Any]:
    """Applies the operation of an equation, of which the first result is to have a shape."""
    name, params = equation.primitive.name, equation.params
    if name in ("reshape", "squeeze"):
        return [operands[0].reshape(shape)]
    if name == "broadcast_in_dim":
        return [jax.lax.broadcast_in_dim(operands[0], shape, params["broadcast_dimensions"])]
    if name == "iota":
        return [jax.lax.broadcasted_iota(params["dtype"], shape, params["dimension"])]
    if name == "slice":
        sizes = zip(operands[0].shape, params["limit_indices"], equation.invars[0].aval.shape, strict=True)
        limits = [own if limit == whole else limit for own, limit, whole in sizes]
        return [jax.lax.slice(operands[0], params["start_indices"], limits, params["strides"])]
    if shardings := [params["sharding"]] if name == "sharding_constraint" else changed_shardings(equation):
        value = operands[0]
        for sharding in shardings:
            value = _constrained(value, sharding, part.places[equation.outvars[0]])
        return [value]
    if (function := activation(equation)) is not None:
        return [function(*operands)]
    outputs = equation.primitive.bind(*operands, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def _product(equation: Any, operands: Sequence[Any], number: int, total: jax.Array) -> jax.Array:
    """Returns a product, whose gradient with respect to operand `number` is that of `total`, in its dtype."""

    def product(other: jax.Array, matrix: jax.Array) -> jax.Array:
        return equation.primitive.bind(*((other, matrix) if number else (matrix, other)), **equation.params)

    @jax.custom_vjp
    def call(other: jax.Array, matrix: jax.Array, total: jax.Array) -> jax.Array:
        return product(other, matrix)

    def forward(other: jax.Array, matrix: jax.Array, total: jax.Array) -> Any:
        return product(other, matrix), (other, matrix)

    def backward(operands: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
        other, matrix = operands
        (gradient,) = jax.linear_transpose(lambda other: product(other, matrix), other)(cotangent)
        contracted, _ = equation.params["dimension_numbers"]
        rows, columns = (
            [dim for dim in range(value.ndim) if dim not in dims]
            for value, dims in ((other, contracted[1 - number]), (matrix, contracted[number]))
        )
        places = [place + (0 if number else len(columns)) for place in range(len(rows))]
        numbers = ((rows, places), ((), ()))
        summed = jax.lax.dot_general(other, cotangent, numbers, equation.params["precision"], total.dtype)
        # It has the dims of `other` that were contracted, in their order there, and the columns.
        pairs = sorted(zip(contracted[1 - number], contracted[number], strict=True))
        return gradient, None, summed.transpose(inverse_order([*(dim for _, dim in pairs), *columns]))

    call.defvjp(forward, backward)
    return call(operands[1 - number], operands[number], total)


def _constrained(value: jax.Array, sharding: Any, place: Sequence[int]) -> jax.Array:
    """Shards a value as in the program, except over axes of which each device has its own tokens."""
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(sharding, NamedSharding):
        return value
    mesh = mesh if mesh.manual_axes else sharding.mesh
    free = free_axes(mesh)

    def entry(dim: int, axes: Any) -> Any:
        if axes is PartitionSpec.UNCONSTRAINED or dim in place:
            return PartitionSpec.UNCONSTRAINED
        return tuple(name for name in axis_tuple(axes) if name in free) or None

    spec = PartitionSpec(*(entry(dim, axes) for dim, axes in enumerate(sharding.spec)))
    return with_sharding_constraint(value, NamedSharding(mesh, spec)) if free else value


def _shape_in_chunk(part: TokenPart, variable: Any, size: int) -> list[int]:
    shape, place = list(shape_of(variable)), part.places[variable]
    for dim in place:
        shape[dim] = size if dim == place[-1] else 1
    return shape


def _tokens_first(part: TokenPart, variable: Any) -> list[int]:
    place = part.places[variable]
    return [*place, *(dim for dim in range(len(shape_of(variable))) if dim not in place)]
