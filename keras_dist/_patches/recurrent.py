"""Patch of cuDNN's LSTM, which Keras calls on GPUs: each device computes the rows that it holds."""

import functools
from typing import Any

import jax
from jax.experimental import rnn
from jax.sharding import PartitionSpec

from keras_dist._keras.active_distribution import INSTALLED


@INSTALLED.patch(
    rnn,
    "lstm",
    reason="cuDNN's LSTM, which Keras calls on GPUs, cannot be partitioned: every device computes the global batch",
)
def _lstm(
    original,
    distribution,
    x,
    h_0,
    c_0,
    weights,
    seq_lengths,
    input_size,
    hidden_size,
    num_layers,
    dropout,
    bidirectional,
    precision=None,
):
    arrays = x, h_0, c_0, weights
    settings: Any = input_size, hidden_size, num_layers, dropout, bidirectional, precision
    if any(array.dtype != "float32" for array in arrays):
        # JAX fails when it lowers the call. Keras catches this error, and computes the layer in a loop.
        raise TypeError(
            f"cuDNN's LSTM computes in float32 only, but got {', '.join(str(array.dtype) for array in arrays)}. Cast "
            "the arrays, or use keras.layers.LSTM, which computes in a loop then."
        )
    sharding = distribution.batch_sharding(x.shape)
    mesh, rows = sharding.mesh, sharding.spec  # over no axis if none divides the rows
    if mesh.size == 1 or jax.sharding.get_abstract_mesh().manual_axes:
        return original(*arrays, seq_lengths, *settings)
    # All axes are manual, because XLA cannot partition the call over any. `jax.shard_map` would differentiate such a
    # block by reducing gradients over the axes that replicate it too, so it is told how: by a block of its own.
    states = PartitionSpec(None, *rows)
    inputs, outputs = (rows, states, states, PartitionSpec(), rows), (rows, states, states)
    residuals = *inputs, rows, rows  # besides the inputs, the outputs of all steps and cuDNN's reserve space
    shard_map = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    @functools.partial(shard_map, in_specs=inputs, out_specs=(outputs, residuals))
    def forward(*arrays):
        return rnn.lstm_fwd(*arrays, *settings)

    @functools.partial(shard_map, in_specs=(residuals, outputs), out_specs=inputs)
    def backward(residuals, gradients):
        *of_rows, of_weights, of_lengths = rnn.lstm_bwd(*settings, residuals=residuals, gradients=gradients)
        return *of_rows, jax.lax.psum(of_weights, rows[0]) if rows else of_weights, of_lengths

    lstm = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    lstm.defvjp(forward, backward)
    return lstm(*arrays, seq_lengths)
