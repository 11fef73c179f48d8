"""`keras-dist`, the command line of keras_dist: its options. `keras_dist/cli.py` has the commands.

A module outside of the package, because importing the package imports Keras, which takes seconds: `--help` and mistyped
options need none of it.
"""

import argparse
import difflib
import importlib.util
import os
import re
import signal
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DESCRIPTION = "Plan, inspect and launch distributed training of Keras models on JAX."
_PLAN = """\
Compile a step of a model for hardware that need not be attached, and report per device: memory (and whether it fits),
communication, a lower bound on step time, and the layout of each variable. Nothing is executed.

MODEL, LAYOUT and BATCH name functions, as 'path/to/file.py:function' or 'package.module:function'.
"""
_PLAN_EXAMPLES = """\
examples:
  keras-dist plan train.py:build --target h100:8 --mesh data:8 --batch 256
  keras-dist plan train.py:build --target v5e:4x4 --mesh data:4,model:4 --layout train.py:layout --batch 64
  keras-dist plan train.py:build --target v5p:4x4x4 --mesh fsdp:64 --layout train.py:layout --batch 64 --depth 80

exit status: 0 if the step fits or the capacity is unknown, 1 if it does not fit, 2 after an error
"""
_AUTO = """\
Choose the mesh and the strategy for a model: candidates are compiled for hardware that need not be attached, and
compared by the forecast of a step's time, by memory, or by the number of devices. Nothing is executed.

MODEL and BATCH name functions, as 'path/to/file.py:function' or 'package.module:function'.
"""
_AUTO_EXAMPLES = """\
examples:
  keras-dist auto train.py:build --target v5e:4x4 --batch 64
  keras-dist auto train.py:build --target v5p:4x4x4 --batch train.py:batch --depth 32 --keep model:4
  keras-dist auto train.py:build --target h100:8 --batch largest --strategies fsdp,fsdp_tp
  keras-dist auto train.py:build --target v5e:2x4 --target v5e:4x4 --batch 64 --objective devices

exit status: 0 if a candidate fits or the capacity is unknown, 1 if none fits, 2 after an error
"""
_ESTIMATE = """\
Estimate the memory of a model for each dtype policy and strategy. Without --target: the bytes of weights, gradients and
optimizer state, and the fewest devices of each hardware that hold them. With --target and --rows, a step is compiled
for hardware that need not be attached, and all of its memory is reported. No weights are read or downloaded.

PRESET_OR_BUILDER is a preset of KerasHub (a name, a handle, or a folder with a config.json, also Hugging Face's), or a
function that returns the compiled model, as 'path/to/file.py:function' or 'package.module:function'.
"""
_ESTIMATE_EXAMPLES = """\
examples:
  keras-dist estimate llama3.2_1b
  keras-dist estimate hf://meta-llama/Llama-3.2-1B --dtype mixed_bfloat16 --optimizer adamw
  keras-dist estimate llama3.2_1b --target v5e:2x4 --target h100:8 --rows 8 --sequence 1024

exit status: 0 if a strategy fits or the capacity is unknown, 1 if none fits, 2 after an error
"""
_TARGET = "hardware: v5e:4x4, v5e:16, h100:8, h100:2x8 (2 hosts of 8), cpu:8, or a cloud name such as a3-highgpu-8g"
_AXES = "mesh axes and their sizes, such as data:4,model:4; one size may be -1"


