"""`auto`: chooses mesh and strategy for a model by compiling candidates, for hardware that need not be attached."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import keras

from keras_dist._keras import internals
from keras_dist._report.argument_errors import did_you_mean
from keras_dist._report.progress import show_progress
from keras_dist._report.units import counted
from keras_dist.planning.fitting_options import error_line
from keras_dist.planning.hardware.compiler_options import checked_compiler_options
from keras_dist.planning.plan import require_builder_of_depth, require_step
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.search.candidates import COMBINED, STRATEGIES
from keras_dist.planning.search.choice import Choice, NoCandidateError, NothingFitsError
from keras_dist.planning.search.choosing import Task, choose
from keras_dist.planning.search.places import Place, place_of
from keras_dist.planning.targets.target import Target

OBJECTIVES = ("time", "memory", "devices")
LARGEST = "largest"
_TRIALS_FOR_ROWS = 4  # candidates to compile for each number of rows, of those that need least memory


def auto(
    build_model: keras.Model | Callable[..., keras.Model],
    batch: Any,
    target: Target | keras.distribution.DeviceMesh | str | Sequence[Any] | None = None,
    *,
    objective: str = "time",
    step: str = "train",
    keep: Mapping[str, int] | str | None = None,
    strategies: Iterable[str] | None = None,
    trials: int | None = None,
    depth: int | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    search_step_options: bool = True,
    progress: bool | None = None,
) -> Choice:
    """Chooses the mesh and the strategy for a model, by compiling its real step for candidates.

    Candidates are the mesh shapes that the devices can form, with the strategies that each of them allows. Those that
    cannot fit, or that cannot be better than a compiled one, are left out. The others are compiled, the most promising
    first. The same arguments give the same choice. Results of compilations are kept on disk, so that a repeated search
    takes seconds. A candidate that cannot be compiled is listed with the error, and the search goes on. Ctrl-C ends a
    search with the best candidate so far.

    Args:
        build_model: Function without arguments that returns a compiled model; or a model, deferred or not. With
            `depth`, a function of the number of blocks.
        batch: Global batch, as `kd.plan` takes it. Or `"largest"`, if the model's inputs have static shapes, or a
            function of the number of rows that returns a batch: the choice is then for the most rows that fit.
        target: Hardware to choose for: a name such as `"v5e:4x4"`, `kd.target(...)`, a list of devices, or a mesh,
            whose axes are then kept. By default the devices of this machine. With `objective="devices"` also a list of
            names and targets.
        objective: What to minimize: `"time"` of a step; `"memory"` of a device; or `"devices"`, the number of devices.
            With `"devices"`, the choice has the best time on the fewest devices of the target on which the model fits,
            or on the smallest such target of a list.
        step: `"train"`, `"test"`, `"predict"`, or `"generate"` for a language model of KerasHub: the time is that of a
            token of each row, so the choice for the most rows that fit is that of the most tokens per second.
        keep: Sizes of mesh axes that are fixed, such as `{"data": 4}` or `"data:4"`. The axes are "replica" (HSDP),
            "data", "context" and "model".
        strategies: Names of the strategies to choose from, by default all: `"dp"`, `"zero1"`, `"fsdp"`, `"hsdp"`,
            `"tp"`, `"tp_sp"`, `"fsdp_tp"`, `"fsdp_tp_sp"`; `"cp"`, which combines with all of them; and `"ep"`, which
            combines with `"fsdp"` and `"hsdp"` for models with mixtures of experts. With `step="generate"`, by default
            `"dp"`, `"tp"` and `"fsdp_tp"`: others gather all weights before the first token, or shard sequences.
        trials: The maximum number of candidates to compile. By default 12 at first, and, as soon as one candidate fits,
            a quarter of all, but at least 3. With `step="generate"` 12, since latencies of collectives, which only the
            forecast of a compiled program has, decide about the time of a token.
        depth: Number of blocks to extrapolate to, as in `kd.plan`. Candidates are compared by models of 1 and 2 blocks.
        compiler_options: XLA's options to compile with, as in `kd.plan`.
        search_step_options: Whether candidates that do not fit are compiled with step options that make them fit, if
            they might then be the fastest or if nothing else fits: `remat`, `microbatches`, and optimizer state in host
            memory where nothing else suffices. Only for a training step, `objective="time"` and a batch that is given.
        progress: Whether to show progress. By default only if standard error is a terminal.

    Returns:
        The choice: its `distribution`, `mesh` and `plan`. Print it to see all candidates.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No candidate fits, `keep` and `strategies` leave none, an argument is unknown, or the model cannot
            be planned.

    Example:

    >>> def build():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(10)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> choice = auto(build, batch=64, strategies=["dp", "zero1"])
    >>> print(choice.to_source())
    import keras_dist as kd
    <BLANKLINE>
    mesh = kd.create_device_mesh("data:8")
    distribution = kd.DataParallel(mesh)
    <BLANKLINE>
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"Unknown objective {objective!r}. Use one of {', '.join(map(repr, OBJECTIVES))}.")
    if trials is not None and (not isinstance(trials, int) or isinstance(trials, bool) or trials < 1):
        raise ValueError(
            f"trials must be a positive number of compilations, but got {trials!r}. Leave it out to compile a quarter "
            "of the candidates, at most 12."
        )
    if isinstance(batch, str) and batch != LARGEST:
        order = " The target is the third argument: auto(build_model, batch, target)." if ":" in batch else ""
        raise ValueError(
            f"batch={batch!r} is not a batch. Pass {LARGEST!r}, a number of rows, arrays or shapes.{order}"
        )
    require_step(step, (*internals.STEPS, "generate"))
    if depth is not None:
        require_builder_of_depth(build_model, depth)
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f"depth must be a positive number of blocks, but got {depth!r}.")
    fewest, options = objective == "devices", checked_compiler_options(compiler_options)
    if _are_targets(target, fewest):
        if not fewest:
            raise ValueError(
                f"Several targets {target!r} are for objective='devices', which finds the smallest one on which the "
                f"model fits, but objective is {objective!r}. Choose for one target at a time, and compare the times."
            )
        places = sorted((place_of(each, keep) for each in target), key=lambda place: len(place.devices))
    else:
        place = place_of(target, keep)
        places = place.with_fewer_devices() if fewest else [place]
    with show_progress(progress) as report:
        goal, names = "time" if fewest else objective, _strategies(strategies, step)
        finds_rows = isinstance(batch, str) or callable(batch)
        searches_options = search_step_options and step == "train" and objective == "time" and not finds_rows
        task = Task(build_model, step, names, trials, depth, options, goal, searches_options, report)
        choose_for = _choose_with_most_rows if finds_rows else choose
        failure: Exception | None = None
        notes: list[str] = []
        for place in places:
            try:
                choice = choose_for(task, place, batch)
                return replace(choice, objective=objective, notes=(*notes, *choice.notes))
            except Exception as error:  # the next place has more devices, and may have another compiler
                failure = error
                if not isinstance(error, (NothingFitsError, NoCandidateError)):  # of XLA, JAX, Keras or the model
                    notes.append(f"Nothing could be chosen for {place}. {error_line(error)}")
        assert failure is not None  # there is at least one place
        raise failure


