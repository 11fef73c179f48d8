"""Reads from a program's jaxpr which of its dims must be sharded together, and what each choice communicates.

Tensor parallelism shards a dim of a weight, and with it every dim that this one flows into: the columns of a kernel are
the last dim of what the layer returns, and the rows of the next kernel. `read_dims` follows dims through a jaxpr,
equation by equation, and returns a `DimGraph`: its nodes are sets of dims that are sharded together.

Worked example: two dense layers, for an axis of size 2.

    >>> import jax
    >>> def mlp(up, down, x):  # up (4, 8), down (8, 4), x (6, 4), all float32
    ...     return jax.numpy.tanh(x @ up) @ down
    >>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 8), (8, 4), (6, 4))]
    >>> graph = read_dims(jax.make_jaxpr(mlp)(*shapes), axis_size=2, num_trained=2)

The program has many dims, but only four nodes:

* `batch`: dim 0 of `x`, of `x @ up` and of the result;
* `width`: dim 1 of `x` and dim 0 of `up`, which the first product contracts;
* `hidden`: dim 1 of `up`, dim 1 of `x @ up` and of its tanh, and dim 0 of `down`, which the second product contracts;
* `out`: dim 1 of `down` and of the result.

    >>> up, down, x = map(graph.find, graph.inputs)
    >>> (width, hidden), (_, out), (batch, _) = up, down, x
    >>> up == (width, hidden), down == (hidden, out), x == (batch, width)
    (True, True, True)

A node that a product contracts leaves a partial sum on each device, which is all-reduced. A node that stays in the
result of a product is contracted in its backward pass, so the gradient of the other operand is all-reduced:

    >>> bytes_of = graph.all_reduce_bytes()
    >>> bytes_of[hidden]  # the result, 6 x 4 float32; its gradient for `x` is not needed
    96.0
    >>> bytes_of[width]  # x @ up, 6 x 8
    192.0
    >>> bytes_of[out]  # the gradient of tanh(x @ up), 6 x 8
    192.0
    >>> bytes_of[batch]  # the gradients of both kernels: data parallelism
    256.0

So `hidden` is the cheapest node of both kernels: sharding it splits `up` by columns, `(None, axis)`, and `down` by
rows, `(axis, None)`, as Megatron does. Then neither `width` nor `out` may be sharded over the same axis, because they
share a tensor with `hidden`:

    >>> graph.conflicts()[hidden] == {batch, width, out}
    True
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from keras_dist.layout.tensor_layout import axis_tuple
from keras_dist.tracing.dim_graph import DimGraph, Dims, NamedTensor
from keras_dist.tracing.kept_dims import index_dims, interleaved_dims, regrouped
from keras_dist.tracing.primitives import GATHERED_DIMS


def read_dims(jaxpr: Any, axis_size: int, num_trained: int, summed_later: Mapping[Any, Any] | None = None) -> DimGraph:
    """Returns the graph of a closed jaxpr's dims. Its first `num_trained` inputs have gradients.

    `summed_later` has the variables whose partial sums are not all-reduced, each with the one that is in its place.
    """
    graph = DimGraph(axis_size, summed_later)
    variables = jaxpr.jaxpr.invars
    graph.inputs = [graph.new_dims(variable.aval.shape) for variable in variables]
    graph.tensors.update(graph.inputs)
    inputs = [
        _Tensor(dims, number < num_trained, variable)
        for number, (dims, variable) in enumerate(zip(graph.inputs, variables, strict=True))
    ]
    _read_jaxpr(graph, jaxpr.jaxpr, inputs, repeats=1)
    return graph


def read_equation(graph: DimGraph, equation: Any, inputs: Sequence[Dims]) -> list[Dims]:
    """Reads one equation of inputs without gradients; returns the dims of its outputs."""
    return [
        tensor.dims for tensor in _Equation(graph, equation, [_Tensor(dims, False) for dims in inputs], 1).outputs()
    ]


class _Tensor(NamedTuple):
    """A tensor of the program."""

    dims: Dims
    has_gradient: bool  # whether it depends on a trained input
    origin: Any = None  # the jaxpr variable that its values come from by reshapes, transposes and casts, if any


def _read_jaxpr(graph: DimGraph, jaxpr: Any, inputs: Sequence[_Tensor], repeats: float) -> list[_Tensor]:
    """Reads an open jaxpr that runs `repeats` times; returns its outputs."""
    tensors: dict[Any, _Tensor] = dict(zip(jaxpr.invars, inputs, strict=True))

    def tensor_of(variable: Any) -> _Tensor:
        if not isinstance(variable, Literal) and variable in tensors:
            return tensors[variable]
        aval: Any = variable.aval  # of a literal or a constant
        return _Tensor(graph.new_dims(aval.shape), False)

    for equation in jaxpr.eqns:
        outputs = _Equation(graph, equation, [tensor_of(variable) for variable in equation.invars], repeats).outputs()
        for variable, output in zip(equation.outvars, outputs, strict=True):
            has_gradient = output.has_gradient and jnp.issubdtype(variable.aval.dtype, jnp.inexact)
            tensors[variable] = _Tensor(output.dims, has_gradient, output.origin or variable)
            graph.tensors.add(output.dims)
    graph.dims.update((variable, tensor.dims) for variable, tensor in tensors.items())
    return [tensor_of(variable) for variable in jaxpr.outvars]


class _Equation:
    """One equation of a jaxpr: unites the dims of its inputs and outputs, and records what it communicates.

    A primitive has a method `visit_<name>` or an entry in `GATHERED_DIMS`. Any other is elementwise if the shapes
    allow it; otherwise nothing is known of it, and all its inputs are gathered.
    """

    def __init__(self, graph: DimGraph, equation: Any, inputs: list[_Tensor], repeats: float):
        self.graph, self.equation, self.inputs, self.repeats = graph, equation, inputs, repeats
        self.params = equation.params
        self.dims = [tensor.dims for tensor in inputs]
        self.shapes = [variable.aval.shape for variable in equation.invars]
        self.out_shapes = [variable.aval.shape for variable in equation.outvars]

    def outputs(self) -> list[_Tensor]:
        name = self.equation.primitive.name
        if hasattr(self, f"visit_{name}"):
            return getattr(self, f"visit_{name}")()
        inner = next((self.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in self.params), None)
        inner = getattr(inner, "jaxpr", inner)  # of a closed jaxpr
        if inner is not None and self._is_call_of(inner):
            return _read_jaxpr(self.graph, inner, self.inputs, self.repeats)
        rank = max(map(len, self.shapes), default=0)
        if name in GATHERED_DIMS:
            return self._tensors(self._elementwise(GATHERED_DIMS[name](self.params, rank)))
        is_known = inner is None and self._is_elementwise()
        return self._tensors(self._elementwise(() if is_known else range(rank)))

    def _tensors(self, outputs: Sequence[Dims]) -> list[_Tensor]:
        has_gradient = any(tensor.has_gradient for tensor in self.inputs)
        return [_Tensor(dims, has_gradient) for dims in outputs]

    def _bytes(self, variable: Any) -> float:
        return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize * self.repeats

    def _all_reduce_outputs(self, node: int | None) -> None:
        for variable in self.equation.outvars:
            tensor = self.graph.summed_later.get(variable, variable)
            self.graph.add_all_reduce(node, tensor, self._bytes(tensor))

    def _all_reduce_gradient(self, node: int | None, number: int) -> None:
        """Records the all-reduce of the gradient of input `number`; gradients of copies are added up before it."""
        tensor, variable = self.inputs[number], self.equation.invars[number]
        if tensor.has_gradient:
            self.graph.add_all_reduce(node, (tensor.origin or variable, "gradient"), self._bytes(variable))

    def _gather(self, node: int | None, number: int = 0) -> None:
        """Records that input `number` is gathered, and its gradient on the way back."""
        passes = 2 if self.inputs[number].has_gradient else 1
        size = passes * self._bytes(self.equation.invars[number])
        self.graph.add_gather(node, (id(self.equation), number), size)

    def _is_call_of(self, jaxpr: Any) -> bool:
        """Whether inputs and outputs are those of the inner jaxpr; those of a Pallas kernel are blocks of them.

        Those of a `jax.shard_map` over some axes of a mesh are sharded over the others as the arrays are.
        """
        if "newly_manual_axes" in self.params and {*self.params["mesh"].axis_names} - self.params["newly_manual_axes"]:
            return True
        shapes = [[getattr(each.aval, "shape", None) for each in side] for side in (jaxpr.invars, jaxpr.outvars)]
        return shapes == [self.shapes, self.out_shapes]

    def _is_elementwise(self) -> bool:
        """Whether all outputs have the rank of the inputs, scalars aside, and sizes are equal or broadcast from 1."""
        shapes = [*(shape for shape in self.shapes if shape), *self.out_shapes]
        return len(set(map(len, shapes))) <= 1 and all(len({*sizes} - {1}) <= 1 for sizes in zip(*shapes, strict=True))

    def _elementwise(self, gathered: Collection[int] = ()) -> list[Dims]:
        """Unites dims of equal size at equal places, except the dims to gather."""
        outputs = []
        for shape in self.out_shapes:
            output = self.graph.new_dims(shape)
            for number, dims in enumerate(self.dims):
                for dim, node in enumerate(dims):
                    if dim in gathered:
                        self._gather(node, number)
                        if dim < len(output):
                            self.graph.successors.append((node, output[dim]))
                    elif self.shapes[number][dim] == shape[dim]:
                        self.graph.unite(node, output[dim])
                    else:
                        self._all_reduce_gradient(output[dim], number)
            outputs.append(output)
        return outputs

    def visit_shard_map(self) -> list[_Tensor]:
        """Dims that are sharded over the same axes have the same shards."""
        inner = self.params["jaxpr"]
        if self._is_call_of(inner):
            return _read_jaxpr(self.graph, inner, self.inputs, self.repeats)
        outputs = [self.graph.new_dims(shape) for shape in self.out_shapes]
        nodes: dict[tuple[str, ...], int | None] = {}
        specs = (*self.params["in_specs"], *self.params["out_specs"])
        for dims, spec in zip((*self.dims, *outputs), specs, strict=True):
            for node, axes in zip(dims, spec, strict=False):
                if axes:
                    self.graph.unite(node, nodes.setdefault(axis_tuple(axes), node))
        return self._tensors(outputs)

    def visit_reduce_window(self) -> list[_Tensor]:
        window = [dim for dim, size in enumerate(self.params["window_dimensions"]) if size > 1]
        outputs = self._elementwise(gathered=window)
        for dims in [self.dims[0], *outputs]:
            self.graph.window_dims |= {(dims[dim], len(dims)) for dim in window}
        return self._tensors(outputs)

    visit_reduce_window_max = visit_reduce_window_min = visit_reduce_window_sum = visit_reduce_window

    def visit_rev(self) -> list[_Tensor]:
        return self.inputs

    visit_convert_element_type = visit_optimization_barrier = visit_rev

    def visit_name(self) -> list[_Tensor]:
        origin = self.inputs[0].origin or self.equation.invars[0]
        self.graph.named_tensors.append(NamedTensor(self.params["name"], self.dims[0], self.shapes[0], origin))
        return self.inputs

    def visit_transpose(self) -> list[_Tensor]:
        dims = tuple(self.dims[0][dim] for dim in self.params["permutation"])
        return [self.inputs[0]._replace(dims=dims)]

    def visit_broadcast_in_dim(self) -> list[_Tensor]:
        output = list(self.graph.new_dims(self.out_shapes[0]))
        repeated = set(range(len(output)))
        for dim, out_dim in enumerate(self.params["broadcast_dimensions"]):
            if self.shapes[0][dim] == self.out_shapes[0][out_dim]:
                output[out_dim] = self.dims[0][dim]
                repeated.remove(out_dim)
        for out_dim in repeated:
            self._all_reduce_gradient(output[out_dim], 0)
        return self._tensors([tuple(output)])

    def visit_reshape(self) -> list[_Tensor]:
        """Of dims that are merged or split, the outermost keeps its node, and the others are gathered."""
        output = list(self.graph.new_dims(self.out_shapes[0]))
        for before, after in regrouped(self.shapes[0], self.out_shapes[0]):
            outer, *inner = [self.dims[0][dim] for dim in before] or [None]
            outer_out = after[0] if after else None
            if outer_out is not None and outer is not None and output[outer_out] is not None:
                output[outer_out] = outer
            else:
                self._gather(outer)
            for node in inner:
                self._gather(node)
        return [self.inputs[0]._replace(dims=tuple(output))]

    visit_squeeze = visit_reshape

    def visit_slice(self) -> list[_Tensor]:
        """Every n-th element of a dim is every n-th of each shard, if n divides shards; not for an unknown axis."""
        sizes, result, axis_size = list(self.shapes[0]), self.out_shapes[0], self.graph.axis_size
        for dim in interleaved_dims(self.params, self.shapes[0], result):
            if result[dim] % axis_size == 0 and axis_size > 1:
                sizes[dim] = result[dim]
        self.shapes = [tuple(sizes)]
        return self.visit_pad()

    def visit_pad(self) -> list[_Tensor]:
        """A dim that keeps its size keeps its node; the others are gathered."""
        changed = [dim for dim, size in enumerate(self.shapes[0]) if any(size != out[dim] for out in self.out_shapes)]
        return self._tensors(self._elementwise(changed))

    visit_dynamic_slice = visit_split = visit_top_k = visit_pad

    def visit_dynamic_update_slice(self) -> list[_Tensor]:
        for dim, (node, updated) in enumerate(zip(self.dims[0], self.dims[1], strict=True)):
            if self.shapes[0][dim] == self.shapes[1][dim]:
                self.graph.unite(node, updated)
        return self._tensors([self.dims[0]])

    def visit_stack(self) -> list[_Tensor]:
        output, axis = self.graph.new_dims(self.out_shapes[0]), self.params["axis"]
        for dims in self.dims:
            for node, other in zip(dims, output[:axis] + output[axis + 1 :], strict=True):
                self.graph.unite(node, other)
        return self._tensors([output])

    def visit_reduce_sum(self) -> list[_Tensor]:
        for dim in self.params["axes"]:
            self._all_reduce_outputs(self.dims[0][dim])
        kept = tuple(node for dim, node in enumerate(self.dims[0]) if dim not in self.params["axes"])
        return self._tensors([kept] * len(self.out_shapes))

    visit_reduce_max = visit_reduce_min = visit_reduce_prod = visit_reduce_sum
    visit_reduce_and = visit_reduce_or = visit_argmax = visit_argmin = visit_reduce_sum

    def visit_dot_general(self) -> list[_Tensor]:
        (left_contracted, right_contracted), (left_batch, right_batch) = self.params["dimension_numbers"]
        left, right = self.dims
        self.graph.matmul_operands.update(tensor.origin for tensor in self.inputs)
        for dim, other in zip((*left_contracted, *left_batch), (*right_contracted, *right_batch), strict=True):
            self.graph.unite(left[dim], right[other])
        for dim in left_contracted:
            self._all_reduce_outputs(left[dim])
        left_kept = [node for dim, node in enumerate(left) if dim not in (*left_contracted, *left_batch)]
        right_kept = [node for dim, node in enumerate(right) if dim not in (*right_contracted, *right_batch)]
        for node in left_kept:
            self._all_reduce_gradient(node, 1)
        for node in right_kept:
            self._all_reduce_gradient(node, 0)
        return self._tensors([(*(left[dim] for dim in left_batch), *left_kept, *right_kept)])

    def visit_conv_general_dilated(self) -> list[_Tensor]:
        numbers = self.params["dimension_numbers"]
        (rows, features, *space), (filters, channels, *window) = numbers.lhs_spec, numbers.rhs_spec
        image, kernel = self.dims
        self.graph.matmul_operands.update(tensor.origin for tensor in self.inputs)
        output = list(self.graph.new_dims(self.out_shapes[0]))
        output[numbers.out_spec[1]] = kernel[filters]
        if self.params["batch_group_count"] == 1:  # else the gradient of a kernel of several groups
            output[numbers.out_spec[0]] = image[rows]
        self._all_reduce_gradient(image[rows], 1)
        if self.params["feature_group_count"] == 1:
            self.graph.unite(image[features], kernel[channels])
            self._all_reduce_outputs(image[features])
            self._all_reduce_gradient(kernel[filters], 0)
        else:
            self.graph.unite(image[features], kernel[filters])
        for dim, out_dim, window_dim in zip(space, numbers.out_spec[2:], window, strict=True):
            self._gather(image[dim])
            self.graph.successors.append((image[dim], output[out_dim]))
            self._gather(kernel[window_dim], 1)
            if self.shapes[1][window_dim] > 1:
                self.graph.window_dims |= {(image[dim], len(image)), (output[out_dim], len(image))}
        return self._tensors([tuple(output)])

    def visit_gather(self) -> list[_Tensor]:
        """A lookup, of rows by indices for example: rows that a device does not hold are zeros in its partial sum."""
        numbers = self.params["dimension_numbers"]
        operand, indices = self.dims[0], self.dims[1]
        output = list(self.graph.new_dims(self.out_shapes[0]))
        for out_dim, node in zip(index_dims(self.equation), indices, strict=False):
            output[out_dim] = node
            self._all_reduce_gradient(node, 0)
        for dim, other in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            self.graph.unite(operand[dim], indices[other])
        for dim in numbers.collapsed_slice_dims:
            self._all_reduce_outputs(operand[dim])
        removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = [dim for dim in range(len(operand)) if dim not in removed]
        for out_dim, dim in zip(numbers.offset_dims, kept, strict=True):
            if self.params["slice_sizes"][dim] == self.shapes[0][dim]:
                output[out_dim] = operand[dim]
            else:
                self._gather(operand[dim])
        return self._tensors([tuple(output)])

    def visit_scan(self) -> list[_Tensor]:
        if "ft_in" in self.params:  # JAX 0.12 and later
            num_consts, num_carried, _ = map(len, self.params["ft_in"].unpack())
        else:
            num_consts, num_carried = self.params["num_consts"], self.params["num_carry"]
        scanned = num_consts + num_carried  # the first input of which each iteration takes a slice
        for number in range(scanned, len(self.inputs)):
            self._gather(self.dims[number][0], number)
        slices = [_Tensor(tensor.dims[1:], tensor.has_gradient) for tensor in self.inputs[scanned:]]
        # A carried value has a gradient from the first iteration that computes it from something with one.
        has_gradient = any(tensor.has_gradient for tensor in self.inputs)
        carried = [_Tensor(tensor.dims, has_gradient) for tensor in self.inputs[num_consts:scanned]]
        inputs = [*self.inputs[:num_consts], *carried, *slices]
        outputs = _read_jaxpr(self.graph, self.params["jaxpr"].jaxpr, inputs, self.repeats * self.params["length"])
        carried = outputs[:num_carried]
        self._unite_all(inputs[num_consts:scanned], carried)
        stacked = [
            _Tensor((self.graph.new_dims(variable.aval.shape)[0], *tensor.dims), tensor.has_gradient)
            for variable, tensor in zip(self.equation.outvars[num_carried:], outputs[num_carried:], strict=True)
        ]
        return [*carried, *stacked]

    def visit_while(self) -> list[_Tensor]:
        inputs = self.inputs[self.params["cond_nconsts"] :]
        outputs = _read_jaxpr(self.graph, self.params["body_jaxpr"].jaxpr, inputs, self.repeats)
        self._unite_all(inputs[self.params["body_nconsts"] :], outputs)
        return outputs

    def visit_cond(self) -> list[_Tensor]:
        first, *others = [
            _read_jaxpr(self.graph, branch.jaxpr, self.inputs[1:], self.repeats) for branch in self.params["branches"]
        ]
        for outputs in others:
            self._unite_all(first, outputs)
        flags = [any(tensor.has_gradient for tensor in tensors) for tensors in zip(first, *others, strict=True)]
        return [_Tensor(tensor.dims, flag) for tensor, flag in zip(first, flags, strict=True)]

    def _unite_all(self, tensors: Sequence[_Tensor], others: Sequence[_Tensor]) -> None:
        for tensor, other in zip(tensors, others, strict=True):
            for node, other_node in zip(tensor.dims, other.dims, strict=True):
                self.graph.unite(node, other_node)
