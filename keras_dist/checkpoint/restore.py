"""The variables of a model in a checkpoint of Orbax: all of them, restored where the model's lie, or an error."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from keras_dist._keras import internals, training_state
from keras_dist.checkpoint import path_matching
from keras_dist.checkpoint.path_matching import Pairing

ARRAYS = "pytree"  # what Keras's OrbaxCheckpoint calls the variables in a checkpoint
WEIGHTS = ("trainable_variables", "non_trainable_variables")
OPTIMIZER, METRICS = "optimizer_variables", "metrics_variables"


def orbax() -> Any:
    """Returns Orbax.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "Checkpoints need Orbax, which is not installed. Install it: pip install 'keras-dist[checkpoint]'"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return orbax.checkpoint.v1


def state_tree(model: keras.Model) -> dict[str, dict]:
    """Returns the values of all variables by kind and path, as `model.get_state_tree()`, which takes no path twice.

    That is what the metrics of two outputs have, and the weights of models in a model that was loaded.
    """
    trainable, others = list(model.trainable_variables), list(model.non_trainable_variables)
    optimizer: Any = model.optimizer
    slots, metrics = list(optimizer.variables), list(model.metrics_variables)
    owners = internals.owners_of_weights(model)
    weights = [*trainable, *others]
    paths = [variable.path for variable in weights]
    saved = path_matching.name_weights(paths, [owners.get(id(v)) or str(v.path) for v in weights])
    of_slots = path_matching.name_slots([v.path for v in slots], list(zip(paths, saved, strict=True)))
    return {
        WEIGHTS[0]: _nested(trainable, saved[: len(trainable)]),
        WEIGHTS[1]: _nested(others, saved[len(trainable) :]),
        OPTIMIZER: _nested(slots, path_matching.number_repeated(of_slots)),
        METRICS: _nested(metrics, path_matching.number_repeated(v.path for v in metrics)),
    }


