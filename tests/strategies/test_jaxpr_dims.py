"""Which dims of a program must be sharded alike, and what is communicated where they are: known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from keras_dist.strategies.jaxpr_dims import flow_of

PARTS = 2


class Read:
    """A program as `flow_of` reads it, with the nodes of its inputs and of what it returns.

    Args:
        function: the program. All its inputs are differentiated by, unless `trained` says how many.
        shapes: the shapes of its inputs.
        trained: how many of them, the first ones, it is differentiated by.
        dtypes: the dtypes of the inputs that are not float32, by number.
    """

    def __init__(self, function, *shapes, trained=None, dtypes=None):
        dtypes = dtypes or {}
        specs = [jax.ShapeDtypeStruct(shape, dtypes.get(n, "float32")) for n, shape in enumerate(shapes)]

        def tagged(*inputs):
            return jax.tree.map(lambda leaf: checkpoint_name(leaf, "output"), function(*inputs))

        self.flow = flow_of(jax.make_jaxpr(tagged)(*specs), PARTS, len(shapes) if trained is None else trained)
        self.inputs = [self.flow.nodes(dims) for dims in self.flow.inputs]
        self.outputs = [self.flow.nodes(each.dims) for each in self.flow.tagged]

    def sums(self, node):
        """Bytes that are all-reduced where a node is sharded."""
        return self.flow.sums().get(node, 0)

    def moves(self, node):
        """Bytes that are gathered where a node is sharded."""
        return self.flow.moves().get(node, 0)


def test_dims_that_cannot_be_cut_have_no_node():
    read = Read(lambda x: x, (4, 3, 1, 0))
    assert read.inputs[0][1:] == (None, None, None)
    assert read.inputs[0][0] is not None


def test_columns_of_one_kernel_are_rows_of_the_next():
    read = Read(lambda x, up, down: jax.nn.relu(x @ up) @ down, (6, 4), (4, 8), (8, 4))
    (batch, width), (rows, columns), (rows2, out) = read.inputs
    assert rows == width
    assert columns == rows2
    assert read.outputs == [(batch, out)]
    assert len({batch, width, columns, out}) == 4
    # Forward the output is summed, backward the gradient of the input: 6 x 4 float32 each.
    assert read.sums(columns) == 2 * 6 * 4 * 4
    assert read.sums(batch) == 2 * 4 * 8 * 4  # the gradients of both kernels
    assert read.flow.neighbours()[columns] == {rows, out, batch}


def test_the_gradient_of_what_is_not_trained_is_not_summed():
    read = Read(lambda up, down, x: (x @ up) @ down, (4, 8), (8, 4), (6, 4), trained=2)
    assert read.sums(read.inputs[0][1]) == 6 * 4 * 4


def test_gradients_of_copies_are_summed_once():
    def gated(x, gate, up, down):
        return ((x @ gate) * (x @ up)) @ down

    read = Read(gated, (6, 4), (4, 8), (4, 8), (8, 4))
    assert read.inputs[1] == read.inputs[2]
    assert read.sums(read.inputs[1][1]) == 2 * 6 * 4 * 4


def test_batched_matmul():
    read = Read(lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), (2, 4, 8, 16), (2, 6, 8, 16))
    (batch, queries, heads, size), (batch2, keys, heads2, size2) = read.inputs
    assert (batch, heads, size) == (batch2, heads2, size2)
    assert read.outputs == [(batch, heads, queries, keys)]
    assert read.sums(heads) == 0
    assert read.sums(size) == 2 * 8 * 4 * 6 * 4


def test_elementwise_and_broadcasting():
    read = Read(lambda x, bias, scale: x * scale[None] + bias, (6, 8), (8,), (8,))
    (batch, width), (of_bias,), (of_scale,) = read.inputs
    assert width == of_bias == of_scale
    assert read.sums(width) == 0
    assert read.sums(batch) == 2 * 8 * 4  # the gradients of bias and scale


@pytest.mark.parametrize(
    ("before", "after", "kept", "moved"),
    [
        ((6, 8), (6, 2, 4), [(0, 0), (1, 1)], []),  # split: the outer one goes on
        ((6, 2, 4), (6, 8), [(0, 0), (1, 1)], [2]),  # merged: the inner one is gathered
        ((6, 8), (48,), [(0, 0)], [1]),
        ((6, 8), (6, 1, 8), [(0, 0), (1, 2)], []),
        ((8,), (4, 2), [(0, 0)], []),
        ((4, 6), (6, 4), [(0, 0)], [1]),  # the outermost of both
        ((2, 6), (4, 3), [(0, 0)], [1]),
        ((6, 8), (3, 16), [], [0, 1]),  # 2 does not divide 3, and so no part of 6 goes on
    ],
)
def test_reshape(before, after, kept, moved):
    read = Read(lambda x: x.reshape(after), before)
    [dims], [out] = read.inputs, read.outputs
    assert [(dim, out.index(node)) for dim, node in enumerate(dims) if node in out] == kept
    assert [dim for dim, node in enumerate(dims) if read.moves(node)] == moved


def test_transpose_and_squeeze():
    read = Read(lambda x: jnp.squeeze(x.transpose(2, 0, 1)[None], 0), (2, 4, 6))
    [(a, b, c)] = read.inputs
    assert read.outputs == [(c, a, b)]
    assert not read.flow.moves()


def test_repeated_heads():
    read = Read(lambda k: jnp.repeat(k, 2, axis=2), (2, 4, 8, 16))
    assert read.outputs == read.inputs
    assert not any(read.moves(node) for node in read.inputs[0])


def test_look_up():
    read = Read(lambda table, tokens: table[tokens], (32, 16), (6, 4), dtypes={1: "int32"}, trained=1)
    (vocabulary, width), (batch, length) = read.inputs
    assert read.outputs == [(batch, length, width)]
    assert read.sums(vocabulary) == 6 * 4 * 16 * 4
    assert read.sums(width) == 0
    assert read.sums(batch) == 32 * 16 * 4  # the gradient of the table


def convolution(x, kernel, groups=1, strides=(1, 1)):
    return lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def test_convolution():
    read = Read(convolution, (2, 8, 8, 4), (3, 3, 4, 16))
    (batch, height, _, channels), (*_, of_kernel, filters) = read.inputs
    assert channels == of_kernel
    assert (read.outputs[0][0], read.outputs[0][3]) == (batch, filters)
    assert read.sums(channels) == 2 * 8 * 8 * 16 * 4
    assert read.moves(height) > 0
    assert (height, 4) in read.flow.slid_over
    assert {read.outputs[0][1], read.outputs[0][2]} <= {node for node, _ in read.flow.slid_over}


def test_a_window_of_one_does_not_slide():
    assert not Read(convolution, (2, 8, 8, 4), (1, 1, 4, 16)).flow.slid_over


def test_depthwise_convolution():
    read = Read(lambda x, kernel: convolution(x, kernel, 8), (2, 8, 8, 8), (3, 3, 1, 8))
    channels, filters = read.inputs[0][3], read.inputs[1][3]
    assert channels == filters == read.outputs[0][3]
    assert read.sums(channels) == 0


def test_concatenate_slice_and_split():
    read = Read(lambda x, y: jnp.concatenate([x, y], 1)[:, 2:6], (6, 4), (6, 4))
    (batch, left), (batch2, right) = read.inputs
    assert batch == batch2 == read.outputs[0][0]
    assert read.outputs[0][1] not in (left, right)
    assert min(read.moves(left), read.moves(right)) > 0
    read = Read(lambda x: tuple(jnp.split(x, 2, axis=1)), (6, 8))
    assert [out[0] for out in read.outputs] == [read.inputs[0][0]] * 2
    assert read.moves(read.inputs[0][1]) > 0


def test_softmax_sums_little_over_what_it_is_taken_of():
    read = Read(lambda x: jax.nn.softmax(x, axis=-1), (6, 8))
    [(batch, classes)] = read.inputs
    assert read.outputs == [(batch, classes)]
    assert 0 < read.sums(classes) <= 4 * 6 * 4  # maximum and sum, forward and backward
    assert read.sums(batch) == 0


@pytest.mark.parametrize("function", [lambda x: lax.top_k(x, 2)[0], lambda x: jnp.sort(x, -1), lambda x: x.cumsum(-1)])
def test_what_runs_along_a_dim_gathers_it(function):
    read = Read(function, (6, 8))
    [(batch, last)] = read.inputs
    assert read.outputs[0][0] == batch
    assert read.outputs[0][1] != last
    assert read.moves(last) > 0
    assert read.moves(batch) == 0


def test_scan_joins_what_is_carried_and_counts_turns():
    def recurrent(x, kernel, state):
        return lax.scan(lambda state, step: (jnp.tanh(step + state @ kernel), None), state, x)[0]

    read = Read(recurrent, (5, 6, 8), (8, 8), (6, 8))
    (_, batch, width), (rows, columns), (batch2, width2) = read.inputs
    assert width == width2 == rows == columns  # a state that is multiplied and carried on
    assert batch == batch2
    assert read.sums(rows) >= 5 * 6 * 8 * 4


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
def test_branches_loops_and_calls_join_what_they_take(function):
    read = Read(function, (6, 8), (6, 8))
    assert read.inputs[0] == read.inputs[1] == read.outputs[0]


def test_custom_vjp_is_read_through():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    read = Read(lambda x, kernel: double(x @ kernel), (6, 4), (4, 8))
    assert read.outputs == [(read.inputs[0][0], read.inputs[1][1])]


@pytest.mark.parametrize(
    "function",
    [jnp.linalg.cholesky, jnp.fft.fft2, lambda x: lax.linalg.triangular_solve(x, x), lambda x: jnp.linalg.eigh(x)[1]],
)
def test_linear_algebra_gathers_matrices(function):
    read = Read(function, (2, 8, 8))
    [(_, rows, columns)] = read.inputs
    assert not {rows, columns} & {*read.outputs[0]}
    assert read.moves(rows) > 0
    assert read.moves(columns) > 0


def test_pooling_slides_over_space_and_keeps_channels():
    read = Read(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), (2, 8, 8, 4))
    [(batch, height, width, channels)] = read.inputs
    assert (read.outputs[0][0], read.outputs[0][3]) == (batch, channels)
    assert read.moves(channels) == read.moves(batch) == 0
    assert min(read.moves(height), read.moves(width)) > 0
    assert (height, 4) in read.flow.slid_over


def test_one_expert_after_the_other_is_a_dim_of_its_own():
    def experts(x, up, down, chosen):
        return jnp.einsum("teh,ehd,te->td", jax.nn.gelu(jnp.einsum("td,edh->teh", x, up)), down, chosen)

    read = Read(experts, (6, 4), (8, 4, 16), (8, 16, 4), (6, 8))
    (tokens, width), (expert, width2, hidden), (expert2, hidden2, out), (_, chosen) = read.inputs
    assert (expert, hidden) == (expert2, hidden2)
    assert expert == chosen
    assert width == width2
    assert read.outputs == [(tokens, out)]
    assert read.sums(expert) == pytest.approx(2 * 6 * 4 * 4, rel=0.5)


def test_factors_are_what_is_multiplied_as_a_matrix():
    def function(x, kernel, bias, table):
        return x @ kernel.T + bias + table[np.arange(6)]

    specs = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((6, 4), (8, 4), (8,), (6, 8))]
    jaxpr = jax.make_jaxpr(function)(*specs)
    flow = flow_of(jaxpr, PARTS, 4)
    assert [variable in flow.factors for variable in jaxpr.jaxpr.invars] == [True, True, False, False]
