"""Rules for the weights of mixtures of experts: their width, or their experts, and replicated routers."""

import warnings

import jax
import keras
import pytest
from keras import layers, ops
from support import expert_layers
from support.expert_layers import DENSE, SPARSE, Experts, hub_layers
from support.slow_cases import crossed

import keras_dist as kd
from keras_dist.strategies.derived.tensor_parallel import solve

TOKENS, WIDTH, EXPERTS = 32, 128, 4
WIDE, NARROW = 512, 256  # shards of 128 and of 64
AXIS_SIZE = 4

FUSED = {"Qwen-MoE", "Qwen3-MoE", "Qwen3.5-MoE"}
NORMALIZED = {"NormalizedExperts"}  # over the width, so partial sums of one expert would be added up


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    sizes = {"WIDTH": WIDTH, "HIDDEN": WIDE, "EXPERTS": EXPERTS, "CHOSEN": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(expert_layers, name, size)
    return lambda **changed: [monkeypatch.setattr(expert_layers, name, size) for name, size in changed.items()]


def model_of(make, add=lambda x, y: x + y):
    inputs = keras.Input((TOKENS, WIDTH))
    x = layers.Dense(WIDTH, name="before")(inputs)
    outputs = make()(x)
    return keras.Model(inputs, add(x, outputs[0] if isinstance(outputs, (list, tuple)) else outputs))


def mesh():
    return kd.create_device_mesh(f"data:{8 // AXIS_SIZE},model:{AXIS_SIZE}")


def axes_by_shape(make, **options):
    """The axes of the weights of a layer by their shapes; () if no rule matches."""
    model = model_of(make)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="[0-9]+ weights? .*before")  # a dense layer without a partner
        layout_map = kd.tensor_parallel_layout_map(model, mesh(), **options)
    layouts = {tuple(v.shape): layout_map[v.path] for v in model.weights[2:]}
    return {shape: () if layout is None else layout.axes for shape, layout in layouts.items()}


def expected(width, fused, shards_width):
    columns = 2 * width if fused else width
    if shards_width:
        return {(EXPERTS, WIDTH, columns): (None, None, "model"), (EXPERTS, width, WIDTH): (None, "model", None)}
    return dict.fromkeys(((EXPERTS, WIDTH, columns), (EXPERTS, width, WIDTH)), ("model", None, None))


@pytest.mark.parametrize(("name", "width"), crossed([*hub_layers(), *SPARSE], [WIDE, NARROW]))
def test_the_width_is_sharded_where_its_shards_are_wide_and_can_be_followed(name, width, sizes):
    sizes(HIDDEN=width)
    found = axes_by_shape((hub_layers() | SPARSE)[name])
    shards_width = width == WIDE and name not in FUSED | NORMALIZED
    for shape, axes in expected(width, name in FUSED or name == "GPT-OSS", shards_width).items():
        assert found[shape] == axes
    assert not any(found[WIDTH, EXPERTS])
    columns = [axes for shape, axes in found.items() if shape in {(EXPERTS, width), (EXPERTS, 2 * width)}]
    assert columns in ([], [(None, "model") if shards_width else ("model", None)])  # biases


def test_experts_that_the_axis_does_not_divide_are_sharded_by_their_width(sizes):
    sizes(HIDDEN=NARROW, EXPERTS=6)
    found = axes_by_shape(SPARSE["OneExpert"])
    assert found[6, WIDTH, NARROW] == (None, None, "model")
    assert found[6, NARROW, WIDTH] == (None, "model", None)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_results_are_all_reduced_once_for_either_choice(width, sizes):
    sizes(HIDDEN=width)
    model = model_of(SPARSE["ThreeOperands"])
    solution = solve(model, mesh(), "model", None)
    of_tokens = TOKENS * WIDTH * 4
    assert solution.sharded_fraction > 0.99
    # The results of the mixture, the gradients of its tokens, and what `before` returns; sums of gates are small.
    assert solution.all_reduced_bytes == pytest.approx(3 * of_tokens, rel=0.02)


