"""Names of targets: hardware with a shape (`"v5e:4x4"`) or a count (`"v5e:16"`), and names of cloud machines."""

import contextlib
import difflib
import math
import re
import tomllib
from importlib import resources

from keras_dist.mesh.tpu_generations import tpu_generation_of
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.hardware.registry import hardware

EXAMPLES = "'v5e:4x4', 'v5p:2x2x2', 'h100:8' or 'h100:2x8' (2 hosts of 8)"

# Google's TPU accelerator types. Some count TensorCores, of which a chip has two: "v5p-8" has 4 chips. Kaggle writes
# "TPU v5e-8", Colab "v5e-1 TPU". Source: https://cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}.
_ACCELERATOR_TYPE = re.compile(r"(?:TPU )?(v2|v3|v4|v5p|v5e|v5litepod|v6e|tpu7x)-([1-9]\d{0,4})(?: TPU)?")
_COUNTS_CORES = ("v2", "v3", "v4", "v5p", "tpu7x")
_OTHER_NAMES = {"v5lite": "v5e", "v6": "v6e", "trillium": "v6e", "v7": "tpu7x", "v7x": "tpu7x", "ironwood": "tpu7x"}
# Machines with GPUs: a pattern of names, the hardware, and the number of GPUs unless it is a group of the pattern.
_MACHINES = tomllib.loads(resources.files("keras_dist.planning.targets").joinpath("machines.toml").read_text())
_NAME = re.compile(r"([\w.-]+):([1-9]\d{0,4}(?:x[1-9]\d{0,4}){0,2})")
_LIST = "print(keras_dist.hardware) lists all hardware."


def parse_target_name(name: str) -> tuple[Hardware, tuple[int, ...]]:
    """Returns the hardware and the shape that the name of a target stands for; see `keras_dist.target`.

    Raises a ValueError with the fix if the name cannot be read, or for hardware or a shape that does not exist.

    >>> entry, shape = parse_target_name("v5litepod-8")
    >>> entry.name, shape
    ('v5e', (2, 4))
    """
    entry, shape = _parsed(name)
    _require_shape(f"{entry.name}:{'x'.join(map(str, shape))}", entry, shape)
    return entry, shape


