"""Small functions around private names of Keras.

Only `_keras` and `_patches` use private names, so a new version of Keras needs changes in these two rooms only.
"""

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def _require_jax_backend() -> None:
    if "keras" in sys.modules:
        import keras

        backend, where = keras.config.backend(), "Keras was imported with the backend"
    else:
        backend, where = os.environ.get("KERAS_BACKEND") or "jax", "KERAS_BACKEND is"
        os.environ["KERAS_BACKEND"] = backend
    if backend != "jax":
        raise ValueError(
            f"keras_dist needs Keras's JAX backend, but {where} {backend!r}. "
            "Set the environment variable KERAS_BACKEND=jax before Keras is imported."
        )


_require_jax_backend()

import jax  # noqa: E402  (the backend is chosen first)
import keras  # noqa: E402


def unsupported_keras(problem: object) -> str:
    return (
        f"keras_dist does not support Keras {keras.__version__}: {problem}. Install a release of Keras that "
        "keras_dist's docs/keras_versions.md lists, or a newer keras_dist."
    )


@contextlib.contextmanager
def missing_names_are_errors() -> Iterator[None]:
    """Raises one error about the installed Keras for what a block imports or looks up and Keras does not have."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(unsupported_keras(error)) from error


with missing_names_are_errors():
    from keras.src.backend import jax as _jax_backend
    from keras.src.backend.common import global_state as global_state
    from keras.src.backend.common import standardize_dtype as standardize_dtype
    from keras.src.backend.common import variables
    from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
    from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
    from keras.src.backend.common.name_scope import current_path as current_path
    from keras.src.backend.common.remat import get_current_remat_mode
    from keras.src.backend.common.stateless_scope import StatelessScope, get_stateless_scope
    from keras.src.backend.common.stateless_scope import in_stateless_scope as in_stateless_scope
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope
    from keras.src.backend.common.variables import AutocastScope as AutocastScope
    from keras.src.backend.jax import distribution_lib as backend_lib
    from keras.src.backend.jax import optimizer as jax_optimizer  # noqa: F401
    from keras.src.backend.jax import trainer as trainer
    from keras.src.distribution import distribution_lib
    from keras.src.legacy.saving import legacy_h5_format as legacy_h5_format
    from keras.src.losses import loss as loss_lib  # noqa: F401
    from keras.src.ops import function as function_lib  # noqa: F401
    from keras.src.optimizers import base_optimizer
    from keras.src.random.seed_generator import draw_seed as draw_seed
    from keras.src.saving import saving_api as saving_api
    from keras.src.saving import saving_lib as saving_lib
    from keras.src.utils import file_utils as file_utils
    from keras.src.utils.jax_utils import is_in_jax_tracing_scope as is_in_jax_tracing_scope

    # Since 3.16, the operations of a backend are a package of their own, and its classes have shorter names.
    _operations: Any = getattr(_jax_backend, "ops", _jax_backend)
    jax_core, nn = _operations.core, _operations.nn
    remat_lib: Any = getattr(_jax_backend, "ops", jax_core)  # where Keras looks up `remat`

    KerasDistribution = distribution_lib.Distribution
    KerasOptimizer = base_optimizer.BaseOptimizer
    KerasVariable = variables.Variable
    JaxVariable: Any = getattr(jax_core, "JaxVariable", jax_core.Variable)
    JaxTrainer: Any = getattr(trainer, "JAXTrainer" if hasattr(trainer, "JAXTrainer") else "Trainer")
    DEFAULT_BATCH_DIM_NAME = distribution_lib.DEFAULT_BATCH_DIM_NAME
    GLOBAL_NAME = distribution_lib.GLOBAL_ATTRIBUTE_NAME
    current_distribution = distribution_lib.distribution  # of this package or of Keras, or None

STEPS = ("train", "test", "predict")


@contextlib.contextmanager
def attributes_replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of an object for a block. Not by assignment, by which models track what they have."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
        for name in values.keys() - before.keys():
            del vars(owner)[name]


def initialize(job_addresses: str | None, num_processes: int | None, process_id: int | None, start: Callable) -> None:
    """Starts JAX's multi-process runtime as Keras does, by `start(jax.distributed.initialize, ...)`."""
    with attributes_replaced(jax.distributed, initialize=functools.partial(start, jax.distributed.initialize)):
        backend_lib.initialize(job_addresses, num_processes, process_id)


