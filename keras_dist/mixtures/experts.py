"""`experts`: a mixture of experts for authors of layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name

from keras_dist.mixtures.choices import CHOSEN_EXPERTS


def experts(function: Callable, tokens: Any, chosen: Any, gates: Any, *weights: Any) -> jax.Array:
    """Returns for each token the sum of what its chosen experts compute, times their gates.

    Under a distribution of keras_dist each device computes the chosen experts of its tokens only, whichever way they
    were chosen. Otherwise all experts are computed for all tokens, with the same result.

    Args:
        function: What an expert computes. It is called with tokens (T, width) and the weights of one expert, and
            returns (T, outputs). It computes each token alone.
        tokens: Tokens, (..., width).
        chosen: Indices of the experts that each token chooses, (..., k), of an integer dtype. Those of a token differ.
        gates: Their factors, (..., k).
        weights: Weights of all experts, arrays or variables, each (experts, ...).

    Returns:
        The sums, (..., outputs).

    Raises:
        ValueError: The shapes do not suit each other, or `chosen` has no integers.

    Example: a layer whose experts are chosen by other scores than they are weighed by.

    >>> class Experts(keras.layers.Layer):
    ...     def build(self, shape):
    ...         self.router = self.add_weight(shape=(shape[-1], 8))
    ...         self.bias = self.add_weight(shape=(8,), initializer="zeros", trainable=False)
    ...         self.up = self.add_weight(shape=(8, shape[-1], 32))
    ...         self.down = self.add_weight(shape=(8, 32, shape[-1]))
    ...
    ...     def call(self, x):
    ...         scores = keras.ops.sigmoid(x @ self.router)
    ...         chosen = keras.ops.argsort(scores + self.bias, axis=-1)[..., -2:]
    ...         gates = keras.ops.take_along_axis(scores, chosen, axis=-1)
    ...         expert = lambda x, up, down: keras.ops.relu(x @ up) @ down
    ...         return experts(expert, x, chosen, gates, self.up, self.down)
    >>> Experts()(keras.ops.ones((4, 5, 16))).shape
    (4, 5, 16)
    """
    values: list[Any] = [keras.ops.convert_to_tensor(each) for each in (tokens, chosen, gates, *weights)]
    tokens, chosen, gates, *arrays = values
    _check(tokens, chosen, gates, arrays)
    num_experts = arrays[0].shape[0]
    chosen = checkpoint_name(chosen.astype("int32"), f"{CHOSEN_EXPERTS}{num_experts}").reshape(-1, chosen.shape[-1])
    is_chosen = chosen[..., None] == jnp.arange(num_experts, dtype=chosen.dtype)
    gates_of_all = jnp.where(is_chosen, gates.reshape(-1, gates.shape[-1], 1), 0).sum(1)  # (T, E)
    outputs = jax.vmap(function, (None, *[0] * len(arrays)))(tokens.reshape(-1, tokens.shape[-1]), *arrays)
    if outputs.ndim != 3:
        raise ValueError(
            f"The function of experts has to return (T, outputs) for T tokens, but returned {outputs.shape[1:]} for "
            f"tokens {tokens.reshape(-1, tokens.shape[-1]).shape}."
        )
    sums = jnp.einsum("etn,te->tn", outputs, gates_of_all.astype(outputs.dtype))
    return sums.reshape(*tokens.shape[:-1], -1)


def _check(tokens: Any, chosen: Any, gates: Any, weights: list[Any]) -> None:
    shapes = f"tokens {tokens.shape}, chosen {chosen.shape}, gates {gates.shape}, weights {[w.shape for w in weights]}"
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise ValueError(
            f"chosen has dtype {chosen.dtype}, and has to have indices of experts. Cast them to 'int32', or pass the "
            "indices that keras.ops.top_k returns beside the values."
        )
    if chosen.shape != gates.shape or chosen.shape[:-1] != tokens.shape[:-1]:
        raise ValueError(
            f"experts takes tokens (..., width), and chosen and gates (..., k) of the same tokens. Received: {shapes}."
        )
    if not weights or len({each.shape[:1] for each in weights}) > 1 or not weights[0].shape:
        raise ValueError(f"experts takes weights (experts, ...) with one size of dim 0. Received: {shapes}.")
    num_chosen, num_experts = chosen.shape[-1], weights[0].shape[0]
    if num_chosen > num_experts:
        raise ValueError(f"A token cannot choose {num_chosen} of {num_experts} experts. Received: {shapes}.")
