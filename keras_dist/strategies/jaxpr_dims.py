"""Which dims of a program's tensors must be sharded alike, and what must then be communicated: read from its jaxpr."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from keras_dist.strategies.dim_graph import Dims, Flow, Tagged, Value


def flow_of(jaxpr: Any, parts: int, trained: int) -> Flow:
    """Reads a program.

    Args:
        jaxpr: the closed jaxpr of the whole program.
        parts: into how many parts a dim is to be cut.
        trained: how many of its inputs, the first ones, it is differentiated by.

    Returns:
        The flow of its dims.
    """
    flow = Flow(parts)
    flow.inputs = [flow.fresh(variable.aval.shape) for variable in jaxpr.jaxpr.invars]
    flow.tensors.update(flow.inputs)
    variables = zip(flow.inputs, jaxpr.jaxpr.invars, strict=True)
    _read(flow, jaxpr.jaxpr, [Value(dims, n < trained, variable) for n, (dims, variable) in enumerate(variables)], 1)
    return flow


def _read(flow: Flow, jaxpr: Any, inputs: Sequence[Value], times: float) -> list[Value]:
    """Reads an open jaxpr that runs so many times; returns its outputs."""
    values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(variable: Any) -> Value:
        if not isinstance(variable, Literal) and variable in values:
            return values[variable]
        of_its_own: Any = variable.aval
        return Value(flow.fresh(of_its_own.shape), False)

    for equation in jaxpr.eqns:
        outputs = _Equation(flow, equation, [value_of(variable) for variable in equation.invars], times).outputs()
        for variable, value in zip(equation.outvars, outputs, strict=True):
            is_trained = value.is_trained and jnp.issubdtype(variable.aval.dtype, jnp.inexact)
            values[variable] = Value(value.dims, is_trained, value.source or variable)
            flow.tensors.add(value.dims)
    return [value_of(variable) for variable in jaxpr.outvars]


class _Equation:
    """An equation of a jaxpr: how the dims of what it returns come from those of what it takes.

    A method for each primitive, by its name; the others work element by element, or on what is not known.
    """

    def __init__(self, flow: Flow, equation: Any, inputs: list[Value], times: float):
        self.flow, self.equation, self.inputs, self.times = flow, equation, inputs, times
        self.params = equation.params
        self.dims = [value.dims for value in inputs]
        self.shapes = [variable.aval.shape for variable in equation.invars]
        self.out_shapes = [variable.aval.shape for variable in equation.outvars]

    def outputs(self) -> list[Value]:
        """Returns what the equation returns."""
        rule: Callable | None = getattr(self, f"_{self.equation.primitive.name}", None)
        if rule is not None:
            return rule()
        inner = next((self.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in self.params), None)
        if inner is not None:
            return _read(self.flow, getattr(inner, "jaxpr", inner), self.inputs, self.times)
        return self._values(self._elementwise() if self._is_elementwise() else self._unknown())

    def _values(self, outputs: Sequence[Dims]) -> list[Value]:
        is_trained = any(value.is_trained for value in self.inputs)
        return [Value(dims, is_trained) for dims in outputs]

    def _bytes(self, variable: Any) -> float:
        return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize * self.times

    def _sum_output(self, node: int | None) -> None:
        for variable in self.equation.outvars:
            self.flow.sum_up(node, variable, self._bytes(variable))

    def _sum_gradient(self, node: int | None, number: int) -> None:
        if self.inputs[number].is_trained:
            variable = self.equation.invars[number]
            # The gradients of all copies are added up before they are all-reduced.
            self.flow.sum_up(node, (self.inputs[number].source or variable, "gradient"), self._bytes(variable))

    def _move_input(self, node: int | None, number: int = 0) -> None:
        both_ways = 2 if self.inputs[number].is_trained else 1
        variable = self.equation.invars[number]
        self.flow.move(node, (self.equation, number), both_ways * self._bytes(variable))

    # ---------------------------------------------------------------------------------------------- elementwise

    def _is_elementwise(self) -> bool:
        shapes = [shape for shape in [*self.shapes, *self.out_shapes] if shape]
        return len(set(map(len, shapes))) <= 1 and all(len({*sizes} - {1}) <= 1 for sizes in zip(*shapes, strict=True))

    def _elementwise(self, but: Sequence[int] = ()) -> list[Dims]:
        """Dims of one size are one; but some, which are gathered."""
        outputs = []
        for shape in self.out_shapes:
            output = self.flow.fresh(shape)
            for number, dims in enumerate(self.dims):
                for at, node in enumerate(dims):
                    if at in but:
                        self._move_input(node, number)
                    elif self.shapes[number][at] == shape[at]:
                        self.flow.join(node, output[at])
                    else:
                        self._sum_gradient(output[at], number)
            outputs.append(output)
        return outputs

    def _unknown(self) -> list[Dims]:
        for number, dims in enumerate(self.dims):
            for node in dims:
                self._move_input(node, number)
        return [self.flow.fresh(shape) for shape in self.out_shapes]

    def _cumsum(self) -> list[Value]:
        return self._values(self._elementwise(but=[self.params["axis"]]))

    _cumprod = _cummax = _cummin = _cumlogsumexp = _cumsum

    def _sort(self) -> list[Value]:
        return self._values(self._elementwise(but=[self.params["dimension"]]))

    def _fft(self) -> list[Value]:
        rank = len(self.shapes[0])
        return self._values(self._elementwise(but=range(rank - len(self.params["fft_lengths"]), rank)))

    def _cholesky(self) -> list[Value]:
        rank = len(self.shapes[0])
        return self._values(self._elementwise(but=range(rank - 2, rank)))

    _triangular_solve = _cholesky

    def _reduce_window(self) -> list[Value]:
        slid = [dim for dim, size in enumerate(self.params["window_dimensions"]) if size > 1]
        outputs = self._elementwise(but=slid)
        for dims in [self.dims[0], *outputs]:
            self.flow.slid_over |= {(dims[dim], len(dims)) for dim in slid}
        return self._values(outputs)

    _reduce_window_max = _reduce_window_min = _reduce_window_sum = _reduce_window

    def _convert_element_type(self) -> list[Value]:
        return self.inputs

    def _name(self) -> list[Value]:
        source = self.inputs[0].source or self.equation.invars[0]
        self.flow.tagged.append(Tagged(self.params["name"], self.dims[0], self.shapes[0], source))
        return self.inputs

    # ---------------------------------------------------------------------------------------------- shapes

    def _transpose(self) -> list[Value]:
        dims = tuple(self.dims[0][dim] for dim in self.params["permutation"])
        return [self.inputs[0]._replace(dims=dims)]

    def _squeeze(self) -> list[Value]:
        return self._values([tuple(n for dim, n in enumerate(self.dims[0]) if dim not in self.params["dimensions"])])

    def _broadcast_in_dim(self) -> list[Value]:
        output = list(self.flow.fresh(self.out_shapes[0]))
        repeated = set(range(len(output)))
        for dim, at in enumerate(self.params["broadcast_dimensions"]):
            if self.shapes[0][dim] == self.out_shapes[0][at]:
                output[at] = self.dims[0][dim]
                repeated.remove(at)
        for at in repeated:
            self._sum_gradient(output[at], 0)
        return self._values([tuple(output)])

    def _reshape(self) -> list[Value]:
        """Where dims merge or split, the whole is sharded as the outermost of them."""
        output = list(self.flow.fresh(self.out_shapes[0]))
        for before, after in _regrouped(self.shapes[0], self.out_shapes[0]):
            outer, *inner = [self.dims[0][dim] for dim in before] or [None]
            outer_out = after[0] if after else None
            if outer_out is not None and outer is not None and output[outer_out] is not None:
                output[outer_out] = outer
            else:
                self._move_input(outer)
            for node in inner:
                self._move_input(node)
        return [self.inputs[0]._replace(dims=tuple(output))]

    def _slice(self) -> list[Value]:
        """A dim that keeps its size stays what it is; another one is gathered."""
        outputs = []
        for shape in self.out_shapes:
            output = list(self.flow.fresh(shape))
            for dim, node in enumerate(self.dims[0]):
                if self.shapes[0][dim] == shape[dim]:
                    output[dim] = node
                else:
                    self._move_input(node)
            outputs.append(tuple(output))
        return self._values(outputs)

    _dynamic_slice = _pad = _split = _top_k = _slice

    def _rev(self) -> list[Value]:
        return self.inputs

    def _dynamic_update_slice(self) -> list[Value]:
        for dim, (one, two) in enumerate(zip(self.dims[0], self.dims[1], strict=True)):
            if self.shapes[0][dim] == self.shapes[1][dim]:
                self.flow.join(one, two)
        return self._values([self.dims[0]])

    def _concatenate(self) -> list[Value]:
        output = self.flow.fresh(self.out_shapes[0])
        for number, dims in enumerate(self.dims):
            for at, node in enumerate(dims):
                if at == self.params["dimension"]:
                    self._move_input(node, number)
                else:
                    self.flow.join(node, output[at])
        return self._values([output])

    def _stack(self) -> list[Value]:
        output, axis = self.flow.fresh(self.out_shapes[0]), self.params["axis"]
        for dims in self.dims:
            for node, other in zip(dims, output[:axis] + output[axis + 1 :], strict=True):
                self.flow.join(node, other)
        return self._values([output])

    # ---------------------------------------------------------------------------------------------- sums

    def _reduce_sum(self) -> list[Value]:
        for dim in self.params["axes"]:
            self._sum_output(self.dims[0][dim])
        kept = tuple(node for dim, node in enumerate(self.dims[0]) if dim not in self.params["axes"])
        return self._values([kept] * len(self.out_shapes))

    _reduce_max = _reduce_min = _reduce_prod = _reduce_and = _reduce_or = _argmax = _argmin = _reduce_sum

    def _dot_general(self) -> list[Value]:
        (left_sum, right_sum), (left_batch, right_batch) = self.params["dimension_numbers"]
        left, right = self.dims
        self.flow.factors.update(value.source for value in self.inputs)
        for one, two in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
            self.flow.join(left[one], right[two])
        for dim in left_sum:
            self._sum_output(left[dim])
        of_left = [node for dim, node in enumerate(left) if dim not in (*left_sum, *left_batch)]
        of_right = [node for dim, node in enumerate(right) if dim not in (*right_sum, *right_batch)]
        for node in of_left:
            self._sum_gradient(node, 1)
        for node in of_right:
            self._sum_gradient(node, 0)
        return self._values([(*(left[dim] for dim in left_batch), *of_left, *of_right)])

    def _conv_general_dilated(self) -> list[Value]:
        numbers = self.params["dimension_numbers"]
        (rows, features, *space), (filters, channels, *_) = numbers.lhs_spec, numbers.rhs_spec
        image, kernel = self.dims
        self.flow.factors.update(value.source for value in self.inputs)
        output = list(self.flow.fresh(self.out_shapes[0]))
        output[numbers.out_spec[0]], output[numbers.out_spec[1]] = image[rows], kernel[filters]
        self._sum_gradient(image[rows], 1)
        if self.params["feature_group_count"] == 1:
            self.flow.join(image[features], kernel[channels])
            self._sum_output(image[features])
            self._sum_gradient(kernel[filters], 0)
        else:
            self.flow.join(image[features], kernel[filters])
        for dim, out, of_window in zip(space, numbers.out_spec[2:], numbers.rhs_spec[2:], strict=True):
            self._move_input(image[dim])
            if self.shapes[1][of_window] > 1:
                self.flow.slid_over |= {(image[dim], len(image)), (output[out], len(image))}
        for dim in numbers.rhs_spec[2:]:
            self._move_input(kernel[dim], 1)
        return self._values([tuple(output)])

    def _gather(self) -> list[Value]:
        """A look-up: rows that a device does not hold come as zeros, and are summed."""
        numbers = self.params["dimension_numbers"]
        operand, indices = self.dims[0], self.dims[1]
        output = list(self.flow.fresh(self.out_shapes[0]))
        looked_up = [dim for dim in range(len(output)) if dim not in numbers.offset_dims]
        for at, node in zip(looked_up, indices, strict=False):
            output[at] = node
            self._sum_gradient(node, 0)
        for dim, of_indices in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            self.flow.join(operand[dim], indices[of_indices])
        for dim in numbers.collapsed_slice_dims:
            self._sum_output(operand[dim])
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        window = [dim for dim in range(len(operand)) if dim not in gone]
        for at, dim in zip(numbers.offset_dims, window, strict=True):
            if self.params["slice_sizes"][dim] == self.shapes[0][dim]:
                output[at] = operand[dim]
            else:
                self._move_input(operand[dim])
        return self._values([tuple(output)])

    # ---------------------------------------------------------------------------------------------- control

    def _scan(self) -> list[Value]:
        if "ft_in" in self.params:  # JAX 0.12 and later
            consts, carried_in, _ = map(len, self.params["ft_in"].unpack())
        else:
            consts, carried_in = self.params["num_consts"], self.params["num_carry"]
        first = consts + carried_in
        for number in range(first, len(self.inputs)):
            self._move_input(self.dims[number][0], number)
        inputs = [*self.inputs[:first], *(Value(value.dims[1:], value.is_trained) for value in self.inputs[first:])]
        outputs = _read(self.flow, self.params["jaxpr"].jaxpr, inputs, self.times * self.params["length"])
        carried = outputs[:carried_in]
        self._join_all(inputs[consts:first], carried)
        stacked = [
            Value((self.flow.fresh(variable.aval.shape)[0], *value.dims), value.is_trained)
            for variable, value in zip(self.equation.outvars, outputs, strict=True)
        ]
        return [*carried, *stacked[len(carried) :]] if len(outputs) > len(carried) else carried

    def _while(self) -> list[Value]:
        inputs = self.inputs[self.params["cond_nconsts"] :]
        outputs = _read(self.flow, self.params["body_jaxpr"].jaxpr, inputs, self.times)
        self._join_all(inputs[self.params["body_nconsts"] :], outputs)
        return outputs

    def _cond(self) -> list[Value]:
        first, *others = [
            _read(self.flow, branch.jaxpr, self.inputs[1:], self.times) for branch in self.params["branches"]
        ]
        for outputs in others:
            self._join_all(first, outputs)
        return first

    def _join_all(self, some: Sequence[Value], others: Sequence[Value]) -> None:
        for one, other in zip(some, others, strict=True):
            for left, right in zip(one.dims, other.dims, strict=True):
                self.flow.join(left, right)


def _regrouped(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of dims that a reshape turns into each other, without those of size 1.

    Example:

    >>> _regrouped((8, 1, 64), (8, 4, 16))
    [([0], [0]), ([2], [1, 2])]
    """
    groups, dims, outs = [], [], []
    rest, rest_out = [d for d, size in enumerate(before) if size != 1], [d for d, size in enumerate(after) if size != 1]
    while rest or rest_out:
        left, right = math.prod(before[dim] for dim in dims), math.prod(after[dim] for dim in outs)
        if dims and outs and left == right:
            groups.append((dims, outs))
            dims, outs = [], []
        elif rest and (left <= right or not rest_out):
            dims.append(rest.pop(0))
        else:
            outs.append(rest_out.pop(0))
    return [*groups, (dims, outs)] if dims or outs else groups
