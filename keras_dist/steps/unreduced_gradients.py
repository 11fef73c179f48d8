"""Gradients of weights as one summand for each shard of a batch, to be added up over microbatches and reduced once.

XLA computes the gradient of a weight from rows that many devices hold, and sums it over them at once: in a loop over
microbatches, in every iteration. Here the traced gradient is rewritten. An operation that sums over rows runs on each
device for the rows that it holds, and the results become the entries of a new dim 0, sharded over the batch axes. The
linear operations that follow are applied to each entry.

Worked example: the gradient of a dense layer's kernel, for eight devices and 64 rows.

    gradient = dot_general(inputs (64, 16), output_gradients (64, 4))  # contracts dim 0: (16, 4), and an all-reduce
    unreduced = dot_general on each device, of (8, 16) and (8, 4)      # (8, 16, 4), dim 0 sharded: nothing is sent

The sum of `unreduced` over dim 0 is the gradient. The rest of the program stays as it is: layers compute with all rows,
and a batch normalization with the statistics of all of them. What cannot be rewritten, such as the gradient of weights
in a recurrent layer's loop, is reduced where it is computed.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import Mesh, PartitionSpec

from keras_dist.sharding.per_device import on_devices
from keras_dist.sharding.resharding import WeightLayouts, reduce_summands
from keras_dist.tracing.dim_graph import DimGraph
from keras_dist.tracing.jaxpr_dims import read_dims
from keras_dist.tracing.jaxpr_evaluation import Values, evaluate_inlined, variables_of, with_body
from keras_dist.tracing.linearity import has_number, is_linear, is_zero
from keras_dist.tracing.primitives import REMATERIALIZATIONS, SUMS


class Summands(NamedTuple):
    """A tensor as the sum over dim 0 of `unreduced`, (shards of the batch, ...), plus `reduced`; one may be None."""

    unreduced: Any
    reduced: Any

    def plus(self, other: "Summands") -> "Summands":
        """Returns the sum of two tensors, in the dtypes of this one."""

        def add(mine: Any, its: Any) -> Any:
            if mine is None or its is None:
                return its if mine is None else mine
            return mine + its.astype(mine.dtype)

        return Summands(*map(add, self, other))


class UnreducedGradients:
    """A function that returns gradients and other outputs, rewritten so that gradients are `Summands`.

    Args:
        function: Returns a list of gradients, and any structure of arrays.
        arguments: Its arguments: structures of arrays, or of anything with a shape and a dtype.
        has_rows: Of each leaf of the arguments, whether its dim 0 has the rows of a batch.
        mesh: The mesh, of which the sizes of `batch_axes` divide the number of rows.
        is_kept: Of each gradient, whether it is wanted as one summand for each shard. By default all are.
    """

    def __init__(
        self,
        function: Callable[..., tuple[list, Any]],
        arguments: Sequence[Any],
        has_rows: Sequence[bool],
        mesh: Mesh,
        batch_axes: Sequence[str],
        is_kept: Sequence[bool] | None = None,
    ):
        traced, (gradients, others) = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves = jax.tree.leaves(arguments)
        inlined = jax.make_jaxpr(lambda *values: evaluate_inlined(traced.jaxpr, traced.consts, values))(*leaves)
        graph = read_dims(inlined, math.prod(mesh.shape[name] for name in batch_axes), num_trained=0)
        found = [graph.find(dims)[0] for dims, rows in zip(graph.inputs, has_rows, strict=True) if rows]
        rows = _Rows(graph, frozenset(node for node in found if node is not None), mesh, tuple(batch_axes))
        self._program, self._constants = _Program(inlined.jaxpr, rows), inlined.consts
        self._others = jax.tree.structure(others)
        kept = [True] * len(gradients) if is_kept is None else is_kept
        outputs = zip(inlined.jaxpr.outvars, kept, strict=False)
        # Of each gradient, the dtype in which it is summed over rows; None where it is reduced already.
        self.sum_dtypes = [self._program.sums.get(output) if keep else None for output, keep in outputs]

    def __call__(self, *arguments: Any) -> tuple[list[Summands], Any]:
        as_sums = [dtype is not None for dtype in self.sum_dtypes] + [False] * self._others.num_leaves
        values = self._program.evaluate(self._constants, jax.tree.leaves(arguments), as_sums)
        gradients = [each if isinstance(each, Summands) else Summands(None, each) for each in values]
        count = len(self.sum_dtypes)
        return gradients[:count], jax.tree.unflatten(self._others, values[count:])


@dataclass(frozen=True)
class _Rows:
    """Which dims of a program's tensors have the rows of a batch, and over which axes of a mesh they are sharded."""

    graph: DimGraph
    nodes: frozenset[int]
    mesh: Mesh
    axes: tuple[str, ...]

    def dims_of(self, variable: Any) -> list[int]:
        nodes = () if isinstance(variable, Literal) else self.graph.find(self.graph.dims.get(variable, ()))
        return [dim for dim, node in enumerate(nodes) if node in self.nodes]


