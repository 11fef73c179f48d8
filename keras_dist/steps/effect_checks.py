"""Errors of options and axes that have no effect, once it is known which mixtures of experts and losses a step has."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from keras_dist._report.variable_groups import path_kind, path_regex
from keras_dist.layout.rule_matching import strip_model_names
from keras_dist.layout.tensor_layout import axis_tuple
from keras_dist.mesh.axes import spell_axes
from keras_dist.mixtures.recognition import DENSE, MixtureCall
from keras_dist.passes.token_part import LossCall
from keras_dist.steps.options import OptionWithoutEffectError, StepOptions


def check_expert_options(mixtures: Sequence[MixtureCall], options: StepOptions) -> None:
    """Raises an error if options need mixtures that are computed for chosen experts, and a step has none."""
    if any(mixture.form != DENSE for mixture in mixtures):
        return
    if options.experts == "sparse":
        name = "experts"
    elif options.expert_capacity is not None:
        name = "expert_capacity"
    else:
        return
    reasons = [f"{mixture.layer or 'A layer'}: {mixture.reason}" for mixture in mixtures]
    raise OptionWithoutEffectError(
        name,
        f"{name}={getattr(options, name)!r} finds no mixture of experts whose other experts can be left out. "
        + ("; ".join(reasons) if reasons else "The step has no sum over experts that are chosen by top_k")
        + ". Leave the option out to compute all experts for each token, or use keras_dist.experts in the layer.",
    )


def check_loss_chunk(losses: Sequence[LossCall], options: StepOptions) -> None:
    """Raises an error if losses are to be computed in chunks, and a step has none that can be."""
    if options.loss_chunk is None or any(loss.products for loss in losses):
        return
    found = "the step has no product of a batch with a matrix"
    if losses:
        found = f"the last product, of {losses[-1].layer or 'the step'!r}, is not only reduced: {losses[-1].reason}"
    raise OptionWithoutEffectError(
        "loss_chunk",
        f"loss_chunk={options.loss_chunk} finds no logits that are only used by losses and metrics of each token: "
        f"{found}. Leave the option out, or compute in the model's loss and metrics what uses the logits.",
    )


def check_expert_axes(mixtures: Sequence[MixtureCall], model: Any, distribution: Any) -> None:
    """Raises an error if the mixtures of a step cannot be sharded over the expert axes of a distribution."""
    axes = {name: distribution.device_mesh.axis_sizes[name] for name in axis_tuple(distribution.expert_dim_name)}
    if not axes:
        return
    argument, parts = f"expert_dim_name={distribution.expert_dim_name!r}", math.prod(axes.values())
    if not mixtures:
        _raise(
            f"{argument} finds no mixture of experts to shard over {spell_axes(axes)}: the step has no sum over "
            f"experts that are chosen by top_k. Leave the argument out, or use keras_dist.experts in the layer."
        )
    for mixture in mixtures:
        if mixture.form != DENSE and mixture.num_experts % parts:
            _raise(
                f"{argument} cannot shard the {mixture.num_experts} experts of {mixture.layer!r} over "
                f"{spell_axes(axes)}: {mixture.num_experts} is not divisible by {parts}. Use axes whose product "
                f"divides {math.gcd(*(each.num_experts for each in mixtures))}."
            )
    if distribution.lacks_rule_for_experts:
        rules = "".join(_rules(mixtures, model, tuple(axes)))
        _raise(
            f"{argument} shards no experts: the layout map has no rule that shards dim 0 of a weight over "
            f"{spell_axes(axes)}. Add a rule for the weights of experts, or use FullyShardedDataParallel, which needs "
            f"none.{rules}"
        )


def _rules(mixtures: Sequence[MixtureCall], model: Any, axes: tuple[str, ...]) -> Sequence[str]:
    """Returns rules for the weights of the mixtures, one for those of equal blocks."""
    counts = {mixture.num_experts for mixture in mixtures}
    weights = [v for v in model.weights if len(v.shape) > 2 and v.shape[0] in counts]
    inside = [v for v in weights if any(v.path.startswith(f"{mixture.layer}/") for mixture in mixtures)]
    kinds = sorted(((path_kind(v.path), len(v.shape)), v.path) for v in inside or weights)
    paths = {strip_model_names(v.path) for v in model.weights}
    rules = []
    for (_, rank), group in itertools.groupby(kinds, key=lambda pair: pair[0]):
        found = [strip_model_names(path) for _, path in group]
        entries = (axes[0] if len(axes) == 1 else axes, *[None] * (rank - 1))
        rules.append(f"\n    layout_map[{path_regex(found, paths.difference(found))!r}] = {entries}")
    return rules


def _raise(message: str) -> None:
    raise OptionWithoutEffectError("expert_dim_name", message)
