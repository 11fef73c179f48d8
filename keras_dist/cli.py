"""The commands of `keras-dist`; `keras_dist_cli.py` has their options.

Results go to standard output, everything else to standard error, also what functions of the user print. An error of
this package is one line; one in the user's code keeps its traceback.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras

import keras_dist as kd
from keras_dist._keras import model_structure
from keras_dist._report.argument_errors import did_you_mean
from keras_dist._report.report import to_plain_data
from keras_dist._report.tables import WIDTH, Lines, Table, render_text
from keras_dist._report.units import bytes_text, counted
from keras_dist.interchange.presets import preset_builder
from keras_dist.mesh.axes import known_product, parse_axes, spell_axes
from keras_dist.monitoring import system_facts
from keras_dist.monitoring.doctor import diagnose
from keras_dist.multihost.launcher import launch, launch_elastic, print_all_processes, print_first_process
from keras_dist.planning.compiling.abstract_step import derived_batch
from keras_dist.planning.reports.state_estimate import estimate_state, state_text
from keras_dist.planning.search.by_strategy import plans_by_strategy
from keras_dist.planning.search.choice import MAX_ROWS, Candidates, NothingFitsError
from keras_dist.variables.deferred import built

_DTYPES = "float32", "mixed_bfloat16", "bfloat16"  # policies of `estimate` without a target


def run(options: argparse.Namespace) -> int:
    """Runs a command with its options, prints its result, and returns the exit status."""
    if options.command == "launch":
        return _launch(options)
    commands = {"plan": _plan, "auto": _auto, "estimate": _estimate, "mesh": _mesh, "devices": _devices}
    command = {**commands, "doctor": _doctor}[options.command]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result, status = command(options)
    except Exception as error:
        if isinstance(error, (ValueError, TypeError)) and _is_raised_here(error):
            print(f"keras-dist: error: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode can still show a report
    try:
        print(result, flush=True)
    except BrokenPipeError:  # `| head` has read what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _is_raised_here(error: BaseException) -> bool:
    """Whether this package raised an error, not something it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return Path(frames[-1].f_code.co_filename).resolve().is_relative_to(Path(__file__).resolve().parent)


def _plan(options: argparse.Namespace) -> tuple[str, int]:
    devices = _target(options.target, options.slices)  # before the user's module starts JAX
    build = _function(options.model)
    layout = None if options.layout is None else _function(options.layout)
    mesh = kd.create_device_mesh(options.mesh, devices=devices)
    distribution = _distribution(layout, mesh)
    step_options = dict(map(_step_option, options.step_option))
    distribution = distribution.with_step_options(dataclasses.replace(distribution.step_options, **step_options))
    batch = _batch(options.batch)
    if callable(batch):
        raise ValueError(
            f"The function of --batch {options.batch} takes an argument, which a plan has no value for. Give the "
            "argument a default, or pass a function without arguments."
        )
    planned = kd.plan(
        build,
        distribution,
        batch,
        step=options.step,
        depth=options.depth,
        compiler_options=dict(map(_compiler_option, options.compiler_option)),
    )
    return planned.to_json() if options.json else str(planned), 1 if planned.fits is False else 0


def _auto(options: argparse.Namespace) -> tuple[str, int]:
    _check_slices(options)
    if options.target is not None and len(options.target) > 1 and options.objective != "devices":
        raise ValueError(
            f"Several targets ({', '.join(options.target)}) need --objective devices, which chooses the smallest on "
            "which the model fits. For other objectives, give one target at a time."
        )
    targets = [_target(name, options.slices) for name in options.target or ()]  # before the user's module starts JAX
    build = _function(options.model)
    shown = None if options.all else MAX_ROWS, "--all shows all."
    try:
        choice = kd.auto(
            build,
            batch=options.batch if options.batch == "largest" else _batch(options.batch),
            target=(targets[0] if len(targets) == 1 else targets) or None,
            objective=options.objective,
            step=options.step,
            keep=options.keep,
            strategies=None if options.strategies is None else options.strategies.split(","),
            trials=options.trials,
            depth=options.depth,
            compiler_options=dict(map(_compiler_option, options.compiler_option)),
            search_step_options=not options.no_step_options,
        )
    except NothingFitsError as error:
        candidates = Candidates(error.trials)
        if options.json:
            return json.dumps({"fits": False, "error": str(error), **candidates.to_dict()}, indent=2), 1
        return f"{render_text(candidates._sections(*shown))}\n\n{textwrap.fill(str(error), WIDTH)}", 1
    return choice.to_json() if options.json else render_text(choice._sections(*shown)), 0


