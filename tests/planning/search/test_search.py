"""The search of `kd.auto` among real candidates, for hardware whose times are made up."""

from types import SimpleNamespace

import keras
import pytest
from keras import layers

from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.planning.reports.step_memory import Memory
from keras_dist.planning.search.candidates import CONTEXT_PARALLEL, STRATEGIES, Candidate
from keras_dist.planning.search.estimates import Estimates, seconds_of
from keras_dist.planning.search.places import place_of
from keras_dist.planning.search.search import Search
from keras_dist.planning.search.search_space import ATTENTION, SEQUENCE, TENSOR, WEIGHTS, search_space

ROWS = 64
COMPUTING = 3e-4  # seconds for a row; to send weights and gradients takes about a third as long as 8 of them


def build():
    """A model with all candidates: large weights, sequences, and rules of tensor parallelism."""
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(64, 256, name="embedding")(tokens)
    x = layers.Dense(256, name="down")(layers.Dense(2048, activation="relu", name="up")(x))
    model = keras.Model(tokens, layers.Dense(64, name="head")(x), name="wide")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture(scope="module")
def space():
    return search_space(build, "train", (*STRATEGIES, CONTEXT_PARALLEL), place_of("cpu:8", None), ROWS)


def test_shapes_have_the_candidates_of_a_number_of_rows(space):
    shapes = (ROWS, 16), (ROWS, 16)
    of_shapes = search_space(build, "train", (*STRATEGIES, CONTEXT_PARALLEL), place_of("cpu:8", None), shapes)
    assert of_shapes.candidates.keys() == space.candidates.keys()
    assert any("context" in candidate.axes for candidate in of_shapes.candidates)


def plan_of(candidate, sizes, exposure, **memory):
    """A plan in which a fraction of each collective's time is exposed, and state takes all memory by default."""
    part = sizes.sharded_fraction / candidate.size("model") + 1 - sizes.sharded_fraction
    computing = COMPUTING * sizes.tokens * part
    axes = {WEIGHTS: ("data",), TENSOR: ("model",), SEQUENCE: ("model",), ATTENTION: ("context",)}
    traffic = [
        SimpleNamespace(axes=axes[purpose], exposed_seconds=seconds * exposure, wire_bytes=0)
        for purpose, seconds in sizes.wire_seconds.items()
        if seconds
    ]
    exposed = sum(each.exposed_seconds for each in traffic)
    return SimpleNamespace(
        fits=True,
        flops=1.0,
        memory=Memory(weights=sizes.state, optimizer=0, other=0, batch=0, **memory),
        traffic=traffic,
        wire_bytes=0,
        host_traffic=0,
        roofline=SimpleNamespace(
            seconds=computing,
            compute_seconds=computing,
            forecast=SimpleNamespace(seconds=computing + exposed, exposed_seconds=exposed),
        ),
    )


def search(space, exposure, objective="time"):
    """Returns a search that has run, and the plans of all candidates."""
    plans = {each: plan_of(each, space.sizes[each], exposure) for each in space.candidates}
    names = {id(distribution): each for each, distribution in space.candidates.items()}

    def compile(distribution, report):
        return plans[names[id(distribution)]]

    found = Search(space.candidates, space.sizes, compile, objective, None, None, print)
    found.run()
    return found, plans


@pytest.mark.parametrize("exposure", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_the_best_is_found_by_compiling_a_quarter(space, objective, exposure):
    found, plans = search(space, exposure, objective)
    assert found.cost(plans[found.best]) <= 1.02 * min(map(found.cost, plans.values()))
    assert len(found.plans) <= len(plans) / 4


def test_candidates_of_an_unknown_kind_may_overlap_better(space):
    candidates = {str(each): each for each in space.candidates}
    fsdp, near, far = map(
        candidates.get, ("FSDP on data:8", "HSDP on replica:2 x data:4", "HSDP on replica:4 x data:2")
    )
    waited = 3 * space.sizes[near].wire_seconds[WEIGHTS]
    estimates = Estimates(space.sizes, None)
    estimates.observe(fsdp, plan_of(fsdp, space.sizes[fsdp], 3))
    assert estimates.seconds(near) - estimates.optimistic_seconds(near) == pytest.approx(0.5 * waited)
    estimates.observe(far, plan_of(far, space.sizes[far], 3))
    assert estimates.seconds(near) - estimates.optimistic_seconds(near) == pytest.approx(0.2 * waited)


def test_candidates_that_send_more_are_not_expected_to_be_faster(space):
    """FSDP is known to wait for collectives, which says nothing of candidates that gather weights again."""
    fsdp = next(each for each in space.candidates if str(each) == "FSDP on data:8")
    estimates = Estimates(space.sizes, None)
    estimates.observe(fsdp, plan_of(fsdp, space.sizes[fsdp], 3))
    again = [each for each in space.candidates if each.regathers and fsdp not in estimates.simpler(each)]
    assert again
    for each in again:
        assert all(estimates.seconds(each) >= estimates.seconds(simpler) for simpler in estimates.simpler(each))


def test_tensor_parallelism_shards_the_cache_of_generate(space):
    """All of it, unlike the activations between sharded layers."""
    candidates = {str(each): each for each in space.candidates}
    data, tensor = map(candidates.get, ("DP on data:8", "TP on data:2 x model:4"))

    def temporaries(cache):
        estimates = Estimates(space.sizes, None)
        estimates.observe(data, plan_of(data, space.sizes[data], 0, temporaries=10**9 + cache, cache=cache))
        return estimates.bytes(tensor)

    share = space.sizes[tensor].tokens / space.sizes[data].tokens / 4
    assert temporaries(10**12) - temporaries(0) == pytest.approx(share * 10**12)


@pytest.mark.parametrize(
    ("candidates", "trials", "limit", "limit_once_one_fits"),
    [(4, None, 12, 3), (27, None, 12, 6), (159, None, 12, 12), (27, 20, 20, 20), (27, 1, 1, 1)],
)
def test_a_quarter_of_the_candidates_is_compiled_by_default(candidates, trials, limit, limit_once_one_fits):
    first, second, *others = (Candidate("dp", FrozenMapping({"data": number})) for number in range(candidates))
    found = Search(dict.fromkeys((first, second, *others)), {}, None, "memory", trials, None, print)
    assert found.limit == limit
    found.plans[first] = SimpleNamespace(fits=False)
    assert found.limit == limit
    found.plans[second] = SimpleNamespace(fits=True, host_traffic=0, memory=SimpleNamespace(total=1))
    assert found.limit == limit_once_one_fits


def test_each_candidate_that_was_left_out_has_a_reason(space):
    found, plans = search(space, 1.0)
    table = found.trial_table(found.best)
    assert len(table) == len(plans)
    assert table[0].outcome == "chosen"
    for trial in table[1:]:
        words = ("slower", "sends more than", "cannot win", "expected to", "not tried", "equal")
        assert any(word in trial.outcome for word in words), trial


def test_figures_that_are_known_count_where_only_the_network_is_not():
    sent = [SimpleNamespace(wire_bytes=10**10, seconds=seconds) for seconds in (None, 0.25)]
    known = SimpleNamespace(forecast=None, compute_seconds=0.5, memory_seconds=0.125)
    unknown = SimpleNamespace(forecast=None, compute_seconds=None, memory_seconds=None)
    figures = {"flops": 2e12, "memory_traffic": 3e11, "traffic": sent}
    assert seconds_of(SimpleNamespace(**figures, roofline=known)) == 0.5 + 0.125 + 1 + 0.25
    assert seconds_of(SimpleNamespace(**figures, roofline=unknown)) == 2 + 3 + 1 + 0.25
