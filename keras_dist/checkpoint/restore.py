"""Restores all variables of a model from an undamaged Orbax checkpoint into their shards, or raises an error."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from keras_dist._keras import internals, model_structure, training_state
from keras_dist._report.install_advice import install_command
from keras_dist._report.user_warnings import warn
from keras_dist.checkpoint import checksums, path_matching
from keras_dist.checkpoint.path_matching import Matching
from keras_dist.multihost import messaging

ARRAYS = "pytree"  # the name of the variables in checkpoints of Keras's OrbaxCheckpoint
TRAINABLE, NON_TRAINABLE = "trainable_variables", "non_trainable_variables"
OPTIMIZER, METRICS = "optimizer_variables", "metrics_variables"
_MAX_TRIED = 100  # checkpoints, of which the newest are damaged


def orbax() -> Any:
    """Returns Orbax's module of checkpoints; if Orbax is not installed, the ImportError says how to install it."""
    try:
        from orbax.checkpoint import v1
    except ImportError as error:
        raise ImportError(
            f"Orbax is not installed, and checkpoints need it. Run: {install_command('checkpoint')}."
        ) from error
    return v1


def state_tree(model: keras.Model) -> dict[str, dict]:
    """Returns the values of all variables by kind and path, as `model.get_state_tree()` does, but without collisions.

    Variables share a path in models inside of a loaded model, in the metrics of two outputs, in some optimizers
    (Adafactor), and if users give two layers of a subclassed model the same name.
    """
    from orbax.checkpoint.tree import from_flat_dict

    def nested(variables, paths):
        return from_flat_dict({path: each.value for path, each in zip(paths, variables, strict=True)}, sep="/")

    optimizer: Any = model.optimizer
    weights = list(model.variables)  # in an order that does not depend on which of them are trained
    unique = path_matching.unique_weight_paths([each.path for each in weights], _nested_paths(model, weights))
    saved_as = {id(variable): path for variable, path in zip(weights, unique, strict=True)}
    trainable, non_trainable = model.trainable_variables, model.non_trainable_variables
    optimizer_names = path_matching.optimizer_paths(
        [variable.path for variable in optimizer.variables],
        [(variable.path, saved_as[id(variable)]) for variable in _optimized_first(optimizer, weights)],
    )
    metric_names = [variable.path for variable in model.metrics_variables]
    return {
        TRAINABLE: nested(trainable, [saved_as[id(variable)] for variable in trainable]),
        NON_TRAINABLE: nested(non_trainable, [saved_as[id(variable)] for variable in non_trainable]),
        OPTIMIZER: nested(optimizer.variables, path_matching.number_repeated(optimizer_names)),
        METRICS: nested(model.metrics_variables, path_matching.number_repeated(metric_names)),
    }


def _nested_paths(model, variables: list) -> list[str]:
    """Returns the paths of variables with the names of all models and layers that they are in."""
    paths = model_structure.weight_paths(model)
    return [paths.get(id(variable)) or str(variable.path) for variable in variables]


def _optimized_first(optimizer, weights: list) -> list:
    """Returns weights in the order in which an optimizer created its variables, and then those without any."""
    numbers = {id(variable): number for number, variable in enumerate(internals.weights_of_optimizer(optimizer))}
    return sorted(weights, key=lambda weight: numbers.get(id(weight), len(numbers)))


class Restored(NamedTuple):
    """Which checkpoint was restored, the progress of training in it, and what is wrong with newer ones, by step."""

    step: str
    progress: Any
    damaged: dict[str, str]


def restore(
    model: keras.Model,
    directory: str,
    steps: Sequence[str],
    skip_mismatch: bool = False,
    read_progress: Callable[[str], Any] | None = None,
) -> Restored:
    """Assigns the values of a checkpoint to the variables of a built model. Each device reads its own shards.

    Weights are matched by path, also if Keras has numbered or nested the model's layers differently since. The
    optimizer is built if it is not and the checkpoint has one. Metrics are restored if the checkpoint has them; they
    must match only if training continues, and `read_progress` reads from the path of a checkpoint how far it is.

    The checkpoints `steps` of the directory are tried until one is not damaged; all processes agree which. With
    `skip_mismatch`, what does not match is a warning. Raises ValueError, before any variable has changed, if all
    checkpoints are damaged, or if something does not match.
    """
    if not model_structure.is_built(model):
        raise ValueError(
            f"Model {model.name!r} is not built, so there are no variables to restore. Build it first with "
            "model.build(input_shape), or call it on a batch."
        )
    damaged: dict[str, str] = {}
    for step in messaging.exchange("checkpoints to restore", list(steps)[:_MAX_TRIED])[0]:
        values, progress, damage = [], None, None
        try:
            values, progress = _read(model, os.path.join(directory, step), skip_mismatch, read_progress)
        except DamageError as error:
            damage = str(error)
        damages = messaging.exchange("restoring a checkpoint", damage)
        damage = next((each for each in damages if each is not None), None)
        if damage is None:
            for variable, value in values:
                variable.assign(value)
            return Restored(step, progress, damaged)
        damaged[step] = damage
    raise ValueError(
        f"{damage_text(directory, damaged)}. Restore what is damaged from a copy, load another checkpoint, or train "
        "from the beginning in another directory."
    )