def _estimate(options: argparse.Namespace) -> tuple[str, int]:
    _check_slices(options)
    passed = [f"--{name}" for name in ("rows", "sequence") if getattr(options, name) is not None]
    if options.target is None and passed:
        raise ValueError(f"{passed[0]} needs --target, to compile a step for. Add, for example, --target v5e:2x4.")
    if options.target is not None and options.rows is None:
        raise ValueError(f"--target {options.target[0]} needs the global number of rows. Add, for example, --rows 64.")
    targets = [_target(name, options.slices) for name in options.target or ()]  # before the user's module starts JAX
    _check_optimizer(options.optimizer)
    is_function = ":" in options.model and "://" not in options.model and not Path(options.model).is_dir()
    build = _function(options.model) if is_function else preset_builder(options.model)

    def build_under(dtype: str | None) -> Callable:
        return functools.wraps(build)(lambda: _built_under(dtype, options.optimizer, build))  # errors name `build`

    if not targets:
        states = {dtype: estimate_state(build_under(dtype), options.step) for dtype in options.dtype or _DTYPES}
        return json.dumps(to_plain_data(states), indent=2) if options.json else state_text(states), 0
    plans, notes = {}, {}
    for dtype, target in itertools.product(options.dtype or [None], targets):
        with built(build_under(dtype)) as model:
            batch = _batch_of_rows(model, options)
        found, more = plans_by_strategy(build_under(dtype), batch, target, options.step)
        names = [dtype, target.name if len(targets) > 1 else None]
        plans |= {", ".join(filter(None, [label, *names])): planned for label, planned in found.items()}
        notes |= dict.fromkeys(more)
    status = int(all(planned.fits is False for planned in plans.values()))
    comparison = kd.compare(**plans)
    if options.json:
        return json.dumps({"plans": comparison.to_dict(), "notes": list(notes)}, indent=2), status
    return render_text([*comparison._sections(), *([("Notes", [Lines(tuple(notes))])] if notes else [])]), status


def _check_optimizer(name: str | None) -> None:
    kinds = {key.lower(): kind for key, kind in vars(keras.optimizers).items() if inspect.isclass(kind)}
    wrappers = "optimizer", "lossscaleoptimizer", "multioptimizer"  # and the base class, which need other arguments
    known = [key for key, kind in kinds.items() if issubclass(kind, keras.Optimizer) and key not in wrappers]
    if name is not None and name.lower() not in known:
        meant = did_you_mean(name, known) or " Write the name of a class of keras.optimizers, such as adamw."
        raise ValueError(f"Unknown --optimizer {name!r}.{meant}")


def _built_under(dtype: str | None, optimizer: str | None, build: Callable) -> Any:
    """Returns the model that a function builds with a dtype policy of Keras, with another optimizer if one is named."""
    default = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype or default)
    try:
        model = build()
        if optimizer is not None and isinstance(model, keras.Layer):
            model.optimizer = keras.optimizers.get(optimizer)
        return model
    finally:
        keras.config.set_dtype_policy(default)


