"""`Coverage`: which rule shards which variable of a model, and the memory per device. Data, and how it prints."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keras_dist._report.report import Report, to_plain_data
from keras_dist._report.tables import Lines, Section, Table
from keras_dist._report.units import bytes_text, count_text, counted, percent_text
from keras_dist._report.variable_groups import VARIABLE_COLUMNS, PlacedVariable, variable_rows
from keras_dist.layout.layout_map import Rule
from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.device_mesh import DeviceMesh

SEVERAL_RULES = "several rules match"  # the reason why a variable has no layout

_MAX_GROUPS = {"weights": 30, "optimizer": 6, "other": 6}  # rows per part of the model
_MAX_FINDINGS = 20
_MAX_LAYERS = 12  # listed that gather sequences


@dataclass(frozen=True)
class CoveredVariable(PlacedVariable):
    """A variable of a model, its layout, and the reason for it.

    `rule` is the key of the layout map that matches the variable, even if its layout does not fit; None if no key or
    several keys match. `axes` are all None if the layout does not fit.

    Attributes:
        trainable: Whether it is trainable.
        whole_bytes: Bytes of the unsharded variable.
        why: The reason for the axes, or for the lack of a layout.
        fits: Whether it can have its layout; if not, it is counted as replicated.
        base: The path of the weight whose rule it has, if it is a LoRA factor or what quantization stores.
    """

    trainable: bool
    whole_bytes: int
    why: str
    fits: bool
    base: str | None = None


@dataclass(frozen=True)
class Finding:
    """A likely mistake.

    Attributes:
        kind: `"does not fit"` (the layout of a rule, or of a distribution), `"several rules"` (match one path),
            `"random state"` (is sharded by a rule), `"no match"` (of a rule), `"shadowed"` (a rule all or some of whose
            paths other rules take), `"replicated"` (weights, over an axis that shards others) or `"idle axis"` (of the
            mesh).
        message: The fault, the values, and the fix. Rules to paste are on lines of their own, indented.
        bytes: Unsharded bytes of the variables concerned.
        paths: Paths of these variables; of a rule without a match, those that it was probably meant for.
        rule: The key of the layout map concerned, or None.
    """

    kind: str
    message: str
    bytes: int
    paths: tuple[str, ...]
    rule: str | None


@dataclass(frozen=True)
class Coverage(Report):
    """Which rule shards which variable of a model, and likely mistakes. Prints as a report.

    Attributes:
        model: Name of the model.
        mesh: The device mesh.
        distribution: The distribution, as text.
        variables: All variables: weights, optimizer state if it exists, and other state.
        layers: The paths of all layers.
        rules: The rules of the layout map, in order.
        first_match_wins: Whether the first matching rule wins; otherwise only one rule may match a path.
        unused: Rules that determine no layout. For each of them, the rules that apply to its paths instead, with the
            number of paths; an empty dict means that the rule matches nothing.
        device_bytes: Bytes of variables on each device, by device name.
        idle_axes: Mesh axes that shard neither the batch, nor a variable, nor an activation.
        batch_axes: Mesh axes that shard dim 0 of the batch.
        sequence_axes: Mesh axes that shard dim 1 of the batch.
        expert_axes: Mesh axes that shard dim 0 of experts' weights.
        gathered_sequences: With sequence axes, paths of Keras's layers for which sequences are gathered, and the
            reason. Other layers that call `keras.ops.conv` also gather them.
        notes: What the figures leave out.
        findings: Likely mistakes. Those that prevent a layout come first.
    """

    model: str
    mesh: DeviceMesh
    distribution: str
    variables: tuple[CoveredVariable, ...]
    layers: tuple[str, ...]
    rules: tuple[Rule, ...]
    first_match_wins: bool
    unused: Mapping[str, Mapping[str, int]]
    device_bytes: Mapping[str, int]
    idle_axes: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = ()
    sequence_axes: tuple[str, ...] = ()
    expert_axes: tuple[str, ...] = ()
    gathered_sequences: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def whole_bytes(self) -> int:
        """Bytes of all variables, unsharded."""
        return sum(v.whole_bytes for v in self.variables)

    @property
    def bytes(self) -> int:
        """Bytes of variables on the fullest device."""
        return max(self.device_bytes.values(), default=0)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the variables that every device stores unsharded."""
        return sum(v.whole_bytes for v in self.variables if v.is_replicated)

    @property
    def imbalance(self) -> float:
        """Bytes on the fullest device divided by the mean over devices; 1.0 if all store the same amount."""
        total = sum(self.device_bytes.values())
        return self.bytes * len(self.device_bytes) / total if total else 1.0

    @property
    def copies(self) -> float:
        """Average replication factor: the number of devices that store a byte, on average; 1.0 without replicas."""
        return sum(self.device_bytes.values()) / self.whole_bytes if self.whole_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the coverage as numbers, strings, lists and dicts, which JSON can encode."""
        names = "bytes", "whole_bytes", "replicated_bytes", "imbalance", "copies"
        figures = {name: getattr(self, name) for name in names}
        mesh = {"mesh": self.mesh.axis_sizes, "devices": self.mesh.devices.size}
        rules = {rule.pattern: rule.layout.axes for rule in self.rules}
        return to_plain_data(figures | vars(self) | mesh | {"rules": rules})

    def __repr__(self) -> str:
        counts = f"{counted(len(self.variables), 'variable')}, {counted(len(self.findings), 'finding')}"
        return f"<Coverage of {self.model!r}: {counts}>"

    def _sections(self) -> Iterator[Section]:
        parameters = sum(math.prod(v.shape) for v in self.variables if v.part == "weights")
        yield f"{self.model}, {counted(count_text(parameters), 'parameter')}", [Lines(tuple(self._summary()))]
        if self.findings:
            yield "Possible problems", [Lines(tuple(numbered_lines(self.findings, _MAX_FINDINGS, ".findings")))]
        if self.gathered_sequences:
            layers = [*self.gathered_sequences.items()]
            if len(layers) > _MAX_LAYERS:
                layers[_MAX_LAYERS:] = [(f"... and {len(layers) - _MAX_LAYERS} more", "see .gathered_sequences")]
            yield "Layers that gather sequences", [Table(("layer", "reason"), layers)]
        rows = variable_rows(self.variables, _MAX_GROUPS, lambda variable: variable.why)
        footer = ("total per device", "", "", "", bytes_text(self.bytes))
        yield "Variables, and their bytes per device", [Table(("path, reason", *VARIABLE_COLUMNS), rows, footer)]

    def _summary(self) -> Iterator[str]:
        kind = self.distribution.lstrip("<").split()[0]
        yield f"{counted(self.mesh.devices.size, 'device')}, mesh {spell_axes(self.mesh.axis_sizes)}, {kind}"
        if self.sequence_axes:
            axes = spell_axes({name: self.mesh.axis_sizes[name] for name in self.sequence_axes})
            yield f"Sequences, dim 1 of the batch, are sharded over {axes}."
        if self.expert_axes:
            axes = spell_axes({name: self.mesh.axis_sizes[name] for name in self.expert_axes})
            yield f"Experts, dim 0 of their weights, are sharded over {axes}."
        total = self.whole_bytes
        text = f"Each device holds {bytes_text(self.bytes)} of {bytes_text(total)}"
        text += f" (average replication factor {self.copies:.3g})."
        if self.imbalance > 1.001:
            text += f" The fullest device holds {self.imbalance:.3g} times the mean."
        yield text
        if total:
            replicated = self.replicated_bytes
            yield f"Replicated on every device: {bytes_text(replicated)} ({percent_text(replicated / total)})."
        if self.rules:
            effect = f"{len(self.unused)} unused" if self.unused else "all matched"
            yield f"{counted(len(self.rules), 'rule')}, {effect}."
        elif kind == "ModelParallel":
            yield "The layout map is empty."
        yield from self.notes


def numbered_lines(findings: tuple[Finding, ...], most: int, where: str) -> Iterator[str]:
    """Yields a numbered list of at most `most` findings, line by line; the others can be seen in `where`."""
    for number, finding in enumerate(findings[:most], 1):
        yield from f"{number}. {finding.message}".split("\n")
    if len(findings) > most:
        yield f"... and {len(findings) - most} more, see {where}"
