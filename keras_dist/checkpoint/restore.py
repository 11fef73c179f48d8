"""Restores all variables of a model from an Orbax checkpoint into their shards, or raises an error."""

import contextlib
import os
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import keras
import numpy as np

from keras_dist._keras import internals, training_state
from keras_dist.checkpoint import path_matching
from keras_dist.checkpoint.path_matching import Matching

ARRAYS = "pytree"  # the name of the variables in checkpoints of Keras's OrbaxCheckpoint
TRAINABLE, NON_TRAINABLE = "trainable_variables", "non_trainable_variables"
OPTIMIZER, METRICS = "optimizer_variables", "metrics_variables"


def orbax() -> Any:
    """Returns Orbax's module of checkpoints; if Orbax is not installed, the ImportError says how to install it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            'Orbax is not installed, and checkpoints need it. Run: pip install "keras-dist[checkpoint]".'
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return orbax.checkpoint.v1


def state_tree(model: keras.Model) -> dict[str, dict]:
    """Returns the values of all variables by kind and path, as `model.get_state_tree()` does, but without collisions.

    Variables share a path in models inside of a loaded model, in the metrics of two outputs, in some optimizers
    (Adafactor), and if users give two layers of a subclassed model the same name.
    """
    optimizer: Any = model.optimizer
    weights = list(model.variables)  # in an order that does not depend on which of them are trained
    unique = path_matching.unique_weight_paths([each.path for each in weights], _nested_paths(model, weights))
    saved_as = {id(variable): path for variable, path in zip(weights, unique, strict=True)}
    trainable, non_trainable = model.trainable_variables, model.non_trainable_variables
    of_optimizer = path_matching.optimizer_paths(
        [variable.path for variable in optimizer.variables],
        [(variable.path, saved_as[id(variable)]) for variable in _optimized_first(optimizer, weights)],
    )
    of_metrics = [variable.path for variable in model.metrics_variables]
    return {
        TRAINABLE: _nested(trainable, [saved_as[id(variable)] for variable in trainable]),
        NON_TRAINABLE: _nested(non_trainable, [saved_as[id(variable)] for variable in non_trainable]),
        OPTIMIZER: _nested(optimizer.variables, path_matching.number_repeated(of_optimizer)),
        METRICS: _nested(model.metrics_variables, path_matching.number_repeated(of_metrics)),
    }


def _nested_paths(model, variables: list) -> list[str]:
    """Returns the paths of variables with the names of all models and layers that they are in."""
    paths = internals.weight_paths(model)
    return [paths.get(id(variable)) or str(variable.path) for variable in variables]


def _optimized_first(optimizer, weights: list) -> list:
    """Returns weights in the order in which an optimizer created its variables, and then those without any."""
    numbers = {id(variable): number for number, variable in enumerate(internals.weights_of_optimizer(optimizer))}
    return sorted(weights, key=lambda weight: numbers.get(id(weight), len(numbers)))


def _nested(variables: list, paths: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for variable, path in zip(variables, paths, strict=True):
        *parents, name = path.split("/")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = variable.value
    return tree


def restore(model: keras.Model, path: str, skip_mismatch: bool = False, with_metrics: bool = False) -> None:
    """Assigns the values of a checkpoint of one step to the variables of a model. Each device reads its own shards.

    Weights are matched by path, also if Keras has numbered or nested the model's layers differently since. The
    optimizer is built if it is not and the checkpoint has one. Metrics are restored if the checkpoint has them; they
    must match only `with_metrics`. Raises ValueError, before any variable has changed, if variables, shapes or dtypes
    do not match; with `skip_mismatch` it restores what matches, and warns about the rest.
    """
    if not internals.is_built(model):
        raise ValueError(
            f"Model {model.name!r} is not built, so there are no variables to restore. Build it first with "
            "model.build(input_shape), or call it on a batch."
        )
    tree = orbax().metadata(path, checkpointable_name=ARRAYS).metadata
    saved = _flat(tree)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and any(entry.startswith(OPTIMIZER) for entry in saved):
        optimizer.build(model.trainable_variables)
    training_state.put_values_back(model)
    found, problems = _match(model, saved, with_metrics)
    if problems and not skip_mismatch:
        raise ValueError(
            f"Checkpoint {path} does not match model {model.name!r}: {'; '.join(problems)}. Build the model and its "
            "optimizer as they were when the checkpoint was saved, or restore only what matches with "
            "model.load_weights(path, skip_mismatch=True)."
        )
    if problems:
        warnings.warn(f"Not restored from {path} into model {model.name!r}: {'; '.join(problems)}.", stacklevel=2)
    values = _load(path, tree, {entry: variable.value for entry, variable in found.items()})
    for entry, variable in found.items():
        variable.assign(values[entry])


def _match(model, saved: dict[str, Any], with_metrics: bool) -> tuple[dict[str, Any], list[str]]:
    """Returns the variable for each entry that has one, and descriptions of what does not match."""

    def entries_of(*kinds: str) -> dict[str, str]:  # full names by path
        return {entry.partition("/")[2]: entry for entry in saved if entry.partition("/")[0] in kinds}

    weights = list(model.variables)
    entries = entries_of(TRAINABLE, NON_TRAINABLE)  # of both kinds: layers may have been frozen or unfrozen since
    seeds = [variable for variable in weights if internals.is_random_state(variable.path)]
    others = [variable for variable in weights if not internals.is_random_state(variable.path)]
    of_weights = path_matching.match_weights(
        [path for path in entries if not internals.is_random_state(path)],
        [variable.path for variable in others],
        _nested_paths(model, others),
        internals.automatic_names(model),
    )
    of_seeds = path_matching.match_seeds(
        [path for path in entries if internals.is_random_state(path)],
        path_matching.number_repeated(v.path for v in seeds),
    )
    groups = [(others, of_weights, entries), (seeds, of_seeds, entries)]

    optimizer, optimizer_entries = getattr(model, "optimizer", None), entries_of(OPTIMIZER)
    if optimizer is not None and optimizer_entries:
        variables = list(optimizer.variables)
        pairs = {id(others[number]): path for number, path in of_weights.pairs.items()}
        ordered = _optimized_first(optimizer, others)
        renamed = [(each.path, pairs[id(each)]) for each in ordered if id(each) in pairs]
        paths = [variable.path for variable in variables]
        matching = path_matching.match_optimizer(list(optimizer_entries), paths, renamed)
        groups.append((variables, matching, optimizer_entries))

    metrics, metric_entries = list(model.metrics_variables), entries_of(METRICS)
    paths = path_matching.number_repeated(variable.path for variable in metrics)
    matching = path_matching.match_optimizer(list(metric_entries), paths, [])
    if not with_metrics:
        matching = Matching({n: path for n, path in matching.pairs.items() if paths[n] == path}, [], [])
    groups.append((metrics, matching, metric_entries))

    found, problems, differences = {}, [], []
    for variables, matching, names in groups:
        if matching.missing:
            problems.append(f"the checkpoint lacks {_listed(repr(variables[n].path) for n in matching.missing)}")
        if matching.unexpected:
            problems.append(f"the model lacks {_listed(map(repr, matching.unexpected))}")
        for number, path in matching.pairs.items():
            variable, entry = variables[number], names[path]
            if difference := _difference(variable, saved[entry], path):
                differences.append(difference)
            else:
                found[entry] = variable
    return found, [*problems, _listed(differences)] if differences else problems


def _listed(texts: Iterable[str]) -> str:
    texts = list(texts)
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def _difference(variable, saved_as, path: str) -> str | None:
    name = f"'{path}'" if path == variable.path else f"'{path}' (variable '{variable.path}')"
    shapes = tuple(saved_as.shape), tuple(variable.shape)
    if shapes[0] != shapes[1]:
        return f"{name} has shape {shapes[0]} in the checkpoint but {shapes[1]} in the model"
    are_floats = [jax.numpy.issubdtype(dtype, np.inexact) for dtype in (saved_as.dtype, variable.value.dtype)]
    if are_floats[0] != are_floats[1]:
        return f"{name} is {np.dtype(saved_as.dtype).name} in the checkpoint but {variable.dtype} in the model"
    return None


# ------------------------------------------------------------------------------------------------- Orbax's own files


def newest(directory: str) -> str | None:
    """Returns the path of the newest complete checkpoint in a directory of checkpoints, None if there is none."""
    with contextlib.closing(orbax().training.Checkpointer(directory)) as checkpointer:
        latest = checkpointer.latest
    return None if latest is None else os.path.join(directory, str(latest.step))


def _entry(key_path: tuple) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def _flat(tree: Any) -> dict[str, Any]:
    return {_entry(key_path): leaf for key_path, leaf in jax.tree.leaves_with_path(tree)}


def _load(path: str, tree: Any, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Reads the entries in `values` from a checkpoint, each with the shape, dtype and sharding of its array there."""
    ocp = orbax()

    def abstract(key_path, _):
        value = values.get(_entry(key_path))
        if value is None:
            return ocp.PLACEHOLDER
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)

    return _flat(ocp.load_checkpointables(path, {ARRAYS: jax.tree.map_with_path(abstract, tree)})[ARRAYS])
