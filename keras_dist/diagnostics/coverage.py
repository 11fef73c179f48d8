"""`Coverage`: which rule lays out which variable of a model, and what each device then holds, as data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from keras_dist._report.as_json import to_plain_data
from keras_dist._report.variable_groups import PlacedVariable
from keras_dist.layout.layout_map import Rule
from keras_dist.mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from keras_dist.diagnostics.findings import Finding

SEVERAL_RULES = "several rules match"  # why a variable is not laid out


@dataclass(frozen=True)
class CoveredVariable(PlacedVariable):
    """A variable of a model, its layout, and what decided on it.

    Attributes:
        trainable: whether it is trained.
        whole_bytes: what all of it takes.
        why: what decided on the axes, or why nothing could.
        fits: whether it can be laid out; if not, it is counted as replicated.
    """

    trainable: bool
    whole_bytes: int
    why: str
    fits: bool


@dataclass(frozen=True)
class Coverage:
    """Which rule lays out which variable of a model. It prints as a report.

    Attributes:
        model: the name of the model.
        mesh: the device mesh.
        distribution: the distribution, spelled out.
        variables: weights, optimizer slots where the optimizer is built, and other state, one by one.
        layers: the path of each layer.
        rules: the rules of the layout map, in its order.
        first_match_wins: whether the first rule that matches a path gives it its layout. If not, one may match.
        unused: the rules that lay nothing out: for each, which rules take the paths that it matches, and how many.
            One without takers matches nothing.
        device_bytes: what each device holds, by the name of the device.
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

    @cached_property
    def findings(self) -> "tuple[Finding, ...]":
        """What is probably not what was meant, each with the way out: first what cannot be laid out at all."""
        from keras_dist.diagnostics.findings import findings_of

        return findings_of(self)

    @property
    def whole_bytes(self) -> int:
        """What all variables take, each counted once."""
        return sum(v.whole_bytes for v in self.variables)

    @property
    def bytes(self) -> int:
        """What the device that holds most holds."""
        return max(self.device_bytes.values(), default=0)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of variables that every device holds in whole."""
        return sum(v.whole_bytes for v in self.variables if v.is_replicated)

    @property
    def imbalance(self) -> float:
        """The bytes of the device that holds most over the mean; 1.0 where all hold as much."""
        total = sum(self.device_bytes.values())
        return self.bytes * len(self.device_bytes) / total if total else 1.0

    @property
    def copies(self) -> float:
        """How many devices hold a byte, on average; 1.0 where each byte is held once."""
        return sum(self.device_bytes.values()) / self.whole_bytes if self.whole_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the coverage as numbers, strings, lists and dicts, which JSON can spell."""
        names = ("bytes", "whole_bytes", "replicated_bytes", "imbalance", "copies")
        return {
            "model": self.model,
            "mesh": self.mesh.axis_sizes,
            "devices": self.mesh.devices.size,
            "distribution": self.distribution,
            **{name: getattr(self, name) for name in names},
            "findings": to_plain_data(self.findings),
            "rules": {rule.pattern: to_plain_data(rule.layout.axes) for rule in self.rules},
            "first_match_wins": self.first_match_wins,
            "unused": to_plain_data(self.unused),
            "variables": to_plain_data(self.variables),
            "layers": list(self.layers),
            "device_bytes": dict(self.device_bytes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the coverage as JSON.

        Args:
            indent: spaces for each level, None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        from keras_dist.diagnostics.coverage_report import as_text

        return as_text(self)

    def __repr__(self) -> str:
        return f"<Coverage of {self.model!r}: {len(self.variables)} variables, {len(self.findings)} findings>"

    def _repr_html_(self) -> str:
        from keras_dist.diagnostics.coverage_report import as_html

        return as_html(self)
