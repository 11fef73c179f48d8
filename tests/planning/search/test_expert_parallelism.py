"""Expert parallelism among the candidates of `kd.auto`: when it is tried, what is expected of it, and the choice."""

import jax
import keras
import pytest
from keras import layers, ops
from support.compilers import V5E_FIRST

import keras_dist as kd
from keras_dist.planning.search.candidates import EXPERT_PARALLEL, STRATEGIES, enumerate_candidates
from keras_dist.planning.search.places import place_of
from keras_dist.planning.search.search_space import EXPERTS, WEIGHTS, search_space

WIDTH, HIDDEN, CHOSEN, LENGTH, ROWS = 128, 256, 2, 4, 16
TOKENS = ROWS // 8 * LENGTH  # of a device
NAMES = ("dp", "fsdp", "hsdp", EXPERT_PARALLEL)


class Experts(layers.Layer):
    def __init__(self, num_experts, **options):
        super().__init__(**options)
        self.num_experts = num_experts

    def build(self, shape):
        self.router = self.add_weight(shape=(WIDTH, self.num_experts), name="router")
        self.up = self.add_weight(shape=(self.num_experts, WIDTH, HIDDEN), name="up")
        self.down = self.add_weight(shape=(self.num_experts, HIDDEN, WIDTH), name="down")

    def call(self, x):
        best, chosen = ops.top_k(ops.softmax(x @ self.router), CHOSEN)
        return kd.experts(lambda x, up, down: ops.gelu(x @ up) @ down, x, chosen, best, self.up, self.down)


class Looped(Experts):
    def call(self, x):
        return jax.lax.scan(lambda x, _: (super(Looped, self).call(x), None), x, None, length=3)[0]


def build(num_experts=8, trainable=True, length=LENGTH, is_looped=False):
    inputs = keras.Input((length, WIDTH))
    outputs = Experts(num_experts, trainable=trainable)(layers.Dense(WIDTH, use_bias=False)(inputs))
    model = keras.Model(inputs, Looped(num_experts)(outputs) if is_looped else outputs)
    model.compile("sgd", "mse")
    return model


def space_of(build=build, step="train", batch=ROWS):
    return search_space(build, step, NAMES, place_of(jax.devices(), None), batch)


def sizes_of(*arguments):
    return {str(each): known for each, known in space_of(*arguments).sizes.items()}


def test_the_axis_of_the_batch_is_shared_where_it_divides_the_number_of_experts():
    def meshes(strategies, **options):
        found = enumerate_candidates(8, 8, strategies, {}, 128, (2, 4), **options)
        return {(each.strategy, *each.axes.values()) for each in found if each.expert_axis}

    every = (*STRATEGIES, "cp", EXPERT_PARALLEL)
    assert meshes(every, num_experts=16) == {("fsdp", 8), ("hsdp", 2, 4), ("hsdp", 4, 2)}
    assert meshes(every, num_experts=4) == {("hsdp", 2, 4), ("hsdp", 4, 2)}
    assert meshes((*STRATEGIES, "cp"), num_experts=16) == meshes(every) == set()


def test_rows_are_sent_in_place_of_weights():
    sizes = sizes_of()
    experts = 8 * 2 * WIDTH * HIDDEN * 4
    alone, shared = sizes["FSDP on data:8"], sizes["FSDP + EP on data:8"]
    assert alone.wire[EXPERTS] == 0
    assert alone.wire[WEIGHTS] - shared.wire[WEIGHTS] == pytest.approx(2 * 7 / 8 * experts)
    # Rows and results, forward and backward, and one gate for each.
    assert shared.wire[EXPERTS] == pytest.approx(4 * CHOSEN * TOKENS * (WIDTH + 0.5) * 4 * 7 / 8)
    assert alone.weights - shared.weights == pytest.approx(7 / 8 * experts)
    assert alone.state == shared.state
    hybrid = sizes["HSDP on replica:2 x data:4"].wire, sizes["HSDP + EP on replica:2 x data:4"].wire
    assert hybrid[0][WEIGHTS] - hybrid[1][WEIGHTS] == pytest.approx(2 * 3 / 4 * experts)


