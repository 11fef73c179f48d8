"""What `auto` expects of a candidate that is not compiled: from closed forms, and from those that are compiled."""

from collections import defaultdict
from collections.abc import Mapping

from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.search.candidates import CONTEXT, DATA, MODEL, Candidate
from keras_dist.planning.search.search_space import (
    ATTENTION,
    EXPERTS,
    NOMINAL,
    PURPOSES,
    SEQUENCE,
    TENSOR,
    WEIGHTS,
    Sizes,
)

# Reads and writes of a training step's update for each byte of weights and optimizer state: Adam reads weight, gradient
# and two averages (16 bytes of 4-byte numbers) and writes three (12), for 12 bytes of state.
_UPDATE_TRAFFIC = 28 / 12
# How often a training step moves weights for matrix multiplications: forward, backward, and their gradients.
_PASSES = 3
# How often a step moves weights besides, at most: to convert and copy them and their gradients. The rest has to do with
# activations.
_CONVERSIONS = 6
# The fraction of the activations between sharded layers, which tensor parallelism alone does not shard.
_UNSHARDED_ACTIVATIONS = 0.5
# The most of a collective's time that is expected not to overlap, until a compiled candidate shows it.
_UNKNOWN_EXPOSURE = 1.0
# The least fraction of the expected exposure that a candidate may have, if one of its kind is compiled, and if not.
_MIN_EXPOSED_FRACTION, _MIN_FRACTION_OF_UNKNOWN_KIND = 0.8, 0.5
# Fraction of the gathered weights that a step holds if its blocks gather them again for the backward pass.
_HELD_WEIGHTS = 0.25