def _batch_of_rows(model: Any, options: argparse.Namespace) -> Any:
    inputs, _ = model_structure.inputs_and_outputs(model)
    shapes = [list(tensor.shape) for tensor in jax.tree.leaves(inputs)]
    has_open_dims = any(None in shape[1:] for shape in shapes)
    if options.sequence is not None and options.sequence < 1:
        raise ValueError(f"--sequence {options.sequence} must be positive. Write, for example, --sequence 1024.")
    if has_open_dims and options.sequence is None:
        raise ValueError(
            f"Inputs of {model.name!r} have dims of unknown size: {shapes}. Add their size in a batch, such as the "
            "number of tokens of a row: --sequence 1024."
        )
    if options.sequence is not None and not has_open_dims:
        raise ValueError(
            f"--sequence {options.sequence} is the size of dims that inputs leave open, but those of {model.name!r} "
            f"have the shapes {shapes}. Leave it out."
        )
    return derived_batch(model, options.rows, options.step, options.sequence)


def _check_slices(options: argparse.Namespace) -> None:
    if options.target is None and options.slices != 1:
        raise ValueError(f"--slices {options.slices} needs --target. Add, for example, --target v5e:4x4.")


def _batch(text: str) -> Any:
    """Returns the batch that `--batch` stands for: rows, what a function returns, or a function of rows itself."""
    if ":" in text:
        function = _function(text)
        needs_rows = any(
            each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            for each in inspect.signature(function).parameters.values()
        )
        return function if needs_rows else function()
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    raise ValueError(
        f"--batch {text!r} is neither a number of rows nor a function that returns a batch. Write, for example, "
        "--batch 64 or --batch model.py:batch."
    )