def _are_targets(given: Any, fewest: bool) -> TypeGuard[Sequence[str | Target]]:
    """Whether these are several targets; names such as "gpu:0" are devices, unless the fewest are looked for."""
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(each, (str, Target)) for each in given):
        return False
    devices = ("cpu", "gpu", "tpu")
    return fewest or any(isinstance(each, Target) or each.partition(":")[0] not in devices for each in given)


def _strategies(names: Iterable[str] | None, step: str) -> tuple[str, ...]:
    known = (*STRATEGIES, *COMBINED)
    if names is None:
        return ("dp", "tp", "fsdp_tp") if step == "generate" else known
    chosen = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        fault = f"Unknown strategy {unknown[0]!r}" if unknown else "strategies is empty"
        meant = did_you_mean(str(unknown[0]).lower(), known) if unknown else ""
        raise ValueError(f"{fault}.{meant} Use some of {', '.join(map(repr, known))}, or leave the argument out.")
    return (*STRATEGIES, *chosen) if {*chosen}.issubset(COMBINED) else chosen


def _choose_with_most_rows(task: Task, place: Place, batch: Any) -> Choice:
    """Returns the best choice for the most rows that fit: a multiple of the number of devices, or fewer than these.

    The candidate that needs least memory decides whether a number of rows fits. From two numbers of rows on, its memory
    per row tells about how many fit, and the interval is halved until it is a sixteenth.
    """
    if place.hardware is None or place.hardware.memory_bytes is None:
        raise ValueError(f"The most rows that fit are unknown, because the memory of {place} is. Pass a batch.")
    count, batch_of = len(place.devices), batch if callable(batch) else int
    least = replace(task, objective="memory", trials=min(task.trials or _TRIALS_FOR_ROWS, _TRIALS_FOR_ROWS))
    rows, too_many = count, None
    smallest: Choice | None = None  # the choice for `rows`
    while smallest is None:
        try:
            smallest = choose(least, place, batch_of(rows), is_final=False)
        except NothingFitsError:
            if rows == 1:
                raise
            rows, too_many = rows // 2, rows
    granularity, notes = count if rows == count else 1, []
    try:
        while too_many is None or too_many - rows > max(granularity, rows // 16):
            if smallest.is_interrupted:
                raise KeyboardInterrupt
            more = max(_rows_expected(smallest.plan, rows), 2 * rows)
            middle = more if too_many is None else (rows + too_many) // 2
            middle -= middle % granularity
            try:
                with_more = choose(least, place, batch_of(middle), is_final=False)
            except Exception as error:  # too many rows, or one of XLA, JAX, Keras or the model: fewer rows remain
                too_many = middle
                if not isinstance(error, NothingFitsError):
                    notes.append(f"{middle} rows could not be compiled. {error_line(error)}")
                continue
            if too_many is None and with_more.plan.batch == smallest.plan.batch:
                raise ValueError(
                    f"The function that was passed as batch returns the same batch for {rows} and for {middle} rows. "
                    "Pass one whose batch has as many rows as its argument says, such as lambda rows: (rows, 128)."
                )
            smallest, rows = with_more, middle
        notes.insert(0, f"{counted(rows, 'row', 'fits', 'fit')}, {too_many} do not.")
        choice = smallest
        for wanted, quality in ((task, "fastest"), (least, "smallest")):
            try:
                choice = choose(wanted, place, batch_of(rows))
                break
            except Exception as error:  # what is fastest needs more than what is smallest, or fails
                if not isinstance(error, NothingFitsError):
                    notes.append(f"What is {quality} could not be chosen. {error_line(error)}")
    except KeyboardInterrupt:
        found = counted(rows, "row", "fits", "fit")
        notes.insert(0, f"{found}. The search for more, and for less time, was interrupted.")
        choice = replace(smallest, is_interrupted=True)
    return replace(choice, notes=(*notes, *choice.notes))


def _rows_expected(plan: Plan, rows: int) -> int:
    """Returns the rows that are expected to fit if all but the variables grow with them, at most 16 times as many."""
    memory = plan.memory
    free, used = (memory.capacity or 0) - memory.state, memory.total - memory.state
    return min(16 * rows, int(rows * free / max(used, 1)))