class Estimates:
    """Expected time and memory of candidates, from their sizes and from those that are compiled so far.

    The first compiled candidate gives the time of the computation of a row, and the activations of one. Others have
    their share of it by what their axes divide. What a compiled candidate shows beyond that (the time that its
    collectives do not overlap, another time of its computation, other temporaries) is expected of its kind, too.
    """

    def __init__(self, sizes: Mapping[Candidate, Sizes], hardware: Hardware | None):
        self._sizes, self._hardware = sizes, hardware
        self._is_training = any(each.updated for each in sizes.values())
        self._time_base: tuple[Candidate, Plan] | None = None
        self._memory_base: tuple[Candidate, Plan] | None = None
        self._seconds: dict[Candidate, float] = {}
        self._exposed: dict[tuple, float] = {}
        self._slower: dict[tuple, float] = defaultdict(lambda: 1.0)
        self._larger: dict[tuple, float] = defaultdict(lambda: 1.0)

    def observe(self, candidate: Candidate, plan: Plan) -> None:
        kind = _kind(candidate)
        if self._memory_base is None:
            self._memory_base = candidate, plan
        elif expected := self._temporaries(candidate):
            self._larger[kind] = self._larger[kind] * plan.memory.temporaries / expected
        if plan.flops == 0:
            return  # the compiler stopped when memory did not suffice
        self._seconds[candidate] = seconds_of(plan)
        busy, expected = _busy_seconds(plan), self._compute_seconds(candidate)
        for purpose, exposed in _exposed_seconds(candidate, plan).items():
            total = self._sizes[candidate].wire_seconds[purpose]
            if total > 0:
                self._exposed[_key(purpose, candidate)] = exposed / total
            else:
                busy += exposed  # what no closed form foresaw is expected of its kind
        if self._time_base is None:
            self._time_base = candidate, plan
        elif expected:
            self._slower[kind] = self._slower[kind] * busy / expected

    def seconds(self, candidate: Candidate) -> float:
        simpler = (self._seconds.get(each) or self._seconds_with(each, 1.0) for each in self.simpler(candidate))
        return max([self._seconds_with(candidate, 1.0), *simpler])

    def simpler(self, candidate: Candidate) -> list[Candidate]:
        """Returns the candidates that compute as much on a device as this one does, and communicate less."""
        known = [each for each in candidate.communicating_less if each in self._sizes]
        return [each for each in known if self._sizes[each].tokens <= self._sizes[candidate].tokens]

    def min_seconds(self, candidate: Candidate) -> float:
        """Returns the time of a step at peak rates, if all communication overlaps with the computation."""
        sent = self._sizes[candidate].min_wire_seconds
        if self._time_base is None:
            return sent
        return max(self._least_matmul_seconds(candidate, *self._time_base) + self._update_seconds(candidate), sent)

    def optimistic_seconds(self, candidate: Candidate) -> float:
        """Returns the expected time of a step if more of its communication overlaps than in those compiled."""
        is_known = any(_kind(each) == _kind(candidate) for each in self._seconds)
        return self._seconds_with(candidate, _MIN_EXPOSED_FRACTION if is_known else _MIN_FRACTION_OF_UNKNOWN_KIND)

    def bytes(self, candidate: Candidate) -> float:
        return self.min_bytes(candidate) + self._temporaries(candidate)

    def min_bytes(self, candidate: Candidate) -> float:
        """Returns the memory that variables and batch take."""
        return self._sizes[candidate].state + self._sizes[candidate].batch

    def _seconds_with(self, candidate: Candidate, factor: float) -> float:
        """Returns the time of a step if its collectives are exposed by `factor` times what is expected.

        Those of which none was seen are expected to overlap as well as the best of the others.
        """
        wire = self._sizes[candidate].wire_seconds
        unknown = min((_UNKNOWN_EXPOSURE, *self._exposed.values()))
        exposed = sum(seconds * self._exposed.get(_key(each, candidate), unknown) for each, seconds in wire.items())
        return max(self._compute_seconds(candidate) + factor * exposed, *wire.values())

    def _compute_seconds(self, candidate: Candidate) -> float:
        if self._time_base is None:
            return 0.0
        base, plan = self._time_base
        ours, theirs = self._sizes[candidate], self._sizes[base]
        busy = _busy_seconds(plan)
        matmul_seconds = min(max(_matmul_seconds(plan), self._weights_seconds(base)), busy)
        update_seconds = min(self._update_seconds(base), busy - matmul_seconds)
        rest = busy - matmul_seconds - update_seconds
        conversion_seconds = min(rest, self._memory_seconds(_CONVERSIONS * theirs.weights))
        multiplied = max(self._least_matmul_seconds(candidate, base, plan), self._weights_seconds(candidate))
        activation_seconds = (rest - conversion_seconds) * _activated(candidate) / _activated(base)
        activated = activation_seconds * (ours.tokens / theirs.tokens)
        converted = conversion_seconds * ours.weights / max(theirs.weights, 1.0)
        seconds = multiplied + activated + converted + self._update_seconds(candidate)
        return seconds * self._slower[_kind(candidate)]

    def _least_matmul_seconds(self, candidate: Candidate, base: Candidate, plan: Plan) -> float:
        """Returns the time of the matrix multiplications at peak rates, from that of the first compiled candidate."""
        ours, theirs = self._sizes[candidate], self._sizes[base]
        part = _multiplied(candidate, ours) / _multiplied(base, theirs)
        return ours.tokens / theirs.tokens * part * min(_matmul_seconds(plan), _busy_seconds(plan))

    def _weights_seconds(self, candidate: Candidate) -> float:
        """Returns the time of reading the weights for matrix multiplications: what few tokens take."""
        return self._memory_seconds((_PASSES if self._is_training else 1) * self._sizes[candidate].weights)

    def _update_seconds(self, candidate: Candidate) -> float:
        return self._memory_seconds(_UPDATE_TRAFFIC * self._sizes[candidate].updated)

    def _memory_seconds(self, moved: float) -> float:
        rate = self._hardware.memory_bytes_per_second if self._hardware is not None else None
        return moved / (rate or NOMINAL["memory"])

    def _temporaries(self, candidate: Candidate) -> float:
        if self._memory_base is None:
            return 0.0
        base, plan = self._memory_base
        ours, theirs = self._sizes[candidate], self._sizes[base]
        cache = plan.memory.cache  # of keys and values, whose heads are sharded as attention's weights are
        temporaries = plan.memory.temporaries - cache
        activations = max(temporaries - _held_weights(base, theirs), 0.1 * temporaries)
        activations *= _activated(candidate) / _activated(base)
        cache *= base.size(MODEL) / candidate.size(MODEL)
        token_bytes = (activations + cache) * ours.tokens / theirs.tokens
        return (token_bytes + _held_weights(candidate, ours)) * self._larger[_kind(candidate)]


