"""The dtype of optimizer state."""

import jax.numpy as jnp
import keras

# The attribute of an optimizer with the fraction of a state variable that a step keeps, by the name of the variable.
_KEPT = {
    "momentum": ("beta_1", "momentum"),
    "velocity": ("beta_2", "rho"),
    "norm": ("beta_2",),
    "average_gradient": ("rho",),
    "accumulated_grad": ("rho",),
    "accumulated_delta_var": ("rho",),
}


def state_dtype(optimizer: keras.optimizers.Optimizer, name: str | None, dtype: str, wanted: str | None) -> str:
    """Returns the dtype of a state variable of an optimizer.

    A moving average keeps a fraction of its value in each step, and what a step adds is lost if it is less than the
    precision of the dtype. Sums, and averages of weights, keep the dtype of their weight, `dtype`, as all state does if
    none is `wanted`. `name` is that of the variable, such as "momentum".

    Example:

    >>> adam = keras.optimizers.Adam(beta_1=0.9, beta_2=0.999)  # bfloat16 has a precision of 1/128
    >>> [state_dtype(adam, name, "float32", "bfloat16") for name in ("momentum", "velocity")]
    ['bfloat16', 'float32']
    """
    if wanted is None or "float" not in dtype:
        return dtype
    kept = [getattr(optimizer, attribute, None) for attribute in _KEPT.get(name or "", ())]
    fractions = [fraction for fraction in kept if isinstance(fraction, (int, float))]
    return wanted if fractions and 1 - fractions[0] >= float(jnp.finfo(wanted).eps) else dtype


def require_state_dtype(optimizer: keras.optimizers.Optimizer, wanted: str | None) -> None:
    """Raises ValueError if an optimizer that is built holds no state in the dtype that is asked for."""
    if wanted is None or any(str(variable.dtype) == wanted for variable in optimizer.variables):
        return
    raise ValueError(
        f"optimizer_state_dtype={wanted!r} has no effect: {type(optimizer).__name__} was built without it, or has no "
        "moving average that a step changes by more than the precision of that dtype. Set the distribution before "
        "model.compile, use an optimizer with momentum, or leave the option out."
    )