class Rematerialized(Experts):
    """Experts that the backward pass computes again."""

    def mixed(self, x, probabilities, best, chosen):
        def gated(x, best):
            gates = ops.sum(ops.one_hot(chosen, EXPERTS, dtype=x.dtype) * best[..., None], -2)
            return ops.einsum("bsem,emd,bse->bsd", self.hidden(x), self.down.value, gates)

        return jax.checkpoint(gated)(x, best)


class Sorted(Experts):
    """Experts that are chosen by sorting, computed by `kd.experts`."""

    def mixed(self, x, probabilities, best, chosen):
        chosen = ops.argsort(probabilities, axis=-1)[..., -2:]
        gates = ops.take_along_axis(probabilities, chosen, axis=-1)
        return kd.experts(lambda x, up, down: ops.relu(x @ up) @ down, x, chosen, gates, self.up, self.down)


class ManyLayers(Experts):
    """Steps of a loop with one mixture each."""

    def mixed(self, x, probabilities, best, chosen):
        def step(x, _):
            best, chosen = ops.top_k(ops.softmax(x @ self.router.value), 2)
            gates = ops.sum(ops.one_hot(chosen, EXPERTS, dtype=x.dtype) * best[..., None], -2)
            return x + ops.einsum("bsem,emd,bse->bsd", self.hidden(x), self.down.value, gates), None

        return jax.lax.scan(step, x, None, length=2)[0]


@pytest.mark.parametrize("make", [Rematerialized, Sorted, ManyLayers])
def test_mixtures_in_other_programs_are_found(make):
    found = axes_by_shape(make)
    assert expected(WIDE, False, True).items() <= found.items()
    assert not any(found[WIDTH, EXPERTS])


@pytest.mark.parametrize("name", DENSE)
def test_what_is_computed_for_all_experts_is_sharded_by_bytes(name, sizes):
    sizes(HIDDEN=WIDE)
    wide = axes_by_shape(DENSE[name])
    sizes(HIDDEN=NARROW)
    narrow = axes_by_shape(DENSE[name])
    assert wide[EXPERTS, WIDTH, WIDE] == narrow[EXPERTS, WIDTH, NARROW]


class Router(layers.Layer):
    """The gates of all experts."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], EXPERTS), name="kernel")

    def call(self, x):
        probabilities = ops.softmax(x @ self.kernel)
        _, chosen = ops.top_k(probabilities, 2)
        return probabilities * ops.sum(ops.one_hot(chosen, EXPERTS, dtype=x.dtype), -2)


class Gated(layers.Layer):
    """Experts with a router that is a layer."""

    def build(self, shape):
        self.router = Router(name="router")
        self.router.build(shape)
        self.up = self.add_weight(shape=(EXPERTS, WIDTH, NARROW), name="up")
        self.down = self.add_weight(shape=(EXPERTS, NARROW, WIDTH), name="down")

    def call(self, x):
        hidden = ops.relu(ops.einsum("bsd,edm->bsem", x, self.up))
        return ops.einsum("bsem,emd,bse->bsd", hidden, self.down, self.router(x))


def test_gates_of_sharded_experts_have_no_rule():
    """Tokens choose among all of them, although experts are sharded."""
    model = model_of(lambda: Gated(name="gated"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="[0-9]+ weights? .*before")
        layout_map = kd.tensor_parallel_layout_map(model, mesh(), sequence_parallel=True)
    assert layout_map["gated/up"].axes == ("model", None, None)
    assert layout_map["gated/router/kernel"].axes == (None, None)
    assert layout_map["gated/router/output"] is None
    assert layout_map["gated/output"].axes == ("data", "model", None)


def test_large_routers_and_biases_are_replicated_without_a_warning(sizes):
    sizes(EXPERTS=256)  # 128 KiB for the router, and as much for the bias of GPT-OSS's down projection
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=r"1 weight .*before")
        found = axes_by_shape(hub_layers()["GPT-OSS"])
    assert not any(found[WIDTH, 256])
    assert not any(found[256, WIDTH])