def _compiler_option(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError(
            f"--compiler-option {text!r} is not of the form NAME=VALUE. Write, for example, --compiler-option "
            "xla_tpu_scoped_vmem_limit_kib=98304."
        )
    return name, value


def _step_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    names = [field.name for field in dataclasses.fields(kd.StepOptions)]
    if name not in names or not value:
        close = difflib.get_close_matches(name, names, 1)
        example = f"--step-option {close[0] if close else 'microbatches'}={value if close and value else 4}"
        fix = f"Did you mean {example}?" if close and value else f"Write, for example, {example}."
        raise ValueError(
            f"--step-option {text!r} is not of the form NAME=VALUE, with a name of {', '.join(names)}. {fix}"
        )
    if name in ("offload", "without_passes"):
        return name, tuple(value.split(","))
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return name, number(value)
    return name, value


def _mesh(options: argparse.Namespace) -> tuple[str, int]:
    _check_slices(options)
    devices = options.devices if options.target is None else _target(options.target, options.slices)
    axes = parse_axes(options.axes)
    needed = known_product(axes)
    if devices is None and needed > jax.device_count():
        raise ValueError(
            f"Mesh {spell_axes(axes)} needs {counted(needed, 'device')}, but this machine has {jax.device_count()}. "
            f"Add --target to show it for other hardware, for example --target cpu:{needed}."
        )
    mesh = kd.create_device_mesh(options.axes, devices=devices)
    info = mesh.info()
    if options.json:
        return json.dumps(info | {"longest_link": {k: v._asdict() for k, v in info["longest_link"].items()}}), 0
    links = ", ".join(f"{axis} {link}" for axis, link in info["longest_link"].items())
    info |= {"axes": spell_axes(info["axes"]), "longest_link": links}
    width = max(map(len, info))
    lines = [f"{name.replace('_', ' ').ljust(width)}  {value}\n" for name, value in info.items()]
    return f"{''.join(lines)}\n{mesh.picture()}", 0


def _devices(options: argparse.Namespace) -> tuple[str, int]:
    if options.hardware:
        return json.dumps(to_plain_data(kd.hardware), indent=2) if options.json else repr(kd.hardware), 0
    rows = []
    for device in jax.devices():
        facts, known = system_facts.device_facts(device), kd.hardware.of_device(device)
        memory = facts["memory_bytes"] or (None if known is None else known.memory_bytes)
        rows.append({name: facts[name] for name in ("name", "kind", "platform", "process")} | {"memory_bytes": memory})
    if options.json:
        return json.dumps(rows, indent=2), 0
    cells = [
        [*map(str, named), "unknown" if memory is None else bytes_text(memory)]
        for *named, memory in (row.values() for row in rows)
    ]
    return Table(("name", "kind", "platform", ">process", ">memory"), cells).to_text(), 0


def _doctor(options: argparse.Namespace) -> tuple[str, int]:
    diagnosis = diagnose(system_facts.collect(options.keras_backend))
    return diagnosis.to_json() if options.json else str(diagnosis), int(diagnosis.must_change)


def _launch(options: argparse.Namespace) -> int:
    program = ["-m", options.program] if options.module else [options.program]
    command = [sys.executable, *program, *options.arguments]
    show = print_all_processes if options.all_output else print_first_process
    elastic = functools.partial(launch_elastic, min_processes=options.min_processes or 1)
    start = elastic if options.elastic else launch
    try:
        if not options.elastic and options.min_processes is not None:
            raise ValueError(f"--min-processes {options.min_processes} needs --elastic. Add it.")
        outcome = start(
            command, options.processes, options.devices_per_process, show=show, stop_grace=options.stop_grace
        )
    except ValueError as error:
        print(f"keras-dist: error: {error}", file=sys.stderr)
        return 2
    if outcome.failed is not None:
        text = f"keras-dist: process {outcome.failed} was the first to fail, with exit status {outcome.status}."
        print(text, file=sys.stderr)
    return outcome.status


def _function(name: str) -> Callable:
    """Returns the function named `module:function` or `path/to/file.py:function`."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ValueError(f"{name!r} does not name a function. Write 'path/to/file.py:function' or 'module:function'.")
    file = Path(module_name).resolve() if module_name.endswith(".py") else None
    directory = str(Path.cwd() if file is None else file.parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as Python does for a script
    module = _module(module_name) if file is None else _file(file)
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        listed = f" It has {', '.join(functions)}." if functions else ""
        close = difflib.get_close_matches(attribute, functions, 1)
        meant = f" Did you mean {module_name}:{close[0]}?" if close else ""
        raise ValueError(f"{module_name} has no function {attribute!r}.{meant or listed}")
    return found


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports one that does not
        raise ValueError(
            f"Module not found: {name!r}, in {str(Path.cwd())!r} or among the installed packages. Write "
            "'path/to/file.py:function' for a function in a file."
        ) from None


def _file(path: Path) -> Any:
    name = str(path.with_suffix(""))  # unique among files
    if name not in sys.modules:
        if not path.is_file():
            raise ValueError(f"File not found: {str(path)!r}.")
        spec: Any = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _target(name: str, slices: int) -> kd.Target:
    """Returns a target without claiming accelerators of this machine."""
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")
    return kd.target(name, slices)


def _distribution(layout: Callable | None, mesh: kd.DeviceMesh) -> kd.Distribution:
    if layout is None and len(mesh.axis_names) == 1:
        return kd.DataParallel(mesh)
    made = kd.LayoutMap(mesh) if layout is None else layout(mesh)
    if isinstance(made, keras.distribution.LayoutMap):
        made = kd.ModelParallel(layout_map=made, batch_dim_name=mesh.axis_names[0])
    if not isinstance(made, kd.Distribution):
        raise TypeError(
            f"The layout function returned {made!r} ({type(made).__name__}) instead of a LayoutMap or a "
            "keras_dist.Distribution. Return, for example, keras_dist.LayoutMap(mesh) with rules."
        )
    if made.device_mesh != mesh:
        raise ValueError(
            f"The layout function returned a layout for {made.device_mesh} instead of the mesh that it got, {mesh}. "
            "Make the LayoutMap with keras_dist.LayoutMap(mesh)."
        )
    return made
