"""Patches of Keras's global for the active distribution, and of where variables ask it for their layout."""

from keras_dist._keras import active_distribution
from keras_dist._keras.active_distribution import ALWAYS, INSTALLED
from keras_dist._keras.global_state import is_clearing_session
from keras_dist._keras.internals import GLOBAL_NAME, JaxVariable, global_state
from keras_dist._keras.quantized_weights import record_creation


@ALWAYS.patch(global_state, "set_global_attribute")
def _set_global_attribute(original, name, value):
    """Without it, `keras.distribution.set_distribution` installs no patches for a distribution of keras_dist."""
    if name == GLOBAL_NAME:
        if value is not None or not is_clearing_session():
            active_distribution.set_by_keras(value)
    else:
        original(name, value)


@INSTALLED.patch(global_state, "get_global_attribute", every_thread=True)
def _get_global_attribute(original, name, default=None, set_to_default=False):
    """Without it, the distribution is lost in `clear_session()`, and other threads do not see it."""
    if name == GLOBAL_NAME and active_distribution.is_unset():
        return active_distribution.fallback()
    return original(name, default, set_to_default)


@INSTALLED.patch(JaxVariable, "_initialize_layout", every_thread=True)
def _initialize_layout(original, self):
    """Without it, Keras does not record whether a variable's layout comes from the user or from which distribution, nor
    what float weight a variable of a quantized layer stores.
    """
    distribution = active_distribution.active_distribution()
    if distribution is None:
        active_distribution.warn_of_other_scopes(self.path)
        return original(self)
    was_passed = self._layout is not None
    record_creation(self)
    original(self)
    if not was_passed and self._layout is not None:
        active_distribution.record_distribution(self, distribution)
