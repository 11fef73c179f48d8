"""Grouped matrix products: each row times the weights of its expert, by what suits the device."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from keras_dist.mixtures.batched import product_batched, weight_gradient_batched
from keras_dist.mixtures.blocks import product_in_blocks, weight_gradient_in_blocks
from keras_dist.mixtures.kernels import (
    product_by_megablox,
    product_by_mosaic,
    weight_gradient_by_megablox,
    weight_gradient_by_mosaic,
    why_not_mosaic,
)
from keras_dist.tracing.jaxpr_evaluation import scope_of

GROUPED_PRODUCT = "grouped_product"
"""The scope of the operations of grouped products and their derivatives, with the number of rows that count."""

_NUM_ROWS = re.compile(GROUPED_PRODUCT + r"(\d+\.\d+)")


class _Form(NamedTuple):
    """A way to compute grouped products and their derivatives."""

    product: Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]
    weight_gradient: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


_FORMS = {
    "megablox": _Form(product_by_megablox, weight_gradient_by_megablox),
    "mosaic": _Form(product_by_mosaic, weight_gradient_by_mosaic),
    "blocks": _Form(product_in_blocks, weight_gradient_in_blocks),
    "batched": _Form(product_batched, weight_gradient_batched),
}


class ChosenForm(NamedTuple):
    """Which form computes grouped products on a device."""

    name: str  # "megablox", "mosaic", "blocks" or "batched"
    reason: str | None  # why it is not the fastest one of this kind of device; None if it is


def grouped_product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    form: str,
    filled: float = 1.0,
    gates: jax.Array | None = None,
) -> jax.Array:
    """Multiplies each row with the weights of its expert, and with its gate.

    It is exact under any routing: experts may have no rows, or one all. The derivative by the weights is summed in
    float32. If there are more rows than the sum of `sizes`, the last ones are undefined, also in the derivatives by the
    rows and the gates, and do not change the derivative by the weights.

    Args:
        rows: Rows sorted by expert (R, K): the first `sizes[0]` are those of expert 0, and so on.
        weights: Weights of all experts (E, K, N), of the dtype of the rows.
        sizes: Number of rows of each expert (E,), int32.
        form: How to compute it, as `choose_form` returns it: `"megablox"`, `"mosaic"`, `"blocks"` or `"batched"`.
        filled: The fraction of the rows that `sizes` has on average, by which FLOP are counted.
        gates: A number for each row (R,), of the dtype of the rows; None to multiply with the weights only.

    Returns:
        The products (R, N), of the dtype of the rows.

    Raises:
        ValueError: The shapes or dtypes do not suit each other, or the form is unknown.

    Example:

    >>> rows, weights = jax.numpy.ones((3, 4)), jax.numpy.stack([jax.numpy.eye(4), 2 * jax.numpy.eye(4)])
    >>> grouped_product(rows, weights, jax.numpy.array([1, 2], "int32"), "blocks")[:, 0].tolist()
    [1.0, 2.0, 2.0]
    """
    _require_operands(rows, weights, sizes, form)
    return _grouped_product(rows, weights, sizes, gates, form, filled)


def _require_operands(rows: Any, weights: Any, sizes: Any, form: str) -> None:
    received = ", ".join(
        f"{name} {each.dtype}{list(each.shape)}"
        for name, each in (("rows", rows), ("weights", weights), ("sizes", sizes))
    )
    if form not in _FORMS:
        raise ValueError(f"Unknown form {form!r} of a grouped product. Choose one of {', '.join(map(repr, _FORMS))}.")
    if (rows.ndim, weights.ndim, sizes.shape) != (2, 3, weights.shape[:1]) or rows.shape[1] != weights.shape[1]:
        raise ValueError(
            f"A grouped product takes rows (R, K), weights (E, K, N) and sizes (E,). Received: {received}."
        )
    if rows.dtype != weights.dtype or sizes.dtype != jnp.int32:
        raise ValueError(
            f"A grouped product takes rows and weights of one dtype, and int32 sizes. Received: {received}. Cast them."
        )


# `grouped_product_flops` finds these two in a traced program, by their names.
@functools.partial(jax.jit, static_argnames=("form", "filled", "transposed"))
def grouped_rows(rows, weights, sizes, form, filled, transposed):
    with _scope(rows, filled):
        return _FORMS[form].product(rows, weights, sizes, transposed)


@functools.partial(jax.jit, static_argnames=("form", "filled"))
def grouped_weight_gradient(rows, gradient, sizes, form, filled):
    with _scope(rows, filled):
        return _FORMS[form].weight_gradient(rows, gradient, sizes)


def _scope(rows, filled):
    return jax.named_scope(f"{GROUPED_PRODUCT}{filled * rows.shape[0]:.1f}")


def filled_rows(scope: str) -> float | None:
    """Returns how many rows an operation of a grouped product has on average, without padding; None for others.

    Example:

    >>> filled_rows("jit(step)/moe/grouped_product12.8/pallas_call"), filled_rows("jit(step)/moe/add")
    (12.8, None)
    """
    found = _NUM_ROWS.search(scope)
    return None if found is None else float(found[1])


def grouped_product_flops(equation: Any) -> float | None:
    """Returns the FLOP, 2 per multiply-add, of an equation that calls a grouped product or its derivative; else None.

    They are those of the rows that there are on average, although a form may compute more.
    """
    if equation.params.get("name") not in ("grouped_rows", "grouped_weight_gradient"):
        return None
    first, second = (variable.aval.shape for variable in equation.invars[:2])
    inner = equation.params["jaxpr"].eqns
    num_rows = next((filled for each in inner if (filled := filled_rows(scope_of(each))) is not None), first[0])
    return 2.0 * num_rows * (first[1] * second[1] if len(second) == 2 else math.prod(second[1:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped_product(rows, weights, sizes, gates, form, filled):
    product = grouped_rows(rows, weights, sizes, form, filled, False)
    return product if gates is None else gates[:, None] * product


def _forward(rows, weights, sizes, gates, form, filled):
    return _grouped_product(rows, weights, sizes, gates, form, filled), (rows, weights, sizes, gates)


def _backward(form, filled, saved, gradient):
    rows, weights, sizes, gates = saved
    gradient_of_rows, gradient_of_gates = grouped_rows(gradient, weights, sizes, form, filled, True), None
    if gates is not None:  # as `gates.py` has it
        gradient_of_gates = jnp.sum(gradient_of_rows.astype("float32") * rows, 1).astype(gates.dtype)
        # Without a barrier, XLA would compute the gated rows in the forward pass, and keep them.
        gates, gradient_of_rows = jax.lax.optimization_barrier((gates, gradient_of_rows))
        rows, gradient_of_rows = gates[:, None] * rows, gates[:, None] * gradient_of_rows
    gradient_of_weights = grouped_weight_gradient(rows, gradient, sizes, form, filled)
    return gradient_of_rows, gradient_of_weights, None, gradient_of_gates


_grouped_product.defvjp(_forward, _backward)


def choose_form(device: Any, num_rows: int, weights_shape: tuple[int, int, int], dtype: Any) -> ChosenForm:
    """Chooses how a device computes grouped products of rows with weights (E, K, N).

    `device` is a device of the mesh, attached or not, or a mock one.

    Example:

    >>> choose_form(jax.devices("cpu")[0], 1024, (8, 512, 256), "float32")
    ChosenForm(name='blocks', reason=None)
    """
    num_experts, inputs, outputs = weights_shape
    if device.platform == "tpu":
        reason = _why_not_megablox(device, dtype)
        in_xla = "batched" if num_rows >= num_experts else "blocks"
        return ChosenForm("megablox" if reason is None else in_xla, reason)
    if device.platform == "gpu":
        reason = _why_not_hopper(device) or why_not_mosaic(inputs, outputs, dtype)
        if reason is None and num_rows < num_experts:
            reason = f"the Mosaic kernels read the weights of all {num_experts} experts, even for {num_rows} rows"
        return ChosenForm("mosaic" if reason is None else "batched", reason)
    return ChosenForm("blocks", None)


def _why_not_megablox(device: Any, dtype: Any) -> str | None:
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"megablox has no {jnp.dtype(dtype).name}; use the dtype policy 'mixed_bfloat16'"
    if re.match(r"TPU v[23]\b", device.device_kind):
        return f"megablox needs a TPU v4 or later, and this is a {device.device_kind}"
    return None


def _why_not_hopper(device: Any) -> str | None:
    capability = getattr(device, "compute_capability", None)  # mock devices have none
    if str(capability) == "9.0":
        return None
    received = f"has {capability}" if capability else f"is a {device.device_kind!r}"
    return f"the Mosaic kernels need a GPU of compute capability 9.0, such as an H100, and this one {received}"