class _Program:
    """An open jaxpr of which outputs can be had as `Summands`: where an operation sums over rows."""

    def __init__(self, jaxpr: Any, rows: _Rows):
        self._jaxpr, self._rows = jaxpr, rows
        self.sums: dict[Any, Any] = {}  # for each variable that can be had so, the dtype of that sum
        self._row_dims: dict[int, tuple[int | None, ...]] = {}  # of equations that sum over rows: the dim of an operand
        self._bodies: dict[int, _Program] = {}  # of equations of `jax.checkpoint`
        zeros: set[Any] = set()  # variables whose values are zeros
        for number, equation in enumerate(jaxpr.eqns):
            summed = [variable for variable in equation.invars if self._is_sum(variable)]
            if equation.primitive.name in REMATERIALIZATIONS:
                body = self._bodies[number] = _Program(equation.params["jaxpr"], rows)
                found = zip(equation.outvars, equation.params["jaxpr"].outvars, strict=True)
                self.sums.update({outer: body.sums[inner] for outer, inner in found if body._is_sum(inner)})
            elif summed and is_linear(equation, [self._is_sum(variable) for variable in equation.invars]):
                output = equation.outvars[0]
                dtypes = jnp.result_type(*(self.sums[variable] for variable in summed)), output.aval.dtype
                self.sums[output] = min(dtypes, key=lambda dtype: dtype.itemsize)  # what is cast has no more digits
            elif row_dims := _dims_of_summed_rows(equation, rows, zeros):
                self._row_dims[number] = row_dims
                self.sums[equation.outvars[0]] = equation.outvars[0].aval.dtype
            elif equation.primitive.name == "broadcast_in_dim" and is_zero(equation.invars[0]):
                zeros.add(equation.outvars[0])

    def _is_sum(self, variable: Any) -> bool:
        return not isinstance(variable, Literal) and variable in self.sums

    def evaluate(self, constants: Sequence[Any], arguments: Sequence[Any], as_sums: Sequence[bool]) -> list[Any]:
        """Returns the outputs, some of them as `Summands`. Computes nothing else than what they need."""
        needed, needed_sums = self._needed(as_sums)
        values, sums = Values(self._jaxpr, constants, arguments), {}
        pending: list[Any] = []
        for number, equation in enumerate(self._jaxpr.eqns):
            is_needed = bool(needed.intersection(equation.outvars) or equation.effects)
            if not needed_sums.intersection(equation.outvars):
                pending += [equation] if is_needed else []
                continue
            values.evaluate(pending)
            pending = [equation] if is_needed and number not in self._bodies else []
            is_linear = number not in self._bodies and number not in self._row_dims
            operands = [sums[v] if is_linear and self._is_sum(v) else values.read(v) for v in equation.invars]
            with jax.named_scope(str(equation.source_info.name_stack)):
                if number in self._bodies:
                    as_sum = [variable in needed_sums for variable in equation.outvars]
                    outputs = with_body(equation, partial(self._bodies[number].evaluate, (), as_sums=as_sum), operands)
                elif number in self._row_dims:
                    outputs = [_sum_on_each_device(equation, operands, self._row_dims[number], self._rows)]
                else:
                    outputs = [_apply_linear(equation, operands)]
                for variable, output in zip(equation.outvars, outputs, strict=True):
                    if not isinstance(output, Summands):
                        values.known[variable] = output
                        continue
                    sums[variable] = output
                    if variable in needed and number in self._bodies:
                        values.known[variable] = total(output)
        values.evaluate(pending)
        outputs = zip(self._jaxpr.outvars, as_sums, strict=True)
        return [sums[variable] if as_sum else values.read(variable) for variable, as_sum in outputs]

    def _needed(self, as_sums: Sequence[bool]) -> tuple[set[Any], set[Any]]:
        """Returns the variables that are needed for some outputs: as they are, and as `Summands`."""
        needed: set[Any] = set()
        needed_sums: set[Any] = set()
        for variable, as_sum in zip(self._jaxpr.outvars, as_sums, strict=True):
            (needed_sums if as_sum else needed).add(variable)
        for number, equation in reversed(list(enumerate(self._jaxpr.eqns))):
            is_linear = number not in self._row_dims and number not in self._bodies
            operands = {*variables_of(equation)}
            if needed_sums.intersection(equation.outvars):
                summed = {variable for variable in operands if is_linear and variable in self.sums}
                needed_sums |= summed
                needed |= operands - summed
            if needed.intersection(equation.outvars) or equation.effects:
                needed |= operands
        return needed, needed_sums


