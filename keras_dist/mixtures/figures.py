"""Figures of a step about its mixtures of experts, which it logs."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

EXPERT_LOAD = "expert_load"
"""How many times the mean of all experts the fullest one has; the most of all mixtures of a step."""

EXPERT_DROPS = "expert_drops"
"""The fraction of pairs of a token and an expert that `expert_capacity` leaves out; the mean of all mixtures."""


def capacity_rows(capacity: float, num_pairs: int, num_experts: int) -> int:
    """Returns how many rows an expert computes at most, of the pairs of one device."""
    return max(math.ceil(capacity * num_pairs / num_experts), 1)


def expert_figures(indices: jax.Array, num_experts: int, capacity: float | None = None) -> dict[str, jax.Array]:
    """Returns the figures of one mixture.

    Args:
        indices: The experts that tokens choose, of each device those of its tokens: (devices, pairs). -1: no token.
        num_experts: The number of experts.
        capacity: `StepOptions.expert_capacity`.

    Example:

    >>> figures = expert_figures(jnp.array([[0, 1, 0, 2, 0, 3]]), 4, 1.25)
    >>> {name: float(value) for name, value in figures.items()}
    {'expert_load': 2.0, 'expert_drops': 0.1666666716337204}
    """
    counts = (indices[..., None] == jnp.arange(num_experts, dtype=indices.dtype)).sum(1, dtype="float32")
    total = counts.sum()
    figures = {EXPERT_LOAD: counts.sum(0).max() * num_experts / total}
    if capacity is not None:
        rows = capacity_rows(capacity, indices.shape[1], num_experts)
        figures[EXPERT_DROPS] = jnp.maximum(counts - rows, 0).sum() / total
    return figures


def summed_up(figures: Iterable[tuple[str, jax.Array]]) -> dict[str, jax.Array]:
    """Returns the figures of a step, given those of its mixtures."""
    found: dict[str, list[jax.Array]] = {}
    for name, value in figures:
        found.setdefault(name, []).append(value)
    return {name: (jnp.max if name == EXPERT_LOAD else jnp.mean)(jnp.stack(each)) for name, each in found.items()}