def _parsed(name: str) -> tuple[Hardware, tuple[int, ...]]:
    if slice_name := _ACCELERATOR_TYPE.fullmatch(name):
        generation, count = slice_name[1].replace("v5litepod", "v5e"), int(slice_name[2])
        if generation in _COUNTS_CORES:
            count = max(count // 2, 1)
        return hardware[generation], _slice_shape(name, hardware[generation], count)
    for pattern, chip, *known_count in _MACHINES["machines"]:
        if machine := re.fullmatch(pattern, name):
            count = known_count[0] if known_count else int(machine[1])
            return hardware[chip], (1, count) if count > 8 else (count,)
    match = _NAME.fullmatch(name)
    if match is None:
        is_empty = re.fullmatch(r"[^:]+:(\d+x)*0+(x\d+)*", name)
        fault = "There are no devices in" if is_empty else "Cannot read the name of"
        advice = _suggestion(name) or f"Write hardware and shape: {EXAMPLES}. {_LIST}"
        raise ValueError(f"{fault} target {name!r}. {advice}")
    chip, shape = match[1], tuple(map(int, match[2].split("x")))
    if chip not in hardware:
        known = f"Use one of {', '.join(hardware)}, or add yours with keras_dist.hardware.register(...)."
        raise ValueError(f"Unknown hardware {chip!r} in target {name!r}. {_suggestion(name) or known}")
    entry = hardware[chip]
    return entry, _slice_shape(name, entry, shape[0]) if entry.platform == "tpu" and len(shape) == 1 else shape


def _slice_shape(name: str, entry: Hardware, chips: int) -> tuple[int, ...]:
    """Returns the usual shape of a TPU slice of a power of two chips: 2D 8 -> 2x4, 3D 4 -> 2x2x1, 32 -> 2x4x4."""
    dims = _sides(entry) or 3
    exponent = chips.bit_length() - 1
    if chips != 2**exponent:
        example = "2x4" if dims == 2 else "2x2x4"
        raise ValueError(
            f"Target {name!r} has {chips} chips, which is not a power of two. Write the {dims} sides of the slice, for "
            f"example '{entry.name}:{example}'."
        )
    sides = sorted(2 ** (exponent // dims + (dim < exponent % dims)) for dim in range(dims))
    return tuple(sides if dims == 2 or sides[0] > 1 else reversed(sides))


def _require_shape(name: str, entry: Hardware, shape: tuple[int, ...]) -> None:
    """Raises a ValueError with the fix if no hardware of this kind has this shape."""
    if entry.platform == "cpu" and len(shape) != 1:
        raise ValueError(f"Target {name!r} has a shape, but CPU devices have none. Write 'cpu:{math.prod(shape)}'.")
    if entry.platform == "gpu" and len(shape) > 2:
        raise ValueError(
            f"Target {name!r} has {len(shape)} sizes. Write GPUs per host, or hosts x GPUs: '{entry.name}:2x8'."
        )
    generation = tpu_generation_of(entry.device_kind) if entry.platform == "tpu" else None
    if generation is None:
        return
    x, y, z = [*shape, 1, 1][:3]
    if generation.is_2d and z > 1:
        raise ValueError(
            f"Slices of {entry.name} have two sides, but target {name!r} has three. Write, for example, "
            f"'{entry.name}:4x4'."
        )
    largest, side = generation.largest_slice, generation.longest_side
    if math.prod(shape) > largest or (generation.is_2d and max(x, y) > side):
        limit = f"{side}x{side}" if generation.is_2d else f"{largest}"
        raise ValueError(
            f"Target {name!r} exceeds the largest slice of {entry.name}, which has {limit} chips. Use several slices "
            "with slices=2 or more."
        )
    if any(chips > 1 and chips % 2 for chips in (x, y)):
        raise ValueError(
            f"There is no slice {name!r}: hosts of {entry.name} have 2x2 chips, so each of its first two sides must be "
            f"even or 1. Write, for example, '{entry.name}:{'4x4' if generation.is_2d else '2x2x4'}'."
        )


def _suggestion(name: str) -> str:
    """Returns a question with the nearest target that exists, or nothing if none is near."""
    text = re.sub(r"^(?:google|nvidia|tpu|gpu)[\s_-]*", "", name.strip().lower())
    text = re.sub(r"^(\d+)\s*x\s*([a-z].*)$", r"\2:\1", text)  # "8xH100"
    text = re.sub(r"[\s_-]*(16|80)\s*gb", "", text)  # of V100, A100 and H100, whose names are without it
    names = {known.lower(): known for known in hardware}
    others = {other: known for other, known in _OTHER_NAMES.items() if known in hardware}
    longest_first = "|".join(map(re.escape, sorted(names | others, key=len, reverse=True)))
    if match := re.fullmatch(rf"({longest_first})[\s_:x*-]*((?:\d+x){{0,2}}\d+)?", text):
        near, shape = [(names | others)[match[1]]], match[2] or ""
    else:
        wrong, _, shape = text.partition(":")
        near = [names[each] for each in difflib.get_close_matches(wrong, names, 3, 0.65)]
    entries = sorted((hardware[each] for each in near), key=lambda entry: _sides(entry) != shape.count("x") + 1)
    # The shape of the name first, for any of the hardware that is near; else a usual one of the nearest.
    candidates = [(entry, shape) for entry in entries if _sides(entry) in (None, shape.count("x") + 1)]
    candidates += [(entry, f"{shape}x1") for entry in entries if _sides(entry) == 3 and shape.count("x") == 1]
    candidates += [(entry, {None: "8", 2: "4x4", 3: "2x2x2"}[_sides(entry)]) for entry in entries]
    for entry, sides in candidates:
        suggested = f"{entry.name}:{sides}"
        with contextlib.suppress(ValueError):  # there is no such shape
            if _NAME.fullmatch(suggested) and parse_target_name(suggested):
                return f"Did you mean {suggested!r}? {_LIST}"
    return ""


def _sides(entry: Hardware) -> int | None:
    """Returns the number of sides of a TPU slice, None for other hardware."""
    generation = tpu_generation_of(entry.device_kind)
    return None if generation is None else 2 if generation.is_2d else 3