def _nested(variables: list, paths: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for variable, path in zip(variables, paths, strict=True):
        *parts, name = path.split("/")
        inner = tree
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[name] = variable.value
    return tree


def restore(model: keras.Model, path: str, skip_mismatch: bool = False, exactly: bool = False) -> None:
    """Gives a model the values of a checkpoint. Each device reads its own part.

    Weights are found by their paths, also where a model was rebuilt or made a second time and Keras has named it
    otherwise. The optimizer, if model and checkpoint have one, is built and restored with the weights. The values of
    metrics are restored where the checkpoint has them.

    Args:
        model: a model that is built.
        path: the checkpoint of one step.
        skip_mismatch: restore what the model and the checkpoint have in common, and warn about the rest.
        exactly: metrics are treated as weights are.

    Raises:
        ValueError: the checkpoint lacks variables of the model, has others, or others of the same path. No value has
            changed then.
    """
    if not internals.is_built(model):
        raise ValueError(
            f"Weights are restored into a model that is built. Received: {model.name!r}, which is not. Build it "
            "first: model.build(input_shape), or call it on a batch."
        )
    tree = _metadata(path)
    saved = _flat(tree)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and any(entry.startswith(OPTIMIZER) for entry in saved):
        optimizer.build(model.trainable_variables)
    training_state.put_values_back(model)
    found, problems = _find(model, saved, exactly)
    if problems and not skip_mismatch:
        raise ValueError(
            f"A checkpoint is restored in whole. Received: {path}, which does not fit {model.name!r}: "
            f"{'; '.join(problems)}. Make the model and its optimizer as they were when the checkpoint was written, or "
            "restore what they have in common with model.load_weights(path, skip_mismatch=True)."
        )
    if problems:
        warnings.warn(f"Parts of {model.name!r} are not restored from {path}: {'; '.join(problems)}.", stacklevel=2)
    values = _load(path, tree, {entry: variable.value for entry, variable in found.items()})
    for entry, variable in found.items():
        variable.assign(values[entry])


def _find(model, saved: dict[str, Any], exactly: bool) -> tuple[dict[str, Any], list[str]]:
    """Returns the variable for each entry that has one, and what does not fit, in words."""
    weights = [*model.trainable_variables, *model.non_trainable_variables]
    # An entry of one kind may be a variable of the other: layers are frozen and thawed.
    entries = {entry.partition("/")[2]: entry for entry in saved if entry.partition("/")[0] in WEIGHTS}
    seeds = [path for path in entries if path.endswith(path_matching.SEED)]
    generators = [variable for variable in weights if variable.path.endswith(path_matching.SEED)]
    others = [variable for variable in weights if not variable.path.endswith(path_matching.SEED)]
    owners = internals.owners_of_weights(model)
    pairing = path_matching.pair_weights(
        [path for path in entries if path not in set(seeds)],
        [variable.path for variable in others],
        [owners.get(id(variable)) or str(variable.path) for variable in others],
        internals.automatic_names(model),
    )
    of_seeds = path_matching.pair_seeds(seeds, path_matching.number_repeated(v.path for v in generators))
    groups = [(others, pairing, entries), (generators, of_seeds, entries)]
    renamed = [(others[number].path, pairing.pairs[number]) for number in sorted(pairing.pairs)]

    of_optimizer = {entry.partition("/")[2]: entry for entry in saved if entry.startswith(f"{OPTIMIZER}/")}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and of_optimizer:
        slots = list(optimizer.variables)
        paths = [variable.path for variable in slots]
        groups.append((slots, path_matching.pair_slots(list(of_optimizer), paths, renamed), of_optimizer))

    of_metrics = {entry.partition("/")[2]: entry for entry in saved if entry.startswith(f"{METRICS}/")}
    metrics = list(model.metrics_variables)
    paths = path_matching.number_repeated(variable.path for variable in metrics)
    in_metrics = path_matching.pair_slots(list(of_metrics), paths, [])
    if not exactly:
        in_metrics = Pairing({n: p for n, p in in_metrics.pairs.items() if paths[n] == p}, [], [])
    groups.append((metrics, in_metrics, of_metrics))

    found, problems = {}, []
    for variables, pairing, names in groups:
        problems += _problems(variables, pairing)
        for number, path in pairing.pairs.items():
            variable, meta = variables[number], saved[names[path]]
            problem = _difference(variable, meta, path)
            if problem:
                problems.append(problem)
            else:
                found[names[path]] = variable
    return found, problems


def _problems(variables, pairing: Pairing) -> Iterator[str]:
    if pairing.missing:
        yield f"it lacks {_some([variables[number].path for number in pairing.missing])}"
    if pairing.unexpected:
        yield f"the model has no {_some(pairing.unexpected)}"


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(f"'{path}'" for path in paths[:4]) + more


def _difference(variable, meta, path: str) -> str | None:
    if tuple(meta.shape) != tuple(variable.shape):
        return f"'{path}' has shape {tuple(meta.shape)} there, and '{variable.path}' {tuple(variable.shape)}"
    kinds = [jax.numpy.issubdtype(dtype, np.inexact) for dtype in (meta.dtype, variable.value.dtype)]
    if kinds[0] != kinds[1]:
        return f"'{path}' is {np.dtype(meta.dtype).name} there, and '{variable.path}' {variable.dtype}"
    return None


# ------------------------------------------------------------------------------------------------- Orbax's own files


def newest(directory: str) -> str | None:
    """Returns the path of the newest complete checkpoint in a directory of checkpoints, None where there is none."""
    with contextlib.closing(orbax().training.Checkpointer(directory)) as checkpointer:
        latest = checkpointer.latest
    return None if latest is None else os.path.join(directory, str(latest.step))


def _metadata(path: str) -> Any:
    return orbax().metadata(path, checkpointable_name=ARRAYS).metadata


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat = {}
    for name, part in tree.items():
        flat |= _flat(part, f"{prefix}/{name}" if prefix else name)
    return flat


def _load(path: str, tree: Any, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Reads entries of a checkpoint, each laid out as an array of the model is.

    Args:
        path: the checkpoint.
        tree: what it holds.
        values: the arrays, by the path of their entry.
    """
    ocp = orbax()

    def wanted(part, prefix=""):
        if isinstance(part, dict):
            return {name: wanted(inner, f"{prefix}/{name}" if prefix else name) for name, inner in part.items()}
        if prefix not in values:
            return ocp.PLACEHOLDER
        value = values[prefix]
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)

    return _flat(ocp.load_checkpointables(path, {ARRAYS: wanted(tree)})[ARRAYS])
