"""Patches of recurrent layers: each device computes all positions of the rows that it holds, by cuDNN or in a loop."""

import keras
from jax.experimental import rnn
from jax.sharding import PartitionSpec

from keras_dist._keras.active_distribution import INSTALLED
from keras_dist.layout.tensor_layout import axis_names


@INSTALLED.patch(keras.layers.RNN, "call")
def _call_recurrent(original, distribution, self, sequences, initial_state=None, mask=None, training=False):
    """Without it, a loop over a sequence that is sharded over devices sends data between them at every position."""
    sequences, mask = distribution.sequences.gather((sequences, mask))
    outputs = original(self, sequences, initial_state=initial_state, mask=mask, training=training)
    if not self.return_sequences:
        return outputs
    if not self.return_state:
        return distribution.sequences.shard(outputs)
    return distribution.sequences.shard(outputs[0]), *outputs[1:]


@INSTALLED.patch(rnn, "lstm")
def _lstm(original, distribution, x, h_0, c_0, weights, seq_lengths, *args, **kwargs):
    """Without it, cuDNN's LSTM, which Keras uses on GPUs, is not partitioned: each device computes the global batch."""
    arrays = x, h_0, c_0, weights
    if any(array.dtype != "float32" for array in arrays):
        # JAX fails when it lowers the call. Keras catches this error, and computes the layer in a loop.
        raise TypeError(
            f"cuDNN's LSTM computes in float32 only, but got {', '.join(str(array.dtype) for array in arrays)}. Cast "
            "the arrays, or use keras.layers.LSTM, which computes in a loop then."
        )
    sharding = distribution.batch_sharding(x.shape[:1])
    rows = sharding.spec  # over no axis if none divides the rows
    states = PartitionSpec(None, *rows)
    outputs, *last_states = distribution.layer_calls.call_per_device(
        lambda *arrays: original(*arrays, *args, **kwargs),
        sharding.mesh,
        (*arrays, seq_lengths),
        specs=(rows, states, states, PartitionSpec(), rows),
        out_spec=(rows, states, states),
        summed_axes=((), (), (), tuple(axis_names(rows))),  # the gradient of the weights
    )
    return distribution.sequences.shard(outputs), *last_states