def seconds_of(plan: Plan) -> float:
    """Returns the forecast of a plan; if figures of the hardware are unknown, its cost with nominal ones for these."""
    if (forecast := plan.roofline.forecast) is not None:
        return forecast.seconds
    sent = (each.wire_bytes / NOMINAL["link"] if each.seconds is None else each.seconds for each in plan.traffic)
    return _busy_seconds(plan) + sum(sent)


def _busy_seconds(plan: Plan) -> float:
    """Returns the time that a device computes in a step."""
    roofline = plan.roofline
    if roofline.forecast is not None:
        return roofline.forecast.seconds - roofline.forecast.exposed_seconds
    nominal = plan.memory_traffic / NOMINAL["memory"]
    return _matmul_seconds(plan) + (nominal if roofline.memory_seconds is None else roofline.memory_seconds)


def _matmul_seconds(plan: Plan) -> float:
    seconds = plan.roofline.compute_seconds
    return plan.flops / NOMINAL["flops"] if seconds is None else seconds


def _exposed_seconds(candidate: Candidate, plan: Plan) -> dict[str, float]:
    """Returns the time that a compiled candidate waits for collectives, by what they are for."""
    seconds: dict[str, float] = dict.fromkeys(PURPOSES, 0.0)
    for each in plan.traffic:
        axes = each.axes or tuple(candidate.axes)
        if MODEL in axes:
            purpose = SEQUENCE if candidate.sequence_parallel else TENSOR
        elif candidate.expert_axis is not None and each.kind.endswith("all-to-all"):
            purpose = EXPERTS
        else:
            purpose = ATTENTION if set(axes) == {CONTEXT} and candidate.size(DATA) > 1 else WEIGHTS
        waited = each.exposed_seconds
        seconds[purpose] += each.wire_bytes / NOMINAL["link"] if waited is None else waited
    return seconds


def _kind(candidate: Candidate) -> tuple:
    return candidate.strategy, candidate.regathers, candidate.expert_axis, CONTEXT in candidate.axes


def _key(purpose: str, candidate: Candidate) -> tuple:
    """What one compiled candidate shows of the collectives of others: those of weights differ by strategy."""
    if purpose != WEIGHTS:
        return (purpose,)
    return purpose, candidate.strategy == "zero1", candidate.shards_weights, candidate.regathers


def _multiplied(candidate: Candidate, sizes: Sizes) -> float:
    """Returns the part of the matrix multiplications of its tokens that a device does."""
    return sizes.sharded_fraction / candidate.size(MODEL) + 1 - sizes.sharded_fraction


def _activated(candidate: Candidate) -> float:
    """Returns the part of the activations of its tokens that a device holds and computes."""
    unsharded = 0.0 if candidate.sequence_parallel else _UNSHARDED_ACTIVATIONS
    return unsharded + (1 - unsharded) / candidate.size(MODEL)


def _held_weights(candidate: Candidate, sizes: Sizes) -> float:
    """Returns the bytes of gathered weights, or else of gradients, that a step holds."""
    return sizes.weights * (_HELD_WEIGHTS if candidate.regathers else 1.0)