def as_sharding(layout: Any) -> Any:
    """Returns a layout as a JAX sharding; JAX's own layouts, and None, are returned unchanged."""
    return layout.backend_layout if isinstance(layout, keras.distribution.TensorLayout) else layout


def stored_dtype(variable) -> str:
    """Returns the dtype of the value of a variable, or of its `VariableSpec`.

    That of `variable.dtype` is the one that an autocast scope reads it as.
    """
    return getattr(variable, "_dtype", None) or variable.dtype


def stored_bytes(variable) -> int:
    """Returns the bytes of the value of a variable, or of its `VariableSpec`."""
    return math.prod(variable.shape) * jax.numpy.dtype(stored_dtype(variable)).itemsize


def variable_layout(variable):
    """Returns the layout of a variable: a TensorLayout, a JAX layout, or None."""
    return getattr(variable, "_layout", None)


def variable_value(variable):
    """Returns the array of a variable; None while it is deferred, and while a step runs that has taken it."""
    return getattr(variable, "_value", None)


def place_variable(variable, layout, value) -> None:
    """Sets the layout of a variable (None: no distribution), and its value in that layout unless it is None."""
    variable._layout = layout
    if value is not None:
        variable._value, variable._initializer = value, None  # of a deferred variable


def weights_of_optimizer(optimizer) -> list:
    return optimizer._trainable_variables


def is_random_state(path: str) -> bool:
    return path.endswith("seed_generator_state")


def gradient_accumulators(optimizer, weights: Sequence) -> list | None:
    """Returns the variables in which an optimizer adds up gradients of weights; None unless it adds up those of all."""
    if not getattr(optimizer, "gradient_accumulation_steps", None) or not optimizer.built:
        return None
    index = optimizer._trainable_variables_indices
    if any(id(weight) not in index or optimizer._overwrite_variable_with_gradient(weight) for weight in weights):
        return None
    return [optimizer._accumulated_gradients[index[id(weight)]] for weight in weights]


def iterations(optimizer):
    """Returns the variable in which an optimizer counts batches."""
    return optimizer._iterations


def computes_train_step_as_keras(model) -> bool:
    is_compiled = model.compiled and model.jit_compile and not model.run_eagerly
    return is_compiled and type(model).train_step is JaxTrainer.train_step


def compiles_steps(model) -> bool:
    """Whether Keras compiles the steps of a model by `jax.jit`, not by `nnx.jit`."""
    return model.jit_compile and not model.run_eagerly and not keras.config.is_nnx_enabled()


def is_embedding_table(path: str) -> bool:
    return path.endswith("/embeddings")


def set_keras_masks(arrays: Sequence[Any], masks: Sequence[Any]) -> None:
    """Gives each array its mask, where that is not None."""
    for array, mask in zip(arrays, masks, strict=True):
        if mask is not None:
            set_keras_mask(array, mask)


def in_scope_without_losses() -> bool:
    """Returns whether layers are called in a `StatelessScope` that collects no losses, as by `generate()`."""
    scope = get_stateless_scope()
    return scope is not None and not scope.collect_losses


def forget_losses(layer) -> None:
    """Forgets what losses the layers have added in other scopes: Keras finds them by `id`, which new ones could get."""
    scope = get_stateless_scope()
    known = () if scope is None else set(map(id, scope.losses))
    for each in layer._flatten_layers():
        each._loss_ids.intersection_update(known)


