"""Sums over a number of rounds that is known only while they run.

How many rows a device computes depends on the routing, if its experts are a part of all. It has a buffer for a little
more than their mean, and computes as many rounds as it has full buffers. Balanced routing needs one round, which costs
what it would cost without this: it keeps residuals for the backward pass, and nothing is computed twice. Only the other
rounds are computed again in the backward pass, each for itself, so memory is that of one round under any routing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EXTRA_ROUNDS = "extra_rounds"
"""The scope of the loops over all rounds but the first one. Plans leave them out: balanced routing needs none."""


def summed_in_rounds(
    function: Callable[[Any, Any, Any], Any], num_rounds: jax.Array, arguments: Any, constants: Any
) -> Any:
    """Returns the sum of `function(number, arguments, constants)` over numbers from 0 up to `num_rounds`.

    Gradients flow to the arguments only.

    Args:
        function: What a round computes, a pytree of arrays of the same shapes and dtypes in each round. It is passed
            the number of the round, int32, and may not use traced values but those that it is passed. If it has
            collectives, all devices of their groups must have the same number of rounds.
        num_rounds: Number of rounds, int32, at least 1.
        arguments: Arrays with gradients, a pytree of floating point arrays. Gradients are summed in their dtypes.
        constants: Arrays without, a pytree.

    Example: powers of 3 up to the third.

    >>> powers = lambda number, base, _: base ** (number + 1)
    >>> jax.value_and_grad(lambda base: summed_in_rounds(powers, jax.numpy.int32(3), base, None))(3.0)
    (Array(39., dtype=float32), Array(34., dtype=float32))
    """
    return _summed(function, num_rounds, arguments, constants)


def in_extra_rounds(add_round: Callable[[jax.Array, Any], Any], first: Any, num_rounds: jax.Array) -> Any:
    """Returns the total of all rounds, given that of the first one.

    Args:
        add_round: Returns the total with a round, of the number of the round, int32 and at least 1, and the total of
            those before.
        first: The total after round 0, a pytree of arrays.
        num_rounds: Number of rounds, int32, at least 1.
    """

    def body(state):
        number, total = state
        return number + 1, add_round(number, total)

    with jax.named_scope(EXTRA_ROUNDS):
        return jax.lax.while_loop(lambda state: state[0] < num_rounds, body, (jnp.int32(1), first))[1]


def _with_extra_rounds(first: Any, function: Callable[[jax.Array], Any], num_rounds: jax.Array) -> Any:
    """Adds what a function returns for the numbers of all rounds but the first one."""
    return in_extra_rounds(lambda number, total: jax.tree.map(jnp.add, total, function(number)), first, num_rounds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(function, num_rounds, arguments, constants):
    first = function(np.int32(0), arguments, constants)
    return _with_extra_rounds(first, lambda number: function(number, arguments, constants), num_rounds)


def _forward(function, num_rounds, arguments, constants):
    def of_round(number, arguments):
        return function(number, arguments, constants)

    first, pull = jax.vjp(functools.partial(of_round, np.int32(0)), arguments)
    total = _with_extra_rounds(first, lambda number: of_round(number, arguments), num_rounds)
    return total, (pull, num_rounds, arguments, constants)


def _backward(function, saved, cotangent):
    pull, num_rounds, arguments, constants = saved

    def gradients(number):
        _, pull = jax.vjp(lambda arguments: function(number, arguments, constants), arguments)
        return pull(cotangent)[0]

    return None, _with_extra_rounds(pull(cotangent)[0], gradients, num_rounds), None


_summed.defvjp(_forward, _backward)