def test_frozen_experts_and_predictions_have_no_gradients():
    frozen = sizes_of(lambda: build(trainable=False))
    experts = 8 * 2 * WIDTH * HIDDEN * 4
    difference = frozen["FSDP on data:8"].wire[WEIGHTS] - frozen["FSDP + EP on data:8"].wire[WEIGHTS]
    assert difference == pytest.approx(7 / 8 * experts)
    sent = sizes_of(build, "predict")["FSDP + EP on data:8"].wire[EXPERTS]
    assert sent == pytest.approx(sizes_of()["FSDP + EP on data:8"].wire[EXPERTS] / 2)


def test_frozen_experts_gather_their_weights_for_fewer_tokens():
    """Trained ones have the bytes of 1,024 tokens, frozen ones, which are sent once, of 512. A device has 768."""
    length = 768 * 8 // ROWS
    assert "FSDP + EP on data:8" in sizes_of(lambda: build(length=length))
    assert "FSDP + EP on data:8" not in sizes_of(lambda: build(length=length, trainable=False))


def test_weights_of_layers_in_a_loop_are_gathered():
    alone, looped = sizes_of(), sizes_of(lambda: build(is_looped=True))
    name = "FSDP + EP on data:8"
    assert looped[name].wire[EXPERTS] == alone[name].wire[EXPERTS]
    experts = 2 * 7 / 8 * 8 * (2 * HIDDEN + 1) * WIDTH * 4
    assert looped[name].wire[WEIGHTS] - alone[name].wire[WEIGHTS] == pytest.approx(experts)


def test_tensor_parallelism_divides_what_tokens_are_multiplied_with():
    known = search_space(build, "train", ("tp",), place_of(jax.devices(), None), ROWS).sizes
    [fraction] = [sizes.sharded_fraction for each, sizes in known.items() if each.size("model") == 2]
    dense, experts, router = WIDTH**2, CHOSEN * 2 * WIDTH * HIDDEN, 8 * WIDTH
    assert fraction == pytest.approx((dense + experts) / (dense + experts + router))


def test_it_is_left_out_where_rows_have_more_bytes():
    few, many = space_of(), space_of(lambda: build(length=1024))
    assert any(each.expert_axis for each in few.candidates)
    assert not any(each.expert_axis for each in many.candidates)
    assert any("would gather the weights of experts as FSDP does" in note for note in many.notes)
    assert not any("would gather" in note for note in few.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_it_is_chosen_for_few_tokens_and_large_experts():
    choice = kd.auto(build, ROWS, strategies=NAMES, trials=4)
    assert choice.trials[0].candidate.label == "FSDP + EP"
    assert choice.distribution.expert_dim_name == "data"
    assert "expert_dim_name" in choice.to_source()
    losers = [trial for trial in choice.trials if trial.plan is not None and not trial.candidate.expert_axis]
    assert losers
    assert all(trial.plan.wire_bytes > choice.plan.wire_bytes for trial in losers)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_it_is_not_chosen_for_many_tokens():
    choice = kd.auto(lambda: build(length=1024), ROWS, strategies=("fsdp", EXPERT_PARALLEL), trials=4)
    assert [trial.candidate.label for trial in choice.trials] == ["FSDP", "FSDP, gathering again"]


@pytest.mark.compiler
@pytest.mark.usefixtures("full_compilation", "own_cache")
@pytest.mark.parametrize("target", V5E_FIRST)
@pytest.mark.parametrize("step", ["train", "predict"])
def test_what_is_expected_to_be_sent_is_what_compiled_steps_send(target, step):
    place = place_of(target, None)
    candidates, sizes, _ = search_space(build, step, NAMES, place, ROWS)
    shared = [each for each in candidates if each.expert_axis and not each.regathers]
    assert len(shared) == 3
    for each in shared[:1]:
        traffic = kd.plan(build, candidates[each], ROWS, step=step).traffic
        sent = sum(group.wire_bytes for group in traffic if group.kind == "ragged-all-to-all")
        assert sent == pytest.approx(sizes[each].wire[EXPERTS], rel=0.05)
