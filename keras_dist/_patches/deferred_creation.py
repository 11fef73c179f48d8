"""Patches that create variables without values inside `deferred()`."""

from keras_dist._keras.deferred_variables import DEFERRED, DeferredValue, deferred_initializer, give_value
from keras_dist._keras.internals import JaxVariable, KerasVariable
from keras_dist.variables.variable_layouts import is_on_attached_devices

_REASON = "a variable gets a value when it is created"


@DEFERRED.patch(JaxVariable, "_initialize_with_initializer", reason=_REASON)
def _initialize_with_initializer(original, blocks, self, initializer):
    self._initialize_layout()
    self._value = None
    self._initializer = DeferredValue(initializer, self.path)


@DEFERRED.patch(KerasVariable, "_deferred_initialize", reason=_REASON)
def _deferred_initialize(original, blocks, self):
    # Called for variables of layers that are created while shapes are inferred. Keras drops the initializer after this.
    if not isinstance(self._initializer, DeferredValue):
        self._initialize_with_initializer(self._initializer)


@DEFERRED.patch(JaxVariable, "_initialize", reason=_REASON)
def _initialize(original, blocks, self, value):
    # The value that the user passed stays where it is: a device that is not attached could not hold it.
    self._shape = self._validate_shape(value.shape)
    self._initialize_layout()
    self._value = value


@DEFERRED.patch(JaxVariable, "_direct_assign", reason=_REASON)
def _direct_assign(original, blocks, self, value):
    if deferred_initializer(self) is not None:
        give_value(self, value)
    elif not is_on_attached_devices(self):
        self._value = value
    else:
        original(self, value)
