"""The mixtures of experts of a model, and what expert parallelism sends for them: rows in place of weights."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist.mixtures.recognition import Mixture
from keras_dist.planning.compiling.abstract_step import Step
from keras_dist.strategies.derived.expert_weights import weights_of_experts, with_mixtures
from keras_dist.strategies.derived.model_trace import trace_model
from keras_dist.tracing.jaxpr_evaluation import with_gradients


@dataclass(frozen=True)
class ExpertRows:
    """A mixture of a traced model, and its weights."""

    mixture: Mixture
    weights: frozenset[int]  # ids of the variables that may stay sharded
    tokens: float  # for each row of a batch
    trained: frozenset[Any]  # values that have gradients

    def sent_bytes(self, rows: float, weights: Sequence[tuple[float, bool]], regathers: bool) -> float:
        """Returns the bytes of rows that a device of `rows` rows of a batch sends; 0.0 if it gathers weights.

        `weights`: the bytes of those that are gathered otherwise, and whether they have gradients; `regathers`: again
        for the backward pass.
        """
        tokens = rows * self.tokens
        sends_tokens = self.mixture.sends_tokens(tokens, weights, self.trained, regathers)
        return tokens * self.mixture.token_bytes(self.trained) if sends_tokens else 0.0


def mixtures_of(step: Step) -> list[ExpertRows]:
    """Returns the mixtures of a model that are computed sparsely. Raises a ValueError if it cannot be traced."""
    model = step.model
    if all(len(v.shape) < 3 for v in model.weights):
        return []
    program, mixtures = with_mixtures(trace_model(model, step.distribution.device_mesh, 1, step.batch))
    jaxpr, num_trained = program.jaxpr, len(model.trainable_variables) if step.name == "train" else 0
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    ids = dict(zip(jaxpr.invars, map(id, variables), strict=False))
    inputs = jaxpr.invars[len(variables) :]
    rows = max((each.aval.shape[0] for each in inputs if each.aval.shape), default=1)
    trained, outside = frozenset(with_gradients(jaxpr, jaxpr.invars[:num_trained])), set(map(id, jaxpr.eqns))

    def kept(mixture: Mixture) -> Iterator[int]:
        if id(mixture.equations[-1]) in outside:  # weights are gathered before a loop
            yield from (ids[variable] for variable in weights_of_experts(program, [mixture]) if variable in ids)

    return [ExpertRows(each, frozenset(kept(each)), each.num_tokens / rows, trained) for each in mixtures]


def num_experts(mixtures: Iterable[ExpertRows]) -> int:
    """Returns the number that the size of an expert axis has to divide; 0 without mixtures."""
    return math.gcd(*(each.mixture.choice.num_experts for each in mixtures))