def rematerialized(layer, call: Callable, checkpoint: Callable[[Callable], Callable]):
    """Calls a function in a stateless scope, by `checkpoint(function)()`, such as `jax.checkpoint`.

    What the backward pass computes again includes gathering weights. Updates of variables (random generators, moving
    averages) go to the scope, as in a plain call, and so do losses, which are those of the layer.
    """
    outer: Any = get_stateless_scope()
    # Keras finds the losses of a layer by `id`. Those of the trace are kept as long as the scope, or else another loss
    # could get the id of one, and count twice.
    traced_losses = vars(outer).setdefault("_traced_losses", [])
    keys: list[int] = []  # of changed values: ids, on which the program would depend if it returned them

    def function():
        with StatelessScope(collect_losses=outer.collect_losses) as inner:
            inner.state_mapping = dict(outer.state_mapping)
            vars(inner)["_traced_losses"] = traced_losses
            outputs = call()
        traced_losses.extend(inner.losses)
        known = outer.state_mapping
        changed = {key: value for key, value in inner.state_mapping.items() if value is not known.get(key)}
        keys[:] = changed
        masks = [get_keras_mask(leaf) for leaf in jax.tree.leaves(outputs)]
        return outputs, masks, list(changed.values()), inner.losses

    outputs, masks, changed, losses = checkpoint(function)()
    set_keras_masks(jax.tree.leaves(outputs), masks)
    outer.state_mapping.update(zip(keys, changed, strict=True))
    for loss in losses:
        outer.add_loss(loss)
        if isinstance(layer, keras.Layer):
            layer._loss_ids.add(id(loss))
    return outputs


def has_attention(layer) -> bool:
    return hasattr(layer, "_compute_attention")


def attention_replaced(layer, compute: Callable[[Callable[[], Any]], Any]) -> contextlib.AbstractContextManager:
    """Computes the attention of a layer by `compute`, which is passed a function that does, for a block."""
    original = layer._compute_attention
    return attributes_replaced(
        layer, _compute_attention=lambda *args, **kwargs: compute(lambda: original(*args, **kwargs))
    )


@contextlib.contextmanager
def remat_scope_applied(model, scope) -> Iterator[None]:
    """Makes a `keras.RematScope` that of all layers of a model for a block, as if they had been created in it."""
    with scope:
        mode = get_current_remat_mode()
    with contextlib.ExitStack() as stack:
        for layer in model._flatten_layers():
            stack.enter_context(attributes_replaced(layer, _remat_mode=mode))
        yield


# -------------------------------------------------------------------------------------------- a step as a function


def unbuilt_parts_replaced(model) -> contextlib.AbstractContextManager:
    """Replaces a model's optimizer, loss and metrics that are not built by copies, for a block that builds them."""
    unbuilt = {name: part for name in _PARTS if (part := vars(model).get(name)) is not None and not part.built}
    return attributes_replaced(model, **{name: _PARTS[name](part) for name, part in unbuilt.items()})


_PARTS: dict[str, Callable] = {
    "optimizer": lambda part: type(part).from_config(part.get_config()),
    "_compile_loss": lambda part: type(part)(
        part._user_loss, part._user_loss_weights, part.reduction, part.output_names
    ),
    "_compile_metrics": lambda part: type(part)(
        part._user_metrics, part._user_weighted_metrics, output_names=part.output_names
    ),
}


def set_initial_epoch(model, epoch: int | None) -> None:
    """Sets the epoch at which the next `fit` of a model begins; None: at its `initial_epoch`."""
    model._initial_epoch = epoch


def config_and_files(model) -> tuple[str, dict | None]:
    """Returns what Keras saves of a model beside its variables: its config as JSON, and its assets."""
    return saving_lib._serialize_model_as_json(model)[0], saving_lib._save_assets_to_dict(model)


def unbuilt_metrics(model) -> list:
    """Returns the metrics that a model was compiled with, if it has not built them yet."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None or compiled.built:
        return []
    given = jax.tree.leaves((compiled._user_metrics, compiled._user_weighted_metrics))
    return [metric for metric in given if isinstance(metric, keras.metrics.Metric)]


def symbolic_build(model, data) -> None:
    """Creates the variables of a model, its loss and its metrics from symbolic tensors of a batch."""
    model._symbolic_build(data_batch=data)


def is_read_in_compute_dtype(variable) -> bool:
    """Returns whether all that a train step reads of a weight is its value cast to the compute dtype of its layer."""
    return variable._autocast and variable.regularizer is None and "float" in stored_dtype(variable)
