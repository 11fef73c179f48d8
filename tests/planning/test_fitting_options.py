"""Step options that make a step fit: which are tried, `remat="auto"`, and what plans and `kd.auto` say of them."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers
from support.cpu_memory import capacity_of
from support.example_plans import GIB, MEMORY, example_plan

import keras_dist as kd
from keras_dist._keras.train_step import OptionWithoutEffectError
from keras_dist.planning.choice import NothingFitsError
from keras_dist.planning.fitting_options import SEARCHED, plan_with_fitting_options
from keras_dist.strategies import rematerialization

pytestmark = pytest.mark.usefixtures("own_cache")

# From the cheapest: what a model of this many bytes needs with each option.
NEEDED = {
    "remat='attention'": 15,
    "remat='dots'": 12,
    "remat='full'": 10,
    "microbatches=2, reduce_gradients='microbatch', remat='full'": 9,
    "microbatches=4, reduce_gradients='microbatch', remat='full'": 8,
    "microbatches=8, reduce_gradients='microbatch', remat='full'": 7,
    "offload=('optimizer',)": 11,
    "remat='attention', offload=('optimizer',)": 6,
    "remat='dots', offload=('optimizer',)": 5,
    "remat='full', offload=('optimizer',)": 4,
    "microbatches=2, reduce_gradients='microbatch', remat='full', offload=('optimizer',)": 3,
    "microbatches=4, reduce_gradients='microbatch', remat='full', offload=('optimizer',)": 2,
    "microbatches=8, reduce_gradients='microbatch', remat='full', offload=('optimizer',)": 1.5,
}
DISTRIBUTION = kd.FullyShardedDataParallel(kd.create_device_mesh("data:2,model:4"))


def search(capacity, without=(), searched=SEARCHED, state=1, needed=NEEDED):
    """Returns the options found for a capacity in GiB, and all that were compiled."""
    memory = dataclasses.replace(MEMORY, weights=0, optimizer=state * GIB, temporaries=16 * GIB)

    def planned(options, size):
        placed = dataclasses.replace(memory, temporaries=int((size - state) * GIB), capacity=int(capacity * GIB))
        return example_plan(step_options=options, memory=placed, fits=size <= capacity)

    compiled = []

    def compile(distribution):
        options = distribution.step_options
        for name in without:
            if getattr(options, name) not in (None, 1):
                raise OptionWithoutEffectError(name, "no effect")
        compiled.append(options.text)
        return planned(options, needed[options.text])

    found = plan_with_fitting_options(planned(kd.StepOptions(), 16), DISTRIBUTION, compile, searched)
    return (found.step_options.text if found.fits else None), compiled


@pytest.mark.parametrize("capacity", [15, 12, 10.5, 9, 8.5, 7, 5, 2.2, 1.5, 1.4])
def test_the_cheapest_options_that_fit_are_found_by_few_compilations(capacity):
    found, compiled = search(capacity)
    assert found == next((text for text, size in NEEDED.items() if size <= capacity), None)
    assert len(compiled) <= 5
    assert len(set(compiled)) == len(compiled)


def test_state_that_exceeds_the_memory_needs_the_host():
    found, compiled = search(3.5, state=4)
    assert found is not None
    assert all("offload" in text for text in compiled)


def test_options_without_effect_are_left_out():
    needed = {"microbatches=2, reduce_gradients='microbatch'": 8, "microbatches=4, reduce_gradients='microbatch'": 7}
    needed["microbatches=8, reduce_gradients='microbatch'"] = 6
    assert search(7.5, without=["remat"], needed=needed)[0] == "microbatches=4, reduce_gradients='microbatch'"
    assert search(9.5, without=["microbatches"])[0] == "remat='attention', offload=('optimizer',)"
    assert search(12, searched=("remat",))[0] == "remat='dots'"
    assert search(9, searched=("remat",))[0] is None


# ----------------------------------------------------------------------------------------------- with a real compiler


def build():
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((32, 16))
    for _ in range(4):
        y = layers.Dense(64)(x)
        for activation in ("gelu", "silu", "softplus"):  # of which the backward pass needs the inputs
            y = layers.Activation(activation)(y)
        x = x + layers.Dense(16)(y)
    model = keras.Model(inputs, x, name="deep")
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def memory():
    """Bytes that a step of 64 rows needs with each mode."""
    return {
        mode: kd.plan(build, kd.DataParallel(step_options=kd.StepOptions(remat=mode)), 64).memory.total
        for mode in (None, "dots", "full")
    }


@pytest.fixture
def auto_remat():
    return kd.DataParallel(step_options=kd.StepOptions(remat="auto"))


def test_auto_is_the_cheapest_mode_that_fits(monkeypatch, memory, auto_remat):
    assert memory[None] > memory["dots"] >= memory["full"]  # they are equal with JAX 0.10
    for capacity in (memory["dots"], memory["full"]):
        capacity_of(monkeypatch, capacity)
        planned = kd.plan(build, auto_remat, 64)
        mode = next(mode for mode, needed in memory.items() if needed <= capacity)
        assert (planned.step_options.remat, planned.fits, planned.memory.total) == (mode, True, memory[mode])


def test_training_uses_the_mode_that_fits(monkeypatch, memory, auto_remat):
    x = np.random.default_rng(0).normal(size=(128, 32, 16)).astype("float32")

    def losses():
        return build().fit(x, x[..., ::-1], 64, epochs=2, verbose=0, shuffle=False).history["loss"]

    expected = losses()
    modes = []
    original = rematerialization.Rematerialization.__init__

    def noted(self, model, mode, *arguments):
        modes.append(mode)
        original(self, model, mode, *arguments)

    monkeypatch.setattr(rematerialization.Rematerialization, "__init__", noted)
    with auto_remat.scope():
        np.testing.assert_allclose(losses(), expected, rtol=1e-5)
        assert not modes  # everything fits
        capacity_of(monkeypatch, memory["full"])
        np.testing.assert_allclose(losses(), expected, rtol=1e-5)
    assert modes[-1] == ("dots" if memory["dots"] == memory["full"] else "full")


def test_a_plan_that_does_not_fit_has_the_options_that_make_it_fit(monkeypatch, memory):
    capacity_of(monkeypatch, memory["dots"])
    planned = kd.plan(build, kd.DataParallel(), 64)
    assert planned.fits is False
    assert planned.fitting_plan.step_options == kd.StepOptions(remat="dots")
    assert planned.fitting_plan.memory.total == memory["dots"]
    assert f"step_options=kd.{planned.fitting_plan.step_options}" in str(planned)
    assert planned.to_dict()["fitting_plan"]["step_options"] == repr(planned.fitting_plan.step_options)
    capacity_of(monkeypatch, 1000)
    assert "No step options make it fit" in kd.plan(build, kd.DataParallel(), 64).notes[-1]


def test_auto_chooses_options_where_nothing_fits_without_them(monkeypatch, memory):
    capacity_of(monkeypatch, memory["dots"])
    choice = kd.auto(build, 64, strategies=["dp"])
    assert choice.plan.fits
    assert choice.distribution.step_options == choice.trials[0].candidate.options == choice.plan.step_options
    assert choice.plan.step_options.remat in ("dots", "full")
    assert f"step_options=kd.{choice.plan.step_options}" in choice.to_source()
    assert choice.trials[0].candidate.label.startswith("DP, remat=")
    with pytest.raises(NothingFitsError):
        kd.auto(build, 64, strategies=["dp"], search_step_options=False)
