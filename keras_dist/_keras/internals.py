"""Every private name of Keras that this package touches; nobody else imports one.

Small functions around private names, so that a new Keras is met in one place. What of Keras is replaced, and when, is
in `_patches/training.py`, which takes Keras's modules from here.
"""

import collections
import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any


def _require_jax_backend() -> None:
    if "keras" in sys.modules:
        import keras

        backend, where = keras.config.backend(), "Keras is imported already and runs on"
    elif os.environ.get("KERAS_BACKEND"):
        backend, where = os.environ["KERAS_BACKEND"], "KERAS_BACKEND is"
    else:
        os.environ["KERAS_BACKEND"] = backend = "jax"
        where = ""
    if backend != "jax":
        raise ValueError(
            f"keras_dist needs Keras's JAX backend, but {where} {backend!r}. "
            "Set the environment variable KERAS_BACKEND=jax before anything imports Keras."
        )


_require_jax_backend()

import jax  # noqa: E402  (the backend is chosen first)
import keras  # noqa: E402
import numpy as np  # noqa: E402

try:
    from keras.src.backend.common import global_state, variables
    from keras.src.backend.common import standardize_dtype as standardize_dtype
    from keras.src.backend.common.name_scope import current_path as _current_path
    from keras.src.backend.common.stateless_scope import StatelessScope, get_stateless_scope
    from keras.src.backend.common.stateless_scope import in_stateless_scope as in_stateless_scope
    from keras.src.backend.jax import core as jax_core
    from keras.src.backend.jax import distribution_lib as _backend_lib
    from keras.src.backend.jax import trainer as trainer
    from keras.src.distribution import distribution_lib
    from keras.src.legacy.saving import legacy_h5_format as legacy_h5_format
    from keras.src.optimizers import base_optimizer
    from keras.src.random.seed_generator import draw_seed as draw_seed
    from keras.src.random.seed_generator import global_seed_generator as _global_seed_generator
    from keras.src.saving import saving_api as saving_api
    from keras.src.saving import saving_lib as saving_lib
    from keras.src.trainers import data_adapters as data_adapters
    from keras.src.trainers.data_adapters import array_slicing as array_slicing
    from keras.src.trainers.data_adapters import data_adapter_utils as data_adapter_utils
    from keras.src.trainers.data_adapters import py_dataset_adapter as py_dataset_adapter
    from keras.src.utils import file_utils as file_utils
    from keras.src.utils import rng_utils
    from keras.src.utils.jax_utils import is_in_jax_tracing_scope as is_in_jax_tracing_scope
    from keras.src.utils.naming import to_snake_case
except ImportError as error:
    raise ImportError(
        f"This keras_dist does not know Keras {keras.__version__}: {error}. Install a Keras that its "
        "pyproject.toml names, or a newer keras_dist."
    ) from error

KerasDistribution = distribution_lib.Distribution
KerasOptimizer = base_optimizer.BaseOptimizer
KerasVariable = variables.Variable
JaxVariable = jax_core.JaxVariable
backend_lib = _backend_lib
DEFAULT_BATCH_DIM_NAME = distribution_lib.DEFAULT_BATCH_DIM_NAME
GLOBAL_NAME = distribution_lib.GLOBAL_ATTRIBUTE_NAME
STEPS = ("train", "test", "predict")


def list_devices(device_type: str | None) -> list[str]:
    """Keras's own list of devices (looked up when called, so that it can be replaced for a test)."""
    return distribution_lib.list_devices(device_type)


def get_device_count(device_type: str | None) -> int:
    """Keras's own count of devices."""
    return distribution_lib.get_device_count(device_type)


def num_processes() -> int:
    """Keras's own count of processes."""
    return _backend_lib.num_processes()


def process_id() -> int:
    """Keras's own number of this process."""
    return _backend_lib.process_id()


def initialize(
    job_addresses: str | None, num_processes: int | None, process_id: int | None, start: Callable | None = None
) -> None:
    """Starts JAX's multi-process runtime and gives all processes one random seed, as Keras does.

    Args:
        job_addresses: as Keras takes it.
        num_processes: as Keras takes it.
        process_id: as Keras takes it.
        start: is called by Keras in the place of `jax.distributed.initialize`, with that before its arguments.
    """
    real = jax.distributed.initialize
    if start is not None:
        jax.distributed.initialize = functools.partial(start, real)
    try:
        _backend_lib.initialize(job_addresses, num_processes, process_id)
    finally:
        jax.distributed.initialize = real