def _dims_of_summed_rows(equation: Any, rows: _Rows, zeros: Collection[Any]) -> tuple[int | None, ...] | None:
    """Returns the dim of each operand along which an operation sums over rows; None if it does not."""
    name, params, operands = equation.primitive.name, equation.params, equation.invars
    if not has_number(equation):
        return None
    if name == "reduce_sum":
        return next(((dim,) for dim in rows.dims_of(operands[0]) if dim in params["axes"]), None)
    if name == "dot_general":
        pairs, have_rows = zip(*params["dimension_numbers"][0], strict=True), list(map(rows.dims_of, operands))
        return next((pair for pair in pairs if pair[0] in have_rows[0] or pair[1] in have_rows[1]), None)
    if name == "conv_general_dilated" and params["feature_group_count"] == 1:  # the gradient of a kernel
        numbers = params["dimension_numbers"]
        dim = numbers.lhs_spec[1]
        return (dim, numbers.rhs_spec[1]) if dim in rows.dims_of(operands[0]) else None
    if name == "scatter-add" and operands[0] in zeros:  # the gradient of a lookup
        numbers, have_rows = params["dimension_numbers"], rows.dims_of(operands[2])
        index_dims = (dim for dim in range(len(operands[2].aval.shape)) if dim not in numbers.update_window_dims)
        # Along a batching dim, each index has a sum of its own.
        summed = (pair for pair in enumerate(index_dims) if pair[0] not in numbers.scatter_indices_batching_dims)
        return next(((None, *pair) for pair in summed if pair[1] in have_rows), None)
    return None


def _sum_on_each_device(
    equation: Any, operands: Sequence[Any], row_dims: Sequence[int | None], rows: _Rows
) -> Summands:
    def on_device(*shards: Any) -> Any:
        return equation.primitive.bind(*shards, **equation.params)[None]

    in_specs = tuple(PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, rows.axes) for dim in row_dims)
    call = on_devices(on_device, rows.mesh, in_specs, PartitionSpec(rows.axes), rows.axes)
    return Summands(call(*operands), None)


def _apply_linear(equation: Any, operands: Sequence[Any]) -> Summands:
    """Applies an operation to operands of which some are `Summands`."""

    def apply(*values: Any) -> Any:
        return equation.primitive.bind(*values, **equation.params)

    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    if name in SUMS:
        first, second = (
            each if isinstance(each, Summands) else Summands(None, jnp.broadcast_to(each, shape)) for each in operands
        )
        second = jax.tree.map(jnp.negative, second) if name == "sub" else second
        return first.plus(second)
    in_axes = [0 if isinstance(each, Summands) else None for each in operands]
    unreduced, reduced = ([each[part] if isinstance(each, Summands) else each for each in operands] for part in (0, 1))
    each_entry = (lambda value: value) if name == "sharding_constraint" else jax.vmap(apply, in_axes)
    return Summands(
        None if any(value is None for value in unreduced) else each_entry(*unreduced),
        None if any(value is None for value in reduced) else apply(*reduced),
    )


def total(summands: Summands) -> Any:
    """Returns the sum of all summands, which sends data between the devices."""
    if summands.unreduced is None:
        return summands.reduced
    # Not `jnp.sum`, which adds in float32 what are bfloat16 numbers.
    reduced = jax.lax.reduce_sum(summands.unreduced, (0,))
    return reduced if summands.reduced is None else reduced + summands.reduced


def reduced(summands: Summands, dtype: Any, axes: Sequence[str], layouts: WeightLayouts) -> Any:
    """Returns the sum of a gradient's summands, sent in `dtype`, in the layout of the weight's update."""
    if summands.unreduced is None:
        return summands.reduced
    gradient = reduce_summands(summands.unreduced.astype(dtype), axes, layouts.compute, layouts.update)
    gradient = gradient.astype(summands.unreduced.dtype)
    return gradient if summands.reduced is None else gradient + summands.reduced
