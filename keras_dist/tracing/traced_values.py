"""A graph of the values of a function while JAX traces it: which operation made each, from which others.

A traced function that is about to choose an algorithm can so look at how its arguments came about. Functions that are
jitted or have custom derivatives are looked into as if they were written inline, and values that an inner function
(`jax.checkpoint`, the body of a loop) uses from around it are followed outwards. What JAX does not tell is a leaf.

This is the only file that knows the private attributes of JAX's tracers.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from keras_dist.layout.tensor_layout import Axes
from keras_dist.tracing.primitives import ALL_CALLS, FOLDED


@dataclass(frozen=True, eq=False)
class Node:
    """A value of a traced function: an output of an operation, or a leaf, of which only shape and dtype are known."""

    shape: tuple[int, ...]
    dtype: Any
    primitive: str = ""  # name of JAX's primitive that made it, such as "broadcast_in_dim"; "" for a leaf
    params: dict[str, Any] = field(default_factory=dict)  # of the primitive
    origin: Any = None  # the tracer or array itself; None for a value inside a jitted function
    root: Any = None  # `root_of` that; an argument of the traced function has the same root everywhere
    output: int = 0  # which of the outputs of the operation it is
    equation: Any = None  # of that operation; None for a leaf
    _read_inputs: Sequence[Callable[[], "Node"]] = ()

    @cached_property
    def inputs(self) -> tuple["Node", ...]:
        """The values that the operation read; the same value is the same node everywhere in one graph."""
        return tuple(read() for read in self._read_inputs)

    @cached_property
    def constant(self) -> np.ndarray | jax.Array | None:
        """The value, if it is known while tracing: an array, or a single number computed from such."""
        if self.root is not None and not isinstance(self.root, Tracer):
            return self.root
        if self.primitive not in FOLDED or np.prod(self.shape) != 1:
            return None
        constants = [node.constant for node in self.inputs]
        if any(constant is None for constant in constants):
            return None
        with jax.ensure_compile_time_eval():
            return self.apply(*map(jnp.asarray, constants, (node.dtype for node in self.inputs)))

    @cached_property
    def value(self) -> Any:
        """The array or tracer. For a value inside a jitted function, its operations are traced again."""
        return self.apply(*(node.value for node in self.inputs)) if self.origin is None else self.origin

    def apply(self, *operands: Any) -> Any:
        primitive = self.equation.primitive
        outputs = primitive.bind(*operands, **self.params)
        return outputs[self.output] if primitive.multiple_results else outputs


def node_of(value: Any, known: dict[int, Node] | None = None) -> Node:
    """Returns the node of a tracer, an array or a number, in a new graph or one of `known` nodes."""
    known = {} if known is None else known
    root = root_of(value)
    if id(root) not in known:
        equation: Any = getattr(root, "parent", None)  # of a tracer
        numbers = [number for number, variable in enumerate(getattr(equation, "outvars", ())) if variable is root.val]
        if numbers:
            inputs = [partial(node_of, operand, known) for operand in equation.in_tracers]
            node = _output_node(equation, numbers[0], inputs)
            if node.origin is None:
                node = dataclasses.replace(node, origin=value, root=root)
        else:
            node = _leaf(value, root, jax.typeof(root))
        known[id(root)] = node
    return known[id(root)]


def root_of(value: Any) -> Any:
    """Returns what a tracer stands for: the value undifferentiated, and outside of functions that close over it."""
    while isinstance(value, Tracer):
        trace: Any = getattr(value, "_trace", None)
        inner = getattr(value, "primal", None)
        if inner is None and hasattr(trace, "frame"):
            inner = trace.get_const(value)
        if inner is None:
            break
        value = inner
    return value


def _leaf(value: Any, root: Any, abstract: Any) -> Node:
    return Node(getattr(abstract, "shape", ()), getattr(abstract, "dtype", None), origin=value, root=root)


def _output_node(equation: Any, number: int, inputs: Sequence[Callable[[], Node]]) -> Node:
    """Returns the node of one output; of a call, the node inside the called function."""
    name, params = equation.primitive.name, equation.params
    jaxpr = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
    if name in ALL_CALLS and jaxpr is not None and (body := _Body(jaxpr, inputs)).is_complete:
        return body.node(body.jaxpr.outvars[number])
    variable = equation.outvars[number]
    shape, dtype = getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", None)
    return Node(shape, dtype, name, params, output=number, equation=equation, _read_inputs=inputs)


class _Body:
    """The values inside a called function."""

    def __init__(self, jaxpr: Any, inputs: Sequence[Callable[[], Node]]):
        self.jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        self.nodes: dict[Any, Node] = {}
        constants = [partial(node_of, constant) for constant in getattr(jaxpr, "consts", ())]
        variables = (self.jaxpr.invars, inputs), (self.jaxpr.constvars, constants)
        self.is_complete = all(len(names) == len(values) for names, values in variables)
        self.arguments = {name: value for pair in variables for name, value in zip(*pair, strict=False)}
        self.outputs = {
            variable: (equation, number)
            for equation in self.jaxpr.eqns
            for number, variable in enumerate(equation.outvars)
        }

    def node(self, atom: Any) -> Node:
        if hasattr(atom, "val"):
            return _leaf(atom.val, atom.val, atom.aval)
        if atom in self.arguments:
            return self.arguments[atom]()
        if atom not in self.nodes:
            equation, number = self.outputs[atom]
            inputs = [partial(self.node, operand) for operand in equation.invars]
            self.nodes[atom] = _output_node(equation, number, inputs)
        return self.nodes[atom]


class TracedWeights:
    """Remembers the axes of the dims of traced weights, as long as the values that stand for them live."""

    def __init__(self):
        self._axes: dict[int, tuple[weakref.ref, Axes]] = {}  # by the id of the value

    def add(self, value: Any, axes: Axes) -> None:
        tracer = root_of(value)
        key = id(tracer)
        self._axes[key] = (weakref.ref(tracer, lambda _: self._axes.pop(key, None)), axes)

    def axes_of(self, value: Any) -> Axes | None:
        """Returns the axes of each dim of a weight, None for other values."""
        tracer = root_of(value)
        reference, axes = self._axes.get(id(tracer), (None, None))
        return axes if reference is not None and reference() is tracer else None
