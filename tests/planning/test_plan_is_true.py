"""Bytes and collectives in a plan equal those of a real run on eight devices, to the last one."""

from collections import Counter

import jax
import keras
import pytest
from support.hlo_text import read_module
from support.planned_models import LAYOUTS, MODELS, gpt
from support.slow_cases import crossed

import keras_dist as kd
from keras_dist._keras import internals


@pytest.fixture
def compiled_texts(monkeypatch):
    """Records the programs that Keras compiles."""
    texts = []

    def recording_jit(function, **options):
        jitted = jax.jit(function, **options)

        def call(*arguments):
            texts.append(jitted.lower(*arguments).compile().as_text())
            return jitted(*arguments)

        return call

    monkeypatch.setattr(internals.trainer, "jit", recording_jit)
    return texts


def held_bytes(variables):
    """Returns the bytes of variables per device, which must be equal on all devices."""
    held = Counter()
    for variable in variables:
        for shard in variable.value.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert len(held) in (0, 8)
    assert len(set(held.values())) <= 1
    return max(held.values(), default=0)


def collectives(found):
    return Counter((c.kind, c.axes, c.tensors, c.bytes, c.wire_bytes, c.count, c.dtype) for c in found)


FAST = {
    ("data parallel", "perceptron"),
    ("tensor parallel", "perceptron"),
    ("fully sharded", "subclassed"),
    ("over two axes of three", "subclassed"),
}


@pytest.mark.parametrize(
    ("layout", "name"),
    crossed(LAYOUTS, MODELS, fast=FAST),
)
def test_state_and_collectives_equal_those_of_fit(name, layout, compiled_texts):
    build, (x, y) = MODELS[name]
    distribution = LAYOUTS[layout]()
    planned = kd.plan(build, distribution, (x, y))
    keras.utils.clear_session(free_memory=False)
    with distribution.scope():
        model = build()
        model.fit(x, y, batch_size=len(jax.tree.leaves(x)[0]), verbose=0)
    weights = {id(variable) for variable in model.weights}
    rest = [v for v in model.variables + model.metrics_variables if id(v) not in weights]
    assert planned.memory.weights == held_bytes(model.weights)
    assert planned.memory.optimizer == held_bytes(model.optimizer.variables)
    assert planned.memory.other == held_bytes({id(v): v for v in rest}.values())
    batch = [distribution.batch_sharding(a.shape).shard_shape(a.shape) for a in jax.tree.leaves((x, y))]
    assert planned.memory.batch == sum(4 * int(jax.numpy.prod(jax.numpy.array(shape))) for shape in batch)
    [text] = compiled_texts
    axes = distribution.device_mesh.axis_sizes
    assert collectives(planned.collectives) == collectives(read_module(text, axes).collectives)
    assert planned.collectives


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("step", ["test", "predict"])
def test_steps_of_evaluate_and_predict(step, compiled_texts):
    build, (x, y) = MODELS["gpt"]
    distribution = LAYOUTS["tensor parallel"]()
    planned = kd.plan(build, distribution, x if step == "predict" else (x, y), step=step)
    with distribution.scope():
        model = build()
        if step == "test":
            model.evaluate(x, y, batch_size=16, verbose=0)
        else:
            model.predict(x, batch_size=16, verbose=0)
    assert planned.memory.optimizer == 0
    assert planned.memory.weights == held_bytes(model.weights)
    found = read_module(compiled_texts[0], distribution.device_mesh.axis_sizes).collectives
    assert collectives(planned.collectives) == collectives(found)


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
def test_data_parallel_reduces_the_gradients_and_nothing_else():
    planned = kd.plan(lambda: gpt(depth=1), kd.DataParallel(), 16)
    floor = 2 * planned.memory.weights * 7 / 8
    assert {each.kind for each in planned.traffic} == {"all-reduce"}
    assert floor <= planned.wire_bytes <= 1.01 * floor


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
def test_tensor_parallel_has_four_all_reduces_per_block():
    distribution = LAYOUTS["tensor parallel"]()
    counts = []
    for depth in (2, 3):
        planned = kd.plan(lambda depth=depth: gpt(depth), distribution, 16)
        activation = 8 * 16 * 32 * 4  # rows on a device, length, width, float32
        reduced = [c for c in planned.collectives if (c.kind, c.axes) == ("all-reduce", ("model",))]
        counts.append(sum(c.count for c in reduced if c.bytes % activation == 0))
    assert counts[1] - counts[0] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
def test_extrapolation_equals_the_compiled_model():
    for layout in ("tensor parallel", "fully sharded"):
        distribution = LAYOUTS[layout]()
        whole = kd.plan(lambda: gpt(8), distribution, 16)
        line = kd.plan(lambda depth: gpt(depth), distribution, 16, depth=8)
        assert line.depth == 8
        assert line.memory.state == whole.memory.state
        assert line.variables == whole.variables
        assert line.flops == pytest.approx(whole.flops, rel=1e-6)
        assert line.model_flops == pytest.approx(whole.model_flops, rel=1e-6)
        assert line.wire_bytes == pytest.approx(whole.wire_bytes, rel=0.01)
        assert line.memory.temporaries == pytest.approx(whole.memory.temporaries, rel=0.05)
        assert any("Extrapolated to 8 blocks from compilations of 2 and 4" in note for note in line.notes)
