"""`keras-dist`: plans, meshes, devices and programs of several processes on the command line.

    keras-dist plan model.py:build --target v5e:4x4 --mesh data:4,model:4 --layout model.py:layout --batch 64
    keras-dist mesh data:2,model:4 --target v5e:2x4
    keras-dist devices
    keras-dist launch -n 2 --devices-per-process 4 train.py --epochs 3

What is asked for goes to standard output, everything else to standard error. The exit status is 0; 1 where a plan does
not fit; 2 where what was asked for cannot be, or where a function of the user raises, whose traceback is shown. That of
`launch` is that of the first process that fails; what the processes print goes where they print it, each line behind
the number of its process.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras_dist as kd
from keras_dist.multihost.launcher import launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the words after `keras-dist`; by default those that the process was started with.

    Returns:
        The exit status: 0, 1 where a plan does not fit, 2 after an error.

    Example:

    >>> main(["mesh", "data:2,model:4", "--json"])  # doctest: +ELLIPSIS
    {"total_devices": 8, "available_devices": 8, "axes": {"data": 2, "model": 4}, "platform": "cpu", ...}
    0
    """
    try:
        parsed = _parser().parse_args(arguments)
    except SystemExit as asked:  # help and version, or words that are no command
        return int(asked.code or 0)
    if parsed.command is _launch:
        return _launch(parsed)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what functions of the user print is no part of the answer
            answer, status = parsed.command(parsed)
    except Exception as error:
        if isinstance(error, (ValueError, TypeError)) and _is_ours(error):
            print(f"keras-dist: error: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars are no reason to fail where standard output is no Unicode
    print(answer)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("keras-dist", description="Plans, meshes, devices and launches of keras_dist.")
    parser.add_argument("--version", action="version", version=f"keras-dist {kd.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="{plan,mesh,devices,launch}")

    plan = commands.add_parser(
        "plan",
        help="what a step of a model holds, sends and takes on hardware that need not be attached",
        epilog="Functions are named 'module:function' or 'path/to/file.py:function'. The exit status is 1 where the "
        "plan does not fit.",
    )
    plan.add_argument("model", help="a function that returns the compiled model; with --depth of the number of blocks")
    plan.add_argument("--target", required=True, help="hardware and shape, such as v5e:4x4, h100:2x8 or cpu:8")
    plan.add_argument("--slices", type=int, default=1, help="how many TPU slices of that shape (default: 1)")
    plan.add_argument("--mesh", required=True, help="the axes, such as data:4,model:4; one size may be -1")
    plan.add_argument(
        "--layout",
        help="a function of the mesh that returns a LayoutMap, with which the batch lies over the first axis, or a "
        "distribution (default: the batch over the first axis, weights replicated)",
    )
    plan.add_argument("--batch", required=True, help="the number of rows, or a function that returns a batch")
    plan.add_argument("--step", choices=("train", "test", "predict"), default="train", help="(default: train)")
    plan.add_argument("--depth", type=int, help="compile two small numbers of blocks and extrapolate to this one")
    plan.set_defaults(command=_plan)

    mesh = commands.add_parser("mesh", help="which device sits where in a mesh")
    mesh.add_argument("axes", help="the axes, such as data:2,model:4; one size may be -1")
    devices = mesh.add_mutually_exclusive_group()
    devices.add_argument("--target", help="hardware that need not be attached, such as v5e:2x4 or cpu:8")
    devices.add_argument("--devices", type=int, help="how many of this machine's devices to take (default: all)")
    mesh.add_argument("--slices", type=int, default=1, help="how many TPU slices of the target (default: 1)")
    mesh.set_defaults(command=_mesh)

    listing = commands.add_parser("devices", help="this machine's devices, or the hardware that can be planned for")
    listing.add_argument("--hardware", action="store_true", help="the hardware that targets can name")
    listing.set_defaults(command=_devices)

    for command in (plan, mesh, listing):
        command.add_argument("--json", action="store_true", help="print JSON")

    launching = commands.add_parser(
        "launch",
        help="run a program as several processes on this machine, for development",
        usage="%(prog)s [-h] -n PROCESSES [--devices-per-process N] (script.py | -m module) [argument ...]",
        epilog="In the program, keras_dist.initialize() without arguments joins the processes.",
    )
    launching.add_argument("-n", "--processes", type=int, required=True, help="how many processes")
    launching.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="N simulated CPU devices for each process (default: each process takes the devices of this machine)",
    )
    launching.add_argument("-m", dest="module", action="store_true", help="the program is the name of a module")
    launching.add_argument("program", help="a Python script, or a module")
    launching.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    launching.set_defaults(command=_launch)
    return parser


def _is_ours(error: BaseException) -> bool:
    """Whether an error was raised by this package, not by what it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return Path(frames[-1].f_code.co_filename).resolve().is_relative_to(Path(__file__).resolve().parent)


# -------------------------------------------------------------------------------------------------- commands


def _plan(parsed: argparse.Namespace) -> tuple[str, int]:
    devices = _target(parsed.target, parsed.slices)  # before a module of the user starts JAX
    build = _function(parsed.model)
    layout = None if parsed.layout is None else _function(parsed.layout)
    if ":" not in parsed.batch and not re.fullmatch(r"-?\d+", parsed.batch):
        raise ValueError(
            "A batch is a whole number of rows, or a function that returns a batch. Received: "
            f"--batch {parsed.batch!r}. Write, for example, --batch 64 or --batch model.py:batch."
        )
    batch = _function(parsed.batch) if ":" in parsed.batch else int(parsed.batch)
    mesh = kd.create_device_mesh(parsed.mesh, devices=devices)
    planned = kd.plan(
        build,
        _distribution(layout, mesh),
        batch() if callable(batch) else batch,
        step=parsed.step,
        depth=parsed.depth,
    )
    return planned.to_json() if parsed.json else str(planned), 1 if planned.fits is False else 0


def _mesh(parsed: argparse.Namespace) -> tuple[str, int]:
    if parsed.target is None and parsed.slices != 1:
        raise ValueError(f"Slices are those of a target. Received: --slices {parsed.slices}. Add --target, or drop it.")
    devices = parsed.devices if parsed.target is None else _target(parsed.target, parsed.slices)
    mesh = kd.create_device_mesh(parsed.axes, devices=devices)
    info = mesh.info()
    if parsed.json:
        return json.dumps(info | {"longest_link": {k: v._asdict() for k, v in info["longest_link"].items()}}), 0
    from keras_dist.mesh.axes import spell_axes

    links = ", ".join(f"{axis} {link}" for axis, link in info["longest_link"].items())
    info |= {"axes": spell_axes(info["axes"]), "longest_link": links}
    width = max(map(len, info))
    lines = [f"{name.replace('_', ' ').ljust(width)}  {value}" for name, value in info.items()]
    return "\n".join([*lines, "", mesh.picture()]), 0


def _devices(parsed: argparse.Namespace) -> tuple[str, int]:
    from keras_dist._report.as_json import to_plain_data

    if parsed.hardware:
        return json.dumps(to_plain_data(kd.hardware), indent=2) if parsed.json else repr(kd.hardware), 0
    import jax

    from keras_dist._report.tables import Table
    from keras_dist._report.units import bytes_text
    from keras_dist.mesh.devices import device_name

    rows = [
        {
            "name": device_name(device),
            "kind": device.device_kind,
            "platform": device.platform,
            "process": device.process_index,
            "memory_bytes": _memory_bytes(device),
        }
        for device in jax.devices()
    ]
    if parsed.json:
        return json.dumps(rows, indent=2), 0
    cells = []
    for row in rows:
        *named, memory = row.values()
        cells.append([*map(str, named), "not known" if memory is None else bytes_text(memory)])
    return Table(("name", "kind", "platform", ">process", ">memory"), cells).to_text(), 0


def _launch(parsed: argparse.Namespace) -> int:
    program = ["-m", parsed.program] if parsed.module else [parsed.program]
    try:
        outcome = launch([sys.executable, *program, *parsed.arguments], parsed.processes, parsed.devices_per_process)
    except ValueError as error:
        print(f"keras-dist: error: {error}", file=sys.stderr)
        return 2
    if outcome.failed is not None:
        print(
            f"keras-dist: process {outcome.failed} was the first to fail, with exit status {outcome.status}.",
            file=sys.stderr,
        )
    return outcome.status


# -------------------------------------------------------------------------------------------------- what they need


def _function(name: str) -> Callable:
    """The function that is named `module:function` or `path/to/file.py:function`."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ValueError(
            f"A function is named by its module or its file. Received: {name!r}. Write 'module:function' or "
            "'path/to/file.py:function'."
        )
    module = _file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        way_out = f"It has {', '.join(functions)}" if functions else "It has none at all"
        raise ValueError(f"A function must be there. Received: {name!r}, which {module_name!r} lacks. {way_out}.")
    return found


