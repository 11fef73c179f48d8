"""Which dims of small programs are sharded together, and how many bytes each choice communicates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

from keras_dist.tracing.jaxpr_dims import read_dims

AXIS_SIZE = 2


class Program:
    """A program with the nodes of the dims of its inputs and outputs.

    Args:
        function: the program. All its inputs have gradients, unless `num_trained` is passed.
        shapes: the shapes of its inputs.
        num_trained: how many of the inputs, counted from the first, have gradients.
        dtypes: the dtypes of inputs that are not float32, by number.
    """

    def __init__(self, function, *shapes, num_trained=None, dtypes=None):
        dtypes = dtypes or {}
        specs = [jax.ShapeDtypeStruct(shape, dtypes.get(n, "float32")) for n, shape in enumerate(shapes)]

        def with_named_outputs(*inputs):
            return jax.tree.map(lambda leaf: checkpoint_name(leaf, "output"), function(*inputs))

        num_trained = len(shapes) if num_trained is None else num_trained
        self.graph = read_dims(jax.make_jaxpr(with_named_outputs)(*specs), AXIS_SIZE, num_trained)
        self.inputs = [self.graph.find(dims) for dims in self.graph.inputs]
        self.outputs = [self.graph.find(tensor.dims) for tensor in self.graph.named_tensors]

    def all_reduced(self, node):
        """Bytes that are all-reduced if a node is sharded."""
        return self.graph.all_reduce_bytes().get(node, 0)

    def gathered(self, node):
        """Bytes that are all-gathered if a node is sharded."""
        return self.graph.gather_bytes().get(node, 0)


def test_dims_that_the_axis_does_not_divide_have_no_node():
    program = Program(lambda x: x, (4, 3, 1, 0))
    assert program.inputs[0][1:] == (None, None, None)
    assert program.inputs[0][0] is not None


def test_columns_of_one_kernel_are_rows_of_the_next():
    program = Program(lambda x, up, down: jax.nn.relu(x @ up) @ down, (6, 4), (4, 8), (8, 4))
    (batch, width), (rows, columns), (rows2, out) = program.inputs
    assert rows == width
    assert columns == rows2
    assert program.outputs == [(batch, out)]
    assert len({batch, width, columns, out}) == 4
    # The output forward, the gradient of the input backward: 6 x 4 float32 each.
    assert program.all_reduced(columns) == 2 * 6 * 4 * 4
    assert program.all_reduced(batch) == 2 * 4 * 8 * 4  # the gradients of both kernels
    assert program.graph.conflicts()[columns] == {rows, out, batch}


def test_inputs_that_are_not_trained_have_no_gradient_to_all_reduce():
    program = Program(lambda up, down, x: (x @ up) @ down, (4, 8), (8, 4), (6, 4), num_trained=2)
    assert program.all_reduced(program.inputs[0][1]) == 6 * 4 * 4


def test_gradients_of_copies_are_all_reduced_once():
    def gated(x, gate, up, down):
        return ((x @ gate) * (x @ up)) @ down

    program = Program(gated, (6, 4), (4, 8), (4, 8), (8, 4))
    assert program.inputs[1] == program.inputs[2]
    assert program.all_reduced(program.inputs[1][1]) == 2 * 6 * 4 * 4


def test_batched_matmul():
    program = Program(lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), (2, 4, 8, 16), (2, 6, 8, 16))
    (batch, queries, heads, size), (batch2, keys, heads2, size2) = program.inputs
    assert (batch, heads, size) == (batch2, heads2, size2)
    assert program.outputs == [(batch, heads, queries, keys)]
    assert program.all_reduced(heads) == 0
    assert program.all_reduced(size) == 2 * 8 * 4 * 6 * 4


def test_elementwise_and_broadcasting():
    program = Program(lambda x, bias, scale: x * scale[None] + bias, (6, 8), (8,), (8,))
    (batch, width), (of_bias,), (of_scale,) = program.inputs
    assert width == of_bias == of_scale
    assert program.all_reduced(width) == 0
    assert program.all_reduced(batch) == 2 * 8 * 4  # the gradients of bias and scale


@pytest.mark.parametrize(
    ("before", "after", "kept", "gathered"),
    [
        ((6, 8), (6, 2, 4), [(0, 0), (1, 1)], []),  # split: the outer dim keeps the node
        ((6, 2, 4), (6, 8), [(0, 0), (1, 1)], [2]),  # merged: the inner dim is gathered
        ((6, 8), (48,), [(0, 0)], [1]),
        ((6, 8), (6, 1, 8), [(0, 0), (1, 2)], []),
        ((8,), (4, 2), [(0, 0)], []),
        ((4, 6), (6, 4), [(0, 0)], [1]),  # the outermost dims
        ((2, 6), (4, 3), [(0, 0)], [1]),
        ((6, 8), (3, 16), [], [0, 1]),  # 2 does not divide 3, so 6 is gathered
    ],
)
def test_reshape(before, after, kept, gathered):
    program = Program(lambda x: x.reshape(after), before)
    [dims], [out] = program.inputs, program.outputs
    assert [(dim, out.index(node)) for dim, node in enumerate(dims) if node in out] == kept
    assert [dim for dim, node in enumerate(dims) if program.gathered(node)] == gathered


def test_transpose_and_squeeze():
    program = Program(lambda x: jnp.squeeze(x.transpose(2, 0, 1)[None], 0), (2, 4, 6))
    [(a, b, c)] = program.inputs
    assert program.outputs == [(c, a, b)]
    assert not program.graph.gather_bytes()


def test_repeated_heads():
    program = Program(lambda k: jnp.repeat(k, 2, axis=2), (2, 4, 8, 16))
    assert program.outputs == program.inputs
    assert not any(program.gathered(node) for node in program.inputs[0])


def test_lookup():
    program = Program(lambda table, tokens: table[tokens], (32, 16), (6, 4), dtypes={1: "int32"}, num_trained=1)
    (vocabulary, width), (batch, length) = program.inputs
    assert program.outputs == [(batch, length, width)]
    assert program.all_reduced(vocabulary) == 6 * 4 * 16 * 4
    assert program.all_reduced(width) == 0
    assert program.all_reduced(batch) == 32 * 16 * 4  # the gradient of the table


def convolution(x, kernel, groups=1, strides=(1, 1)):
    return lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def test_convolution():
    program = Program(convolution, (2, 8, 8, 4), (3, 3, 4, 16))
    (batch, height, _, channels), (*_, of_kernel, filters) = program.inputs
    assert channels == of_kernel
    assert (program.outputs[0][0], program.outputs[0][3]) == (batch, filters)
    assert program.all_reduced(channels) == 2 * 8 * 8 * 16 * 4
    assert program.gathered(height) > 0
    assert (height, 4) in program.graph.window_dims
    assert {program.outputs[0][1], program.outputs[0][2]} <= {node for node, _ in program.graph.window_dims}


def test_convolution_with_a_window_of_one():
    assert not Program(convolution, (2, 8, 8, 4), (1, 1, 4, 16)).graph.window_dims


def test_depthwise_convolution():
    program = Program(lambda x, kernel: convolution(x, kernel, 8), (2, 8, 8, 8), (3, 3, 1, 8))
    channels, filters = program.inputs[0][3], program.inputs[1][3]
    assert channels == filters == program.outputs[0][3]
    assert program.all_reduced(channels) == 0


def test_concatenate_slice_and_split():
    program = Program(lambda x, y: jnp.concatenate([x, y], 1)[:, 2:6], (6, 4), (6, 4))
    (batch, left), (batch2, right) = program.inputs
    assert batch == batch2 == program.outputs[0][0]
    assert program.outputs[0][1] not in (left, right)
    assert min(program.gathered(left), program.gathered(right)) > 0
    program = Program(lambda x: tuple(jnp.split(x, 2, axis=1)), (6, 8))
    assert [out[0] for out in program.outputs] == [program.inputs[0][0]] * 2
    assert program.gathered(program.inputs[0][1]) > 0


@pytest.mark.parametrize("start", [0, 1, 2])
def test_interleaved_elements_have_the_shards_of_all(start):
    program = Program(lambda x: x[:, start::2], (6, 8))
    kept, gathered = program.outputs[0][1], program.gathered(program.inputs[0][1])
    assert (kept == program.inputs[0][1], gathered > 0) == ((True, False) if start < 2 else (False, True))


@pytest.mark.parametrize(("size", "stride"), [(6, 2), (8, 3)])
def test_interleaved_elements_that_shards_do_not_have_are_gathered(size, stride):
    program = Program(lambda x: x[:, ::stride], (6, size))
    assert program.outputs[0][1] is None
    assert program.gathered(program.inputs[0][1]) > 0


def test_softmax_all_reduces_little():
    program = Program(lambda x: jax.nn.softmax(x, axis=-1), (6, 8))
    [(batch, classes)] = program.inputs
    assert program.outputs == [(batch, classes)]
    assert 0 < program.all_reduced(classes) <= 4 * 6 * 4  # maximum and sum, forward and backward
    assert program.all_reduced(batch) == 0


@pytest.mark.parametrize("function", [lambda x: lax.top_k(x, 2)[0], lambda x: jnp.sort(x, -1), lambda x: x.cumsum(-1)])
def test_top_k_sort_and_cumsum_gather_their_dim(function):
    program = Program(function, (6, 8))
    [(batch, last)] = program.inputs
    assert program.outputs[0][0] == batch
    assert program.outputs[0][1] != last
    assert program.gathered(last) > 0
    assert program.gathered(batch) == 0


def test_scan_unites_its_carry_and_counts_iterations():
    def recurrent(x, kernel, state):
        return lax.scan(lambda state, step: (jnp.tanh(step + state @ kernel), None), state, x)[0]

    program = Program(recurrent, (5, 6, 8), (8, 8), (6, 8))
    (_, batch, width), (rows, columns), (batch2, width2) = program.inputs
    assert width == width2 == rows == columns  # a state that is multiplied and carried on
    assert batch == batch2
    assert program.all_reduced(rows) >= 5 * 6 * 8 * 4


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: lax.cond(x.sum() > 0, lambda x, y: x, lambda x, y: y, x, y),
        lambda x, y: lax.while_loop(lambda both: both[0].sum() < 9, lambda both: (both[1], both[0]), (x, y))[0],
        lambda x, y: jnp.where(x > 0, x, y),
        lambda x, y: jax.jit(lambda x, y: x + y)(x, y),
        lambda x, y: jax.checkpoint(lambda x, y: jnp.sin(x) * y)(x, y),
        lambda x, y: jax.nn.gelu(x) + jax.nn.relu(y),  # custom_jvp
    ],
)
def test_control_flow_and_calls_unite_their_operands(function):
    program = Program(function, (6, 8), (6, 8))
    assert program.inputs[0] == program.inputs[1] == program.outputs[0]


def test_custom_vjp():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    program = Program(lambda x, kernel: double(x @ kernel), (6, 4), (4, 8))
    assert program.outputs == [(program.inputs[0][0], program.inputs[1][1])]


@pytest.mark.parametrize(
    "function",
    [jnp.linalg.cholesky, jnp.fft.fft2, lambda x: lax.linalg.triangular_solve(x, x), lambda x: jnp.linalg.eigh(x)[1]],
)
def test_linear_algebra_gathers_matrices(function):
    program = Program(function, (2, 8, 8))
    [(_, rows, columns)] = program.inputs
    assert not {rows, columns} & {*program.outputs[0]}
    assert program.gathered(rows) > 0
    assert program.gathered(columns) > 0


def test_pooling_gathers_space_and_keeps_channels():
    program = Program(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), (2, 8, 8, 4)
    )
    [(batch, height, width, channels)] = program.inputs
    assert (program.outputs[0][0], program.outputs[0][3]) == (batch, channels)
    assert program.gathered(channels) == program.gathered(batch) == 0
    assert min(program.gathered(height), program.gathered(width)) > 0
    assert (height, 4) in program.graph.window_dims


def test_experts_have_a_node_of_their_own():
    def experts(x, up, down, chosen):
        return jnp.einsum("teh,ehd,te->td", jax.nn.gelu(jnp.einsum("td,edh->teh", x, up)), down, chosen)

    program = Program(experts, (6, 4), (8, 4, 16), (8, 16, 4), (6, 8))
    (tokens, width), (expert, width2, hidden), (expert2, hidden2, out), (_, chosen) = program.inputs
    assert (expert, hidden) == (expert2, hidden2)
    assert expert == chosen
    assert width == width2
    assert program.outputs == [(tokens, out)]
    assert program.all_reduced(expert) == pytest.approx(2 * 6 * 4 * 4, rel=0.5)


def test_operands_of_matrix_products():
    def function(x, kernel, bias, table):
        return x @ kernel.T + bias + table[np.arange(6)]

    specs = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((6, 4), (8, 4), (8,), (6, 8))]
    jaxpr = jax.make_jaxpr(function)(*specs)
    graph = read_dims(jaxpr, AXIS_SIZE, 4)
    assert [variable in graph.matmul_operands for variable in jaxpr.jaxpr.invars] == [True, True, False, False]


def test_a_scan_with_a_scalar_carry():
    def count(x):
        def step(carry, row):
            total, number = carry
            return (total + row, number + 1), row * number

        return lax.scan(step, (x[0], 0), x)[1]

    program = Program(count, (5, 6, 8))
    assert program.outputs[0][1:] == program.inputs[0][1:]


def test_random_numbers_from_a_seed():
    """A scalar output of an input with dims (a key of a seed) is not elementwise."""

    def noisy(seed, x):
        return x + jax.random.normal(jax.random.wrap_key_data(seed), x.shape)

    program = Program(noisy, (2,), (6, 8), dtypes={0: "uint32"})
    assert program.outputs == [program.inputs[1]]


def test_splits_into_pieces_of_different_sizes():
    program = Program(lambda x: jnp.split(x, [0, 2], axis=1), (6, 8))
    [(batch, last)] = program.inputs
    assert all(output == (batch, None) or output[0] == batch != last for output in program.outputs)
    assert last not in {node for output in program.outputs for node in output}
    assert program.gathered(last) > 0


def test_a_barrier_keeps_its_operands_apart():
    program = Program(lambda x, y: lax.optimization_barrier((x, y)), (6, 8), (6, 8))
    assert program.outputs == program.inputs
    assert program.inputs[0] != program.inputs[1]


def test_of_a_kernel_that_works_on_blocks_nothing_is_known():
    """The inner program of a Pallas kernel has references to blocks in place of its inputs and outputs."""

    def double(block, out):
        out[...] = 2 * block[...]

    def function(x):
        blocks = {"in_specs": [spec := pl.BlockSpec((2, 8), lambda row: (row, 0))], "out_specs": spec}
        return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(3,), **blocks, interpret=True)(x)

    program = Program(function, (6, 8))
    [(rows, columns)] = program.inputs
    assert not {rows, columns} & {*program.outputs[0]}
    assert min(program.gathered(rows), program.gathered(columns)) > 0


# Functions of an array, a dim of it and a number, that work on arrays of any size.
@pytest.mark.parametrize("axes", ["data", "data model"])
def test_shards_over_some_axes_keep_the_dims_of_arrays(axes):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def on_device(x, kernel):
        return jnp.sin(x @ kernel)

    settings = {"in_specs": (PartitionSpec("data"), PartitionSpec()), "out_specs": PartitionSpec("data")}
    function = jax.shard_map(on_device, mesh=mesh, axis_names=set(axes.split()), check_vma=False, **settings)
    program = Program(function, (8, 4), (4, 6))
    (rows, width), (contracted, columns) = program.inputs
    if axes == "data":
        assert contracted == width
        assert program.outputs == [(rows, columns)]
    else:  # specs of all axes say how each dim is sharded
        ((out_rows, out_columns),) = program.outputs
        assert out_rows == rows
        assert out_columns not in {rows, width, contracted, columns}


STEPS = {
    "sin": lambda x, dim, number: jnp.sin(x),
    "softmax": lambda x, dim, number: jax.nn.softmax(x, dim),
    "sum": lambda x, dim, number: jnp.broadcast_to(x.sum(dim, keepdims=True), x.shape),
    "largest": lambda x, dim, number: x - x.max(dim, keepdims=True),
    "sort": lambda x, dim, number: jnp.sort(x, dim),
    "cumsum": lambda x, dim, number: x.cumsum(dim),
    "top_k": lambda x, dim, number: jnp.moveaxis(lax.top_k(jnp.moveaxis(x, dim, -1), 1)[0], -1, dim) + x,
    "slice": lambda x, dim, number: lax.slice_in_dim(x, min(number, x.shape[dim] - 1), None, axis=dim),
    "stride": lambda x, dim, number: lax.slice_in_dim(x, 0, None, 1 + number % 2, axis=dim),
    "pad": lambda x, dim, number: jnp.pad(x, [(number, 0) if each == dim else (0, 0) for each in range(x.ndim)]),
    "concatenate": lambda x, dim, number: jnp.concatenate([x, 2 * x], dim),
    "split": lambda x, dim, number: jnp.split(x, [number % x.shape[dim]], dim)[1],
    "transpose": lambda x, dim, number: jnp.moveaxis(x, dim, number % x.ndim),
    "merge": lambda x, dim, number: x.reshape(*x.shape[: x.ndim - 2], -1) if x.ndim > 2 else x,
    "expand": lambda x, dim, number: jnp.expand_dims(x, dim) if x.ndim < 4 else x,
    "stack": lambda x, dim, number: jnp.stack([x, -x], dim) if x.ndim < 4 else x,
    "take": lambda x, dim, number: jnp.take(x, jnp.array([0, 1, 0]), dim, mode="clip"),
    "product": lambda x, dim, number: jnp.einsum("...i,...j->...ij", x, x) if x.ndim < 4 else x,
    "roll": lambda x, dim, number: jnp.roll(x, number, dim),
    "scan": lambda x, dim, number: lax.scan(lambda c, row: (c + row, c * row), jnp.zeros_like(x[0]), x)[1],
    "barrier": lambda x, dim, number: lax.optimization_barrier((x, 2 * x))[1],
}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.sampled_from([2, 4, 6]), min_size=2, max_size=3),
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 2)), max_size=5),
)
def test_what_communicates_nothing_can_be_computed_shard_by_shard(shape, steps):
    """A dim is followed rightly if each shard of the input gives the same shard of the output."""

    def function(x):
        for name, dim, number in steps:
            x = STEPS[name](x, dim % x.ndim, number)
        return x

    program = Program(function, tuple(shape), num_trained=0)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    expected = function(x)
    [nodes], [outputs] = program.inputs, program.outputs
    assert len(outputs) == expected.ndim
    assert all(node is None or size % AXIS_SIZE == 0 for node, size in zip(outputs, expected.shape, strict=True))
    for dim, node in enumerate(nodes):
        if node is None or [*nodes, *outputs].count(node) != 2 or node not in outputs:
            continue
        if program.all_reduced(node) == program.gathered(node) == 0:
            shards = [function(shard) for shard in np.split(x, AXIS_SIZE, dim)]
            np.testing.assert_allclose(jnp.concatenate(shards, outputs.index(node)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", ["constant", "trained"])
def test_what_a_loop_carries_has_a_gradient_from_its_second_iteration(first):
    def recurrent(kernel, *others):
        x, *start = reversed(others)
        carry = start[0] if start else jnp.zeros((4, 8))
        return lax.scan(lambda h, x: (jnp.tanh(h @ kernel + x),) * 2, carry, x)[1]

    shapes = [(8, 8), *([(4, 8)] if first == "trained" else []), (10, 4, 8)]
    program = Program(recurrent, *shapes, num_trained=len(shapes) - 1)
    columns = program.inputs[0][1]
    assert program.all_reduced(columns) == 2 * 10 * 4 * 8 * 4  # the product, and the gradient of what is carried


@pytest.mark.parametrize("constant_first", [False, True])
def test_a_result_of_branches_has_the_gradient_of_any(constant_first):
    def chosen(kernel, second, x, condition):
        branches = [lambda: x @ kernel, lambda: jnp.zeros((4, 8))]
        return lax.cond(condition, *(reversed(branches) if constant_first else branches)) @ second

    dtypes = {3: "bool"}
    program = Program(chosen, (8, 8), (8, 8), (4, 8), (), num_trained=2, dtypes=dtypes)
    assert program.all_reduced(program.inputs[1][1]) == 4 * 8 * 4