def damage_text(directory: str, damaged: dict[str, str]) -> str:
    return "; ".join(f"Checkpoint {os.path.join(directory, step)} is damaged: {text}" for step, text in damaged.items())


class DamageError(Exception):
    """A checkpoint cannot be read."""


def _read(model, path: str, skip_mismatch: bool, read_progress: Callable[[str], Any] | None) -> tuple[list, Any]:
    """Returns variables with their values in a checkpoint, and its progress; raises DamageError."""
    if damage := checksums.damage(etils_path(path)):
        raise DamageError(damage)
    with _errors_as_damage():
        progress = None if read_progress is None else read_progress(path)
        tree = orbax().metadata(path, checkpointable_name=ARRAYS).metadata
        if tree is None:  # Orbax has logged why
            raise DamageError(f"Orbax cannot read _METADATA or _sharding in {ARRAYS}")
    found = _find(model, path, tree, skip_mismatch, with_metrics=read_progress is not None)
    with _errors_as_damage():
        values = _load(path, tree, {entry: variable.value for entry, variable in found.items()})
    return [(variable, values[entry]) for entry, variable in found.items()], progress


@contextlib.contextmanager
def _errors_as_damage() -> Iterator[None]:
    """Raises errors of reading a checkpoint as damage, except those that come from this machine."""
    try:
        yield
    except DamageError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Orbax raises its own error, whatever the cause is
            cause = cause.__cause__
        if isinstance(cause, (MemoryError, jax.errors.JaxRuntimeError)) or not checksums.is_of_damage(cause):
            raise
        reason = " ".join(str(cause).split())[:300]
        raise DamageError(f"it cannot be read ({type(cause).__name__}: {reason})") from error


def _find(model, path: str, tree: Any, skip_mismatch: bool, with_metrics: bool) -> dict[str, Any]:
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
        warn(f"Not restored from {path} into model {model.name!r}: {'; '.join(problems)}.")
    return found


def _match(model, saved: dict[str, Any], with_metrics: bool) -> tuple[dict[str, Any], list[str]]:
    """Returns the variable for each entry that has one, and descriptions of what does not match."""

    def entries_of(*kinds: str) -> dict[str, str]:  # full names by path
        return {entry.partition("/")[2]: entry for entry in saved if entry.partition("/")[0] in kinds}

    weights = list(model.variables)
    entries = entries_of(TRAINABLE, NON_TRAINABLE)  # of both kinds: layers may have been frozen or unfrozen since
    seeds = [variable for variable in weights if internals.is_random_state(variable.path)]
    others = [variable for variable in weights if not internals.is_random_state(variable.path)]
    weight_match = path_matching.match_weights(
        [path for path in entries if not internals.is_random_state(path)],
        [variable.path for variable in others],
        _nested_paths(model, others),
        model_structure.automatic_names(model),
    )
    seed_match = path_matching.match_seeds(
        [path for path in entries if internals.is_random_state(path)],
        path_matching.number_repeated(v.path for v in seeds),
    )
    groups = [(others, weight_match, entries), (seeds, seed_match, entries)]

    optimizer, optimizer_entries = getattr(model, "optimizer", None), entries_of(OPTIMIZER)
    if optimizer is not None and optimizer_entries:
        variables = list(optimizer.variables)
        pairs = {id(others[number]): path for number, path in weight_match.pairs.items()}
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


def steps(directory: str) -> list[str]:
    """Returns the names of the complete checkpoints in a directory of checkpoints, the newest first.

    Waits for no other process: with Orbax's Checkpointer, one that cannot read the directory lets all wait without end.
    """
    try:
        found = orbax().path.step.standard_name_format().find_all(directory)
        return [str(step) for step in sorted((checkpoint.step for checkpoint in found), reverse=True)]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Orbax cannot list the checkpoints in {directory}: {error} If a file _CHECKPOINT_METADATA in one of them "
            "is damaged, replace its content with {}: it holds no values."
        ) from error


def etils_path(path: str) -> Any:
    from etils import epath  # Orbax needs it, too

    return epath.Path(path)


def _flat(tree: Any) -> dict[str, Any]:
    from orbax.checkpoint.tree import to_flat_dict

    return to_flat_dict(tree, sep="/")


def _load(path: str, tree: Any, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Reads the entries in `values` from a checkpoint, each with the shape, dtype and sharding of its array there."""
    from orbax.checkpoint.tree import from_flat_dict

    ocp = orbax()
    abstract = from_flat_dict(dict.fromkeys(_flat(tree), ocp.PLACEHOLDER) | values, target=tree, sep="/")
    return _flat(ocp.load_checkpointables(path, {ARRAYS: abstract})[ARRAYS])