class _Parser(argparse.ArgumentParser):
    """Names the closest option, command or value for one that is misspelled.

    By itself, argparse reports a misspelled option as another one that is missing.
    """

    _words: Sequence[str] = ()
    commands: "Mapping[str, _Parser]" = types.MappingProxyType({})  # of the main parser

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        command = next((self.commands[word] for word in self._words if word in self.commands), self)
        options = list(command._option_string_actions)
        words = message.split() if message.startswith("unrecognized") else self._words
        wrong = [word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2]
        for word in wrong if "expected" not in message else ():
            if not any(option.startswith(word) for option in options):
                close = f"there is no option {word!r}.{_meant(word, options)}"
                argparse.ArgumentParser.error(command, f"{close} {command.prog} --help lists all options.")
        if value := re.search(r"invalid choice: '([^']*)'", message):
            choices = [*self.commands, *(each for action in self._actions for each in action.choices or ())]
            message = f"{message.replace(chr(39), '')}.{_meant(value[1], choices)}"  # quotes depend on Python's release
        super().error(message)


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, sorted(set(known)), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _missing_program(program: str, is_module: bool) -> str | None:
    """Returns the error about a program that does not exist, before processes are started for it."""
    if is_module:
        name = program.partition(".")[0]  # of a module in a package, which is not imported here
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found:
            return None
        return f"module not found: {name!r}, in {os.getcwd()!r} or among the installed packages. Start it in its folder"
    if re.fullmatch(r"python[0-9.]*", os.path.basename(program)) and not os.path.isfile(program):
        return f"{program!r} is no program of Python. Leave it out: keras-dist launch -n 2 train.py"
    if os.path.exists(program):
        return None
    folder = os.path.dirname(program) or "."
    names = os.listdir(folder) if os.path.isdir(folder) else ()
    return f"file not found: {os.path.abspath(program)!r}.{_meant(os.path.basename(program), names)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The arguments after `keras-dist`; by default those of this process.

    Returns:
        The exit status: 0; 1 if a plan or no candidate fits, or `doctor` finds something to change; 2 after an error.
        For `launch`, the status of the first process that failed.
    """
    parser = _parser()
    try:
        parsed = parser.parse_args(arguments)
        if parsed.command is None and not parsed.version:
            parser.error("choose a command: plan, auto, estimate, mesh, devices, doctor or launch")
        if parsed.command == "launch" and (missing := _missing_program(parsed.program, parsed.module)):
            parser.commands["launch"].error(missing)
    except SystemExit as ended:  # help, or arguments that are not understood
        return int(ended.code or 0)
    if parsed.command == "doctor":  # reports another backend, with which the package cannot be imported
        parsed.keras_backend = os.environ.get("KERAS_BACKEND")
        os.environ["KERAS_BACKEND"] = "jax"
    if parsed.command == "launch" and parsed.elastic:  # a request for all processes, before any has been started
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    from keras_dist import __version__, cli

    if parsed.version:
        print(f"keras-dist {__version__}")
        return 0
    return cli.run(parsed)


def _parser() -> _Parser:
    parser = _Parser("keras-dist", description=_DESCRIPTION)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(
        title="commands", metavar="{plan,auto,estimate,mesh,devices,doctor,launch}", dest="command"
    )
    parser.commands = commands.choices

    def add_command_for_models(
        name: str, model: str = "MODEL", model_help: str = "function that returns the compiled model", **texts: Any
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
        command.add_argument("model", metavar=model, help=model_help)
        return command

    plan = add_command_for_models(
        "plan",
        help="estimate memory, communication and time of a step, without the hardware",
        usage="%(prog)s MODEL --target TARGET --mesh AXES --batch BATCH [options]",
        description=_PLAN,
        epilog=_PLAN_EXAMPLES,
    )
    plan.add_argument("--target", required=True, help=_TARGET)
    plan.add_argument("--mesh", required=True, metavar="AXES", help=_AXES)
    plan.add_argument("--batch", required=True, help="global number of rows, or a function that returns a batch")
    plan.add_argument(
        "--layout",
        help="function that takes the mesh and returns a distribution, or a LayoutMap (the batch is then sharded over "
        "the first axis). Default: weights are replicated, and the batch is sharded over the first axis",
    )
    plan.add_argument(
        "--depth",
        type=int,
        help="number of blocks to extrapolate to: MODEL takes a number of blocks, and is compiled with 2 and 4",
    )
    plan.add_argument(
        "--step-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of kd.StepOptions, such as microbatches=4, remat=full or offload=optimizer; may be repeated",
    )

    auto = add_command_for_models(
        "auto",
        help="choose the mesh and the strategy for a model, without the hardware",
        usage="%(prog)s MODEL --batch BATCH [--target TARGET] [options]",
        description=_AUTO,
        epilog=_AUTO_EXAMPLES,
    )
    auto.add_argument(
        "--batch",
        required=True,
        help="global number of rows, a function that returns a batch, 'largest' for the most rows that fit, or for the "
        "same a function of the number of rows",
    )
    auto.add_argument(
        "--target",
        action="append",
        help=f"{_TARGET}. With --objective devices it may be repeated. Default: the devices of this machine",
    )
    auto.add_argument(
        "--objective", choices=("time", "memory", "devices"), default="time", help="what to minimize (default: time)"
    )
    auto.add_argument("--keep", metavar="AXES", help="mesh axes of fixed size, such as data:4")
    auto.add_argument("--strategies", metavar="NAMES", help="strategies to choose from, such as dp,fsdp,tp_sp")
    auto.add_argument("--trials", type=int, help="the most candidates to compile (default: a quarter, at most 12)")
    auto.add_argument("--depth", type=int, help="number of blocks to extrapolate to: MODEL takes a number of blocks")
    auto.add_argument("--all", action="store_true", help="show all candidates (default: the ten best)")
    auto.add_argument(
        "--no-step-options",
        action="store_true",
        help="do not search step options (remat, microbatches, offload) for candidates that do not fit without them",
    )

    estimate = add_command_for_models(
        "estimate",
        "PRESET_OR_BUILDER",
        "preset of KerasHub, or function that returns the compiled model",
        help="estimate the memory of a preset or a model, for each dtype and strategy",
        usage="%(prog)s PRESET_OR_BUILDER [--target TARGET --rows ROWS [--sequence N]] [options]",
        description=_ESTIMATE,
        epilog=_ESTIMATE_EXAMPLES,
    )
    estimate.add_argument("--target", action="append", help=f"{_TARGET}. May be repeated")
    estimate.add_argument("--rows", type=int, help="global number of rows of a batch")
    estimate.add_argument(
        "--sequence",
        type=int,
        metavar="N",
        help="size of the dims that inputs leave open, such as tokens of a row",
    )
    estimate.add_argument(
        "--dtype",
        action="append",
        choices=("float32", "mixed_bfloat16", "bfloat16", "mixed_float16", "float16"),
        help="dtype policy to build the model with; may be repeated. Default: without --target, the first three; with "
        "--target, Keras's",
    )
    estimate.add_argument("--optimizer", help="name of an optimizer of Keras. Default: the model's, or adam")

    mesh = commands.add_parser("mesh", help="show which device is where in a mesh")
    mesh.add_argument("axes", metavar="AXES", help=_AXES)
    devices = mesh.add_mutually_exclusive_group()
    devices.add_argument("--target", help=_TARGET)
    devices.add_argument("--devices", type=int, help="number of devices of this machine to use (default: all)")

    listing = commands.add_parser("devices", help="list this machine's devices, or the hardware to plan for")
    listing.add_argument("--hardware", action="store_true", help="list the hardware that targets can name")

    doctor = commands.add_parser(
        "doctor",
        help="check how this machine is set up: versions, devices, links, memory, and what to change",
        epilog="exit status: 0 if nothing must be changed, 1 if something must, 2 after an error",
    )

    for command in (plan, auto, estimate):
        steps = ("train", "test", "predict", *(("generate",) if command is not estimate else ()))
        command.add_argument("--step", choices=steps, default="train", help="(default: train)")
    for command in (plan, auto):
        command.add_argument(
            "--compiler-option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="an option of XLA, such as xla_tpu_scoped_vmem_limit_kib=98304; may be repeated",
        )
    for command in (plan, auto, estimate, mesh):
        command.add_argument(
            "--slices", type=int, default=1, help="number of TPU slices of the target's shape (default: 1)"
        )
    for command in (plan, auto, estimate, mesh, listing, doctor):
        command.add_argument("--json", action="store_true", help="print JSON")

    launch = commands.add_parser(
        "launch",
        help="run a program as several processes on this machine",
        usage="%(prog)s [-h] -n PROCESSES [--devices-per-process N] [--all-output] [--elastic [--min-processes N]] "
        "[--stop-grace SECONDS] (script.py | -m module) [argument ...]",
        epilog="In the program, keras_dist.initialize() without arguments joins the processes. SIGTERM and SIGUSR1 are "
        "passed on to them, for keras_dist.TrainingCheckpoint.",
    )
    launch.add_argument("-n", "--processes", type=int, required=True, help="number of processes")
    launch.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="number of simulated CPU devices of each process (default: each process uses this machine's devices)",
    )
    launch.add_argument(
        "--all-output",
        action="store_true",
        help="print standard output of all processes (default: of process 0; standard error is always printed)",
    )
    launch.add_argument(
        "--elastic",
        action="store_true",
        help="if a process dies, start all but one again, which continue from their newest checkpoint; on SIGUSR2, "
        "start all of them",
    )
    launch.add_argument(
        "--min-processes", type=int, metavar="N", help="with --elastic: the fewest that are started (default: 1)"
    )
    launch.add_argument(
        "--stop-grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time for processes to save and end after SIGTERM or SIGUSR1 (default: 30)",
    )
    launch.add_argument("-m", dest="module", action="store_true", help="the program is the name of a module")
    launch.add_argument("program", help="Python script or module")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    return parser