def initialize_seed() -> None:
    """Gives all processes one random seed, unless they have one."""
    _backend_lib.initialize_rng()


def random_seed() -> int | None:
    """The seed that `keras.utils.set_random_seed` was given last."""
    return rng_utils.get_random_seed()


def path_of_open_scope() -> str:
    """The path of the layer that is being called or built, `""` outside of any."""
    return _current_path()


def as_sharding(layout: Any) -> Any:
    """Returns a layout as a JAX sharding; JAX's own layouts, and None, are returned unchanged."""
    return layout.backend_layout if isinstance(layout, keras.distribution.TensorLayout) else layout


def stored_dtype(variable) -> str:
    """Returns the dtype of a variable's value; `variable.dtype` is the one that an autocast scope reads it as."""
    return variable._dtype


def has_mask(tensor) -> bool:
    """Returns whether a layer has attached a mask to a tensor."""
    return hasattr(tensor, "_keras_mask")


def variable_layout(variable):
    """The layout that a variable was created with: a TensorLayout, something of JAX's, or None."""
    return getattr(variable, "_layout", None)


def variable_value(variable):
    """The array a variable holds, or None where its creation or a running step defers it."""
    return getattr(variable, "_value", None)


def place_variable(variable, layout, value) -> None:
    """Gives a variable another layout (None: no distribution) together with its value so laid out."""
    variable._layout = layout
    if value is not None:
        variable._value = value


def distribute_with_keras(tensor, layout):
    """Keras's own placing of one tensor: a sharding constraint while tracing, else a move."""
    return _backend_lib.distribute_tensor(tensor, layout)


def current_distribution():
    """Keras's own answer to which distribution is installed."""
    return global_state.get_global_attribute(GLOBAL_NAME)


def own_variables(layer) -> list:
    """The weights of a layer, without those of the layers in it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def owners_of_weights(model) -> dict[int, str]:
    """The path of each weight by its id, with the names of the model and of all layers that it is in."""
    paths: dict[int, str] = {}
    seen: set[int] = set()

    def add(layer, path):
        if id(layer) in seen:
            return
        seen.add(id(layer))
        for variable in own_variables(layer):
            paths.setdefault(id(variable), f"{path}/{variable.name}")
        for inner in layer._flatten_layers(include_self=False, recursive=False):
            add(inner, f"{path}/{inner.name}")

    add(model, model.name)
    return paths


def seed_generator_states(model) -> list:
    """Returns the variables that hold the states of a model's random generators."""
    return [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]


def automatic_names(model) -> set[str]:
    """The names that Keras gives to a model and the layers in it where the user gives none, without numbers."""
    return {to_snake_case(type(layer).__name__) for layer in model._flatten_layers()}


def last_layers(model) -> list:
    """The layers that return the outputs of a functional or sequential model; none where a model has no graph."""
    _, outputs = inputs_and_outputs(model)
    return [tensor._keras_history.operation for tensor in jax.tree.leaves(outputs)]


def embeddings_for_heads(model) -> set[int]:
    """The ids of the tables of embeddings that can be called as a head as well, in this model or around it."""
    return {id(layer._embeddings) for layer in model._flatten_layers() if hasattr(layer, "tie_weights")}


def rematerialized(layer, call: Callable):
    """What the call of a layer in a stateless scope returns, kept for the backward pass in its large products only.

    All else that its gradient needs is computed again there, gathered weights among them. What the call changes
    besides (states of random generators, averages, losses) goes to the scope, as without this.

    Args:
        layer: the layer that is called.
        call: calls it.

    Returns:
        What the call returns.
    """
    outer: Any = get_stateless_scope()

    def function():
        with StatelessScope(collect_losses=outer.collect_losses) as inner:
            inner.state_mapping = dict(outer.state_mapping)
            outputs = call()
        changed = {
            key: value for key, value in inner.state_mapping.items() if value is not outer.state_mapping.get(key)
        }
        return outputs, changed, inner.losses

    outputs, changed, losses = jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)()
    outer.state_mapping.update(changed)
    for loss in losses:
        outer.add_loss(loss)
        layer._loss_ids.add(id(loss))
    return outputs


# -------------------------------------------------------------------------------------------- a step as a function


