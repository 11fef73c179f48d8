"""Reads a collective instruction: its kind, payload, bytes sent, groups of devices and mesh axes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from keras_dist.planning.hlo.megascale import Slices, transfer
from keras_dist.planning.hlo.parser import Computation, Instruction, Module
from keras_dist.planning.hlo.replica_groups import Groups, axes_of_groups, axes_of_pairs, parse_groups
from keras_dist.planning.hlo.shapes import leaves

_OPCODES = frozenset({
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
})  # fmt: skip
_PASSES_ON = ("bitcast", "get-tuple-element", "reshape", "copy")


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled module, or a transfer between slices that is part of one.

    Args:
        kind: HLO opcode without "-start": "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
            "collective-permute", "collective-broadcast" or "ragged-all-to-all".
        name: Name of the instruction.
        op_name: The JAX operation that it comes from, "" if the compiler kept none.
        tensors: Number of tensors that it combines.
        bytes: Payload of one run on one device, in bytes: the unsharded size of what is reduced, gathered or scattered,
            or the size of what one device exchanges or sends. Of a ragged-all-to-all, whose rows and buffers are of
            different sizes, it is the smaller one, which is what balanced routing exchanges.
        wire_bytes: Bytes that one device sends in one run, see `wire_bytes`.
        count: Number of runs in one execution of the module.
        group_size: Devices in a group; 2 for a collective-permute.
        axes: Mesh axes along which the devices of a group differ, outermost first; () for a group of one; None if the
            groups do not follow axes, or the axes are unknown. A group may span a part of an axis (see `group_size`):
            compilers split a collective over several slices or hosts into some within each and some between them.
        groups: Positions in the flattened mesh, or (source, target) pairs for a collective-permute. () if the module
            names unknown devices.
        dtype: HLO element type of the largest tensor.
        part_of: "all-gather" or "reduce-scatter" if the compiler decomposed one into collective-permutes, to overlap it
            with the matrix multiplication that uses it (windowed einsum); None otherwise.
        seconds: Probable time of all runs on its links; None if unknown.
        exposed_seconds: The part of it during which the device waits; None if unknown.
    """

    kind: str
    name: str
    op_name: str
    tensors: int
    bytes: int
    wire_bytes: float
    count: int
    group_size: int
    axes: tuple[str, ...] | None
    groups: Groups
    dtype: str
    part_of: str | None = None
    seconds: float | None = None
    exposed_seconds: float | None = None


def wire_bytes(kind: str, payload: float, group_size: int) -> float:
    """Returns the bytes that one device sends for a collective in a ring algorithm.

    `payload` is the size in bytes of the unsharded tensor that is reduced, gathered or scattered, or of what one device
    exchanges, sends or broadcasts.

    >>> wire_bytes("all-reduce", 800, 8), wire_bytes("all-gather", 800, 8), wire_bytes("collective-permute", 800, 2)
    (1400.0, 700.0, 800.0)

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
    Parallel and Distributed Computing 69 (2009); "Bus bandwidth" in
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    share = (group_size - 1) / group_size
    if kind == "all-reduce":
        return 2 * payload * share
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload) if group_size > 1 else 0.0
    return payload * share


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction communicates between devices. Of a `send` and its `recv` only the `send` counts."""
    if instruction.base_opcode != "send":
        return instruction.base_opcode in _OPCODES
    return "_source_target_pairs" in instruction.attributes or transfer(instruction) is not None


def read_collective(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    in_fusion: bool,
    axes: Mapping[str, int],
    slices: Slices,
) -> Collective:
    """Reads an instruction for which `is_collective` holds, with a count of 1. `axes` are sizes, outermost first."""
    kind, numbered, groups = _kind_and_groups(module, instruction, slices)
    tensors = [array for shape in computation.operand_shapes(instruction) for array in leaves(shape)]
    has_offsets = instruction.attribute("slice_sizes") and kind.endswith("permute")
    if kind == "ragged-all-to-all" or has_offsets or instruction.opcode == "send":
        # The other operands are offsets, sizes or tokens. Of a ragged exchange the second one is the output.
        num_buffers = 2 if instruction.base_opcode == "ragged-all-to-all" else 1
        tensors = [min(tensors[:num_buffers], key=lambda array: array.bytes)]
    if kind == "all-reduce" and in_fusion and _is_only_sliced(computation, instruction.name):
        # TPUs write a reduce-scatter as a fusion of an all-reduce and a slice.
        kind = "reduce-scatter"
    payload, count = sum(array.bytes for array in tensors), len(tensors)
    if kind == "collective-permute":
        size, axes_of = 2, axes_of_pairs
        sources = [source for source, target in numbered if source != target]
        sent = payload * max((sources.count(source) for source in set(sources)), default=0)
    else:
        size, axes_of = max(len(group) for group in numbered), axes_of_groups
        payload *= size if kind == "all-gather" else 1
        sent = wire_bytes(kind, payload, size)
    if kind == "all-to-all" and instruction.attribute("dimensions") is None:
        # Without a dim to split, the operands are the pieces of one tensor.
        count = 1
    windowed = re.search(r"windowed_dot_general_body_(ag|rs)", computation.name)
    return Collective(
        kind=kind,
        name=instruction.name,
        op_name=instruction.op_name,
        tensors=count,
        bytes=payload,
        wire_bytes=float(sent),
        count=1,
        group_size=size,
        axes=axes_of(groups, axes) if groups or not numbered else None,
        groups=groups,
        dtype=max(tensors, key=lambda array: array.bytes).dtype,
        part_of={"ag": "all-gather", "rs": "reduce-scatter"}[windowed[1]] if windowed else None,
    )


def _kind_and_groups(module: Module, instruction: Instruction, slices: Slices) -> tuple[str, Groups, Groups]:
    """The kind of a collective, and its groups or pairs as numbers in the text and as positions in the mesh."""
    kind, pairs = instruction.base_opcode, instruction.attribute("source_target_pairs")
    if between_slices := transfer(instruction):
        kind, numbered = between_slices
        return kind, numbered, slices.of_ids(numbered)
    if kind == "send":
        match = re.search(r'_source_target_pairs="?(\{\{.*?\}\})', instruction.attributes)
        kind, pairs = "collective-permute", match[1] if match else "{}"
    if pairs is not None:
        numbered = () if pairs == "{}" else parse_groups(pairs, module.devices)
    else:
        text = instruction.attribute("replica_groups") or instruction.attribute("device_list") or "{}"
        numbered = parse_groups(text, module.devices)
    return kind, numbered, slices.in_mesh(numbered)


def _is_only_sliced(computation: Computation, name: str) -> bool:
    users = computation.users.get(name, [])
    return bool(users) and all(
        user.opcode == "dynamic-slice" or (user.opcode in _PASSES_ON and _is_only_sliced(computation, user.name))
        for user in users
    )


def with_part_of(collectives: list[Collective]) -> Iterator[Collective]:
    """Completes `part_of` of permutes outside the loop of a windowed einsum, which share its op name."""
    parts = {each.op_name: each.part_of for each in collectives if each.part_of and each.op_name}
    for each in collectives:
        is_candidate = each.kind == "collective-permute" and each.part_of is None
        yield replace(each, part_of=parts.get(each.op_name)) if is_candidate else each
