"""What went wrong while a model was traced: the error behind those that Keras raises in its place."""

import re
import traceback

import jax
import keras

# Raised where Python needs a value or a shape that is known only when the program runs.
_DATA_DEPENDENT = (
    jax.errors.ConcretizationTypeError,  # also the base of TracerBoolConversionError
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def describe(error: BaseException) -> str:
    """Returns what was raised, where and why in one line, such as "ValueError in Dense.call(): ...".

    >>> describe(ValueError("no rows"))
    'ValueError: no rows'
    """
    while isinstance(error, RuntimeError) and error.__context__ is not None:
        error = error.__context__  # Keras wraps what went wrong
    text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())
    if caller := re.search(r"Exception encountered when calling (.*?)\.(?= |$)", text):
        text = text.replace(caller[0], "", 1).split(" Arguments received by ")[0].strip()
    where = f" in {caller[1]}" if caller else ""
    return f"{type(error).__name__}{where}: {text[:400].rstrip('.')}"


def describe_dependence_on_values(error: BaseException) -> str | None:
    """Returns which layer needs a value or a shape too early, and the fix; None if an error does not come from that.

    Keras fails to add its own text to most of JAX's errors for it, so that others are raised in their place.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _DATA_DEPENDENT):
        cause = cause.__context__
    if cause is None:
        return None
    frames = (frame for frame, _ in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_name == "call")
    callers = [frame.f_locals.get("self") for frame in frames]
    layers = [type(caller).__name__ for caller in callers if isinstance(caller, keras.Layer)]
    return (
        f"{f'{layers[-1]}.call()' if layers else 'the model'} depends on the values of its inputs in Python or in a "
        f"shape, which a compiled step cannot ({type(cause).__name__}). Use operations of static shape, such as "
        "keras.ops.where and keras.ops.cond."
    )