@contextlib.contextmanager
def unbuilt_parts_apart(model) -> Iterator[None]:
    """Puts others in the place of a model's optimizer, loss and metrics that are not built, for a block to build."""
    unbuilt = {name: part for name in _PARTS if (part := vars(model).get(name)) is not None and not part.built}
    # Not by assignment, which would make the model track the new ones.
    vars(model).update({name: _PARTS[name](part) for name, part in unbuilt.items()})
    try:
        yield
    finally:
        vars(model).update(unbuilt)


_PARTS: dict[str, Callable] = {
    "optimizer": lambda part: type(part).from_config(part.get_config()),
    "_compile_loss": lambda part: type(part)(
        part._user_loss, part._user_loss_weights, part.reduction, part.output_names
    ),
    "_compile_metrics": lambda part: type(part)(
        part._user_metrics, part._user_weighted_metrics, output_names=part.output_names
    ),
}


@contextlib.contextmanager
def no_trace_left() -> Iterator[None]:
    """Takes Keras's automatic names and its random seeds back to where they were, after a block that makes models."""
    names = dict(global_state.get_global_attribute(_NAMES) or {})
    generator, seeds = global_state.get_global_attribute(_GENERATOR), random.getstate()
    value = None if generator is None else variable_value(generator.state)
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAMES, collections.defaultdict(int, names))
        global_state.set_global_attribute(_GENERATOR, generator)
        random.setstate(seeds)
        if generator is not None:
            generator.state._value = value


_NAMES, _GENERATOR = "object_name_uids", "global_seed_generator"


def forget_generator_without_value() -> None:
    """Lets Keras make its global random generator anew where it was made while values are deferred."""
    generator = global_state.get_global_attribute(_GENERATOR)
    if generator is not None and variable_value(generator.state) is None:
        global_state.set_global_attribute(_GENERATOR, None)


def global_seed() -> list[int] | None:
    """The state of Keras's global random generator, None where nothing has asked for it."""
    generator = global_state.get_global_attribute(_GENERATOR)
    return None if generator is None else np.asarray(generator.state.value).tolist()


def set_global_seed(state: list[int] | None) -> None:
    """Makes the state of Keras's global random generator what it was."""
    if state is not None:
        generator: Any = _global_seed_generator()
        generator.state.assign(np.array(state, generator.state.dtype))


def begin_at_epoch(model, epoch: int | None) -> None:
    """Makes a `fit` that is about to begin do so at an epoch; None: at the one that it is given."""
    model._initial_epoch = epoch


def metrics_to_build(model) -> list:
    """The metric objects that a model was compiled with and has not put to use yet."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None or compiled.built:
        return []
    given = jax.tree.leaves((compiled._user_metrics, compiled._user_weighted_metrics))
    return [metric for metric in given if isinstance(metric, keras.metrics.Metric)]


def is_built(model) -> bool:
    """Whether a model and all layers in it are built; Keras says so of models whose layers are not."""
    return model.built and all(layer.built for layer in model._flatten_layers())


def layer_paths(model) -> list[str]:
    """The paths of a model and all layers in it, as Keras spells them when it asks for the layouts of outputs.

    Keras notes where a layer is at its first call. One that was never called is taken to be inside of its owner.
    """
    paths: dict[int, str] = {}

    def add(layer, owner):
        if id(layer) not in paths:
            parent = owner if layer._parent_path is None else layer._parent_path
            paths[id(layer)] = f"{parent}/{layer.name}" if parent else layer.name
            for inner in layer._flatten_layers(include_self=False, recursive=False):
                add(inner, paths[id(layer)])

    add(model, "")
    return list(dict.fromkeys(paths.values()))


def symbolic_build(model, data) -> None:
    """Makes the variables of a model, its loss and its metrics from symbolic tensors of a batch."""
    model._symbolic_build(data_batch=data)


def inputs_and_outputs(model) -> tuple:
    """The symbolic inputs and outputs of a functional or sequential model in their structures, else None and None."""
    graph = getattr(model, "_functional", None) or model
    return getattr(graph, "_inputs_struct", None), getattr(graph, "_outputs_struct", None)


def symbolic_inputs(model):
    """The symbolic inputs of a functional or sequential model, None where a model does not know them."""
    return inputs_and_outputs(model)[0]


def pure_step(model, step: str) -> Callable:
    """The function from state and batch to outputs and state that Keras compiles for a step."""
    if step != "predict":
        return getattr(model, f"{step}_step")

    def predict_step(state, data):
        outputs, non_trainable_variables = model.predict_step(state, data)
        return outputs, (state[0], non_trainable_variables)

    return predict_step
