"""The mixtures of experts of a model, and what expert parallelism sends for them: rows in place of weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from keras_dist.mixtures.recognition import Mixture
from keras_dist.planning.compiling.abstract_step import Step
from keras_dist.strategies.derived.expert_weights import weights_of_experts, with_mixtures
from keras_dist.strategies.derived.model_trace import trace_model


@dataclass(frozen=True)
class ExpertRows:
    """A mixture of a traced model, and its weights."""

    mixture: Mixture
    weights: frozenset[int]  # ids of variables
    tokens: float  # for each row of a batch

    def sent_bytes(self, rows: float, gathered: float, regathers: bool) -> float:
        """Returns the bytes of rows that a device of `rows` rows of a batch sends forward; 0.0 if it gathers weights.

        `gathered`: the bytes of its weights, which are gathered otherwise; `regathers`: again for the backward pass.
        """
        tokens = rows * self.tokens
        if not self.mixture.sends_tokens(tokens, gathered, regathers):
            return 0.0
        return tokens * self.mixture.choice.num_chosen * self.mixture.row_bytes


def mixtures_of(step: Step) -> list[ExpertRows]:
    """Returns the mixtures of a model that are computed sparsely. Raises a ValueError if it cannot be traced."""
    model = step.model
    if all(len(v.shape) < 3 for v in model.weights):
        return []
    program, mixtures = with_mixtures(trace_model(model, step.distribution.device_mesh, 1, step.batch))
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    ids = dict(zip(program.jaxpr.invars, map(id, variables), strict=False))
    inputs = program.jaxpr.invars[len(variables) :]
    rows = max((each.aval.shape[0] for each in inputs if each.aval.shape), default=1)
    return [
        ExpertRows(
            each, frozenset(ids[v] for v in weights_of_experts(program, [each]) if v in ids), each.num_tokens / rows
        )
        for each in mixtures
    ]


def num_experts(mixtures: Iterable[ExpertRows]) -> int:
    """Returns the number that the size of an expert axis has to divide; 0 without mixtures."""
    return math.gcd(*(each.mixture.choice.num_experts for each in mixtures))