def _module(name: str) -> Any:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that this one imports
        raise ValueError(
            f"A module is importable from the current directory. Received: {name!r}, which is not there. Change the "
            "directory, or write 'path/to/file.py:function'."
        ) from None


def _file(path: Path) -> Any:
    path = path.resolve()
    name = str(path.with_suffix(""))  # which no module of another file can have
    if name not in sys.modules:
        if not path.is_file():
            raise ValueError(f"A function lies in a file that is there. Received: {str(path)!r}. Correct the path.")
        _look_in(path.parent)  # as for a program that Python runs
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _look_in(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _target(name: str, slices: int) -> Any:
    """The devices of a target, for which no accelerator of this machine is claimed."""
    import jax

    simulated = re.fullmatch(r"cpu:([1-9]\d*)", name)
    if simulated is not None:
        kd.simulate_devices(int(simulated[1]))
    elif not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")
    return kd.target(name, slices)


def _distribution(layout: Callable | None, mesh: kd.DeviceMesh) -> kd.Distribution:
    import keras

    first = mesh.axis_names[0]
    if layout is None:
        if len(mesh.axis_names) == 1:
            return kd.DataParallel(mesh)
        return kd.ModelParallel(layout_map=kd.LayoutMap(mesh), batch_dim_name=first)
    made = layout(mesh)
    if isinstance(made, keras.distribution.LayoutMap):
        made = kd.ModelParallel(layout_map=made, batch_dim_name=first)
    if not isinstance(made, kd.Distribution):
        raise TypeError(
            f"A layout function returns a LayoutMap or a distribution of keras_dist. Received: {made!r} "
            f"({type(made).__name__}). Return, for example, keras_dist.LayoutMap(mesh) with rules."
        )
    if made.device_mesh != mesh:
        raise ValueError(
            f"A plan is for the mesh that the layout function is given. Received: one on {made.device_mesh}, not on "
            f"{mesh}. Make the LayoutMap with keras_dist.LayoutMap(mesh)."
        )
    return made


def _memory_bytes(device: Any) -> int | None:
    """The memory that a device says it has, else that of its kind."""
    known = kd.hardware.of_device(device)
    return (device.memory_stats() or {}).get("bytes_limit", None if known is None else known.memory_bytes)


if __name__ == "__main__":
    sys.exit(main())
