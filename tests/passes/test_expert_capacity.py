"""`StepOptions(expert_capacity=...)`: rows of an expert beyond a multiple of the mean count as zero, and are logged."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops
from passes.test_experts import model_of
from support.expert_layers import CHOSEN, EXPERTS, SPARSE, WIDTH, Experts
from support.keras_scenarios import start_anew

import keras_dist as kd
from keras_dist.mixtures.routing import Routing

SHAPE = 8, 9, WIDTH


class Capped(Experts):
    """`ThreeOperands` with gates of zero where an expert of a group of tokens has too many rows."""

    groups, capacity = 8, 1.25

    def compute_output_shape(self, shape):
        return shape

    def mixed(self, x, probabilities, best, chosen):
        indices = ops.reshape(chosen, (self.groups, -1))
        is_of = ops.one_hot(indices, EXPERTS, dtype="float32")
        place = ops.sum((ops.cumsum(is_of, axis=1) - 1) * is_of, axis=-1)
        rows = np.ceil(self.capacity * 8 * 9 * CHOSEN / self.groups / EXPERTS)
        best = best * ops.reshape(ops.cast(place < rows, x.dtype), ops.shape(best))
        gates = ops.einsum("bsk,bske->bse", best, ops.one_hot(chosen, EXPERTS, dtype=x.dtype))
        return ops.einsum("bsem,emd,bse->bsd", self.hidden(x), self.down, gates)


def trained(layer, distribution):
    with distribution.scope():
        model = model_of(layer())
        random = np.random.default_rng(0)
        for variable in model.weights:
            variable.assign(random.normal(size=variable.shape))
        x, y = random.normal(size=SHAPE).astype("float32"), np.ones((8, 9, 2), "float32")
        history = model.fit(x, y, batch_size=8, epochs=3, verbose=0).history
        return history, model.evaluate(x, y, batch_size=8, verbose=0)


def data_parallel(options):
    return kd.DataParallel(kd.create_device_mesh("data:8"), step_options=options)


def expert_parallel(options):
    mesh = kd.create_device_mesh("data:4,expert:2")
    axes = {"shard_axis": ("data", "expert"), "expert_dim_name": "expert"}
    return kd.FullyShardedDataParallel(mesh, **axes, min_shard_bytes=0, step_options=options)


def tensor_parallel(options):
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:4,model:2"))
    layout_map[".*/(up|down)"] = "model", None, None
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", step_options=options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "groups"),
    [(data_parallel, 8), (expert_parallel, 8), (tensor_parallel, 4)],
    ids=["DP", "EP", "TP"],
)
def test_rows_beyond_the_capacity_are_dropped_in_training(distribution, groups, monkeypatch):
    monkeypatch.setattr(Capped, "groups", groups)
    start_anew()
    expected, _ = trained(Capped, data_parallel(kd.StepOptions(experts="dense")))
    start_anew()
    uncapped, _ = trained(SPARSE["ThreeOperands"], data_parallel(kd.StepOptions()))
    start_anew()
    found, evaluated = trained(SPARSE["ThreeOperands"], distribution(kd.StepOptions(expert_capacity=1.25)))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    assert np.max(np.abs(np.subtract(found["loss"], uncapped["loss"]))) > 1e-3
    assert all(0 < each < 1 for each in found["expert_drops"])
    assert not np.allclose(evaluated, found["loss"][-1], rtol=1e-3)
    assert keras.distribution.distribution() is None


def test_the_first_rows_of_each_expert_are_kept():
    indices = jnp.array([[0, 2], [0, 1], [0, 2], [3, 2]])
    routing = Routing.of(indices, 4).capped(2)
    assert routing.groups.sizes.tolist() == [2, 1, 2, 1]
    rows = routing.of_tokens(jnp.arange(1.0, 5)[:, None])[:, 0]
    assert rows.tolist() == [1, 2, 2, 1, 3, 4, 0, 0]  # of experts 0, 0, 1, 2, 2, 3
    assert routing.summed(jnp.ones((8, 1)))[:, 0].tolist() == [2, 2, 1, 1]
    gradient = jax.grad(lambda x: (routing.of_tokens(x) * jnp.arange(8.0)[:, None]).sum())(jnp.ones((4, 1)))
    assert gradient[:, 0].tolist() == [0 + 3, 1 + 2, 4, 5]
