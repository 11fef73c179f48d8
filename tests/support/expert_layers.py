"""Mixtures of experts as KerasHub's models and users write them: each a function that builds a layer, by name."""

import keras
import pytest
from keras import layers, ops

import keras_dist as kd

WIDTH, HIDDEN, EXPERTS, CHOSEN = 16, 8, 6, 2


def hub_layers():
    pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
    from keras_hub.src.models.gemma4.gemma4_moe import Gemma4MoEBlock, Gemma4Router
    from keras_hub.src.models.gpt_oss.gpt_oss_decoder import GptOssSparseMoeBlock
    from keras_hub.src.models.mixtral.mixtral_decoder import MixtralSparseMoeBlock
    from keras_hub.src.models.qwen3_5_moe.qwen3_5_moe_decoder import Qwen3_5MoeSparseMoeBlock
    from keras_hub.src.models.qwen3_moe.qwen3_moe_decoder import Qwen3SparseMoeBlock
    from keras_hub.src.models.qwen_moe.qwen_moe_decoder import QwenSparseMoeBlock

    class Gemma4(layers.Layer):
        """The router and the experts of a decoder layer, which has them side by side."""

        def __init__(self):
            super().__init__()
            self.router, self.experts = Gemma4Router(EXPERTS, CHOSEN), Gemma4MoEBlock(EXPERTS, WIDTH, HIDDEN)

        def build(self, shape):
            self.router.build(shape)
            self.experts.build(shape)

        def call(self, x):
            return ops.reshape(self.experts(ops.reshape(x, (-1, WIDTH)), self.router(x)), ops.shape(x))

    sizes = WIDTH, HIDDEN, EXPERTS, CHOSEN
    return {
        "Mixtral": lambda: MixtralSparseMoeBlock(*sizes),
        "Qwen-MoE": lambda: QwenSparseMoeBlock(WIDTH, HIDDEN, 12, EXPERTS, CHOSEN, norm_top_k_prob=True),
        "Qwen3-MoE": lambda: Qwen3SparseMoeBlock(*sizes, norm_top_k_prob=True),
        "Qwen3.5-MoE": lambda: Qwen3_5MoeSparseMoeBlock(WIDTH, HIDDEN, 12, EXPERTS, CHOSEN),
        "GPT-OSS": lambda: GptOssSparseMoeBlock(*sizes),
        "Gemma 4": Gemma4,
    }


class Experts(layers.Layer):
    """A mixture of experts; subclasses write its sum in other ways."""

    def build(self, shape):
        self.router = self.add_weight(shape=(WIDTH, EXPERTS), name="router")
        self.up = self.add_weight(shape=(EXPERTS, WIDTH, HIDDEN), name="up")
        self.bias = self.add_weight(shape=(EXPERTS, HIDDEN), name="bias")
        self.down = self.add_weight(shape=(EXPERTS, HIDDEN, WIDTH), name="down")

    def call(self, x):
        probabilities = ops.softmax(x @ self.router)
        return self.mixed(x, probabilities, *ops.top_k(probabilities, CHOSEN))

    def hidden(self, x):
        return ops.relu(ops.einsum("bsd,edm->bsem", x, self.up) + self.bias)

    def mixed(self, x, probabilities, best, chosen):
        raise NotImplementedError


class ThreeOperands(Experts):
    """Gates by einsum, and one einsum of hidden values, weights and gates."""

    def mixed(self, x, probabilities, best, chosen):
        gates = ops.einsum("bsk,bske->bse", best, ops.one_hot(chosen, EXPERTS, dtype=x.dtype))
        return ops.einsum("bsem,emd,bse->bsd", self.hidden(x), self.down, gates)


class MaskedProbabilities(Experts):
    """Probabilities of the chosen experts, renormalized."""

    def mixed(self, x, probabilities, best, chosen):
        gates = probabilities * ops.sum(ops.one_hot(chosen, EXPERTS, dtype=x.dtype), -2)
        gates = gates / ops.sum(gates, -1, keepdims=True)
        return ops.sum(ops.einsum("bsem,emd->bsed", self.hidden(x), self.down) * gates[..., None], axis=2)


class MaskedScores(Experts):
    """A softmax of scores that are -inf for all other experts, of tokens without positions."""

    def mixed(self, x, probabilities, best, chosen):
        flat, chosen = ops.reshape(x, (-1, WIDTH)), ops.reshape(chosen, (-1, CHOSEN))
        is_chosen = ops.any(chosen[..., None] == ops.arange(EXPERTS, dtype=chosen.dtype), axis=1)
        gates = ops.softmax(ops.where(is_chosen, flat @ self.router, -float("inf")))
        hidden = ops.gelu(ops.einsum("td,edm->etm", flat, self.up) + self.bias[:, None])
        return ops.reshape(ops.einsum("etd,te->td", hidden @ self.down, gates), ops.shape(x))


class NormalizedExperts(Experts):
    """Experts that normalize what they compute, and a sum by einsum."""

    def mixed(self, x, probabilities, best, chosen):
        hidden = ops.softplus(self.hidden(x))
        hidden = hidden - ops.mean(hidden, -1, keepdims=True)
        gates = ops.sum(ops.one_hot(chosen, EXPERTS, dtype=x.dtype) * best[..., None], -2)
        return ops.einsum("bse,bsed->bsd", gates, ops.einsum("bsem,emd->bsed", hidden, self.down))


class OneExpert(Experts):
    """One expert for each token, as in Switch Transformers."""

    def mixed(self, x, probabilities, best, chosen):
        _, chosen = ops.top_k(probabilities, 1)
        gates = ops.where(ops.one_hot(chosen[..., 0], EXPERTS, dtype="bool"), probabilities, 0.0)
        return ops.einsum("bsem,emd,bse->bsd", self.hidden(x), self.down, gates)


class ChoiceByChoice(Experts):
    """Gates that are added up over a token's choices."""

    def mixed(self, x, probabilities, best, chosen):
        one_hots = (ops.one_hot(chosen[..., k], EXPERTS, dtype=x.dtype) for k in range(CHOSEN))
        gates = sum(one_hot * best[..., k : k + 1] for k, one_hot in enumerate(one_hots))
        return ops.einsum("bsem,emd,bse->bsd", self.hidden(x), self.down, gates)


class Threshold(Experts):
    """All experts whose probability is not less than that of the last chosen one: more of them where two are equal."""

    def mixed(self, x, probabilities, best, chosen):
        gates = ops.where(probabilities >= best[..., -1:], probabilities, 0.0)
        return ops.sum(ops.einsum("bsem,emd->bsed", self.hidden(x), self.down) * gates[..., None], axis=2)


class Loop(Experts):
    """A loop over experts."""

    def mixed(self, x, probabilities, best, chosen):
        gates = ops.sum(ops.one_hot(chosen, EXPERTS, dtype=x.dtype) * best[..., None], -2)
        outputs = [ops.relu(x @ self.up[e] + self.bias[e]) @ self.down[e] for e in range(EXPERTS)]
        return sum(gates[..., e : e + 1] * output for e, output in enumerate(outputs))


class Scattered(Experts):
    """Gates that are put at the indices of chosen experts."""

    def mixed(self, x, probabilities, best, chosen):
        batch, position, _ = ops.meshgrid(*map(ops.arange, chosen.shape), indexing="ij")
        indices = ops.reshape(ops.stack([batch, position, chosen], -1), (-1, 3))
        gates = ops.scatter(indices, ops.reshape(best, (-1,)), probabilities.shape)
        return ops.einsum("bsem,emd,bse->bsd", self.hidden(x), self.down, gates)


class LookedUp(Experts):
    """Results of chosen experts, looked up among those of all."""

    def mixed(self, x, probabilities, best, chosen):
        outputs = ops.einsum("bsem,emd->bsed", self.hidden(x), self.down)
        return ops.sum(ops.take_along_axis(outputs, chosen[..., None], axis=2) * best[..., None], axis=2)


class AllExperts(Experts):
    """All experts, as many as there are."""

    def mixed(self, x, probabilities, best, chosen):
        _, chosen = ops.top_k(probabilities, EXPERTS)
        gates = probabilities * ops.sum(ops.one_hot(chosen, EXPERTS, dtype=x.dtype), -2)
        return ops.sum(ops.einsum("bsem,emd->bsed", self.hidden(x), self.down) * gates[..., None], axis=2)


class Buffers(Experts):
    """Experts with buffers, into which the first tokens that choose them are put, those of each row of the batch."""

    def mixed(self, x, probabilities, best, chosen):
        gates = ops.sum(ops.one_hot(chosen, EXPERTS, dtype=x.dtype) * best[..., None], axis=-2)
        is_chosen = ops.cast(gates > 0, x.dtype)
        place = ops.cast(ops.cumsum(is_chosen, axis=-2) * is_chosen - 1, "int32")
        return self.computed(x, gates, ops.one_hot(place, 4, dtype=x.dtype))  # nowhere for -1 and for 4 and more

    def computed(self, x, gates, buffers):
        given = ops.einsum("bsec,bsd->becd", buffers, x)
        hidden = ops.relu(ops.einsum("becd,edm->becm", given, self.up) + self.bias[:, None])
        results = ops.einsum("becm,emd->becd", hidden, self.down)
        return ops.einsum("bsec,becd->bsd", buffers * gates[..., None], results)


class FlatBuffers(Buffers):
    """The same, of all rows."""

    def mixed(self, x, probabilities, best, chosen):
        flat, probabilities = ops.reshape(x, (-1, WIDTH)), ops.reshape(probabilities, (-1, EXPERTS))
        outputs = super().mixed(flat, probabilities, *ops.top_k(probabilities, CHOSEN))
        return ops.reshape(outputs, ops.shape(x))

    def computed(self, x, gates, buffers):
        given = ops.einsum("tec,td->ecd", buffers, x)
        hidden = ops.relu(ops.einsum("ecd,edm->ecm", given, self.up) + self.bias[:, None])
        results = ops.einsum("ecm,emd->ecd", hidden, self.down)
        return ops.einsum("tec,ecd->td", buffers * gates[..., None], results)


SPARSE = {
    each.__name__: each
    for each in (ThreeOperands, MaskedProbabilities, MaskedScores, NormalizedExperts, OneExpert, ChoiceByChoice)
}
DENSE = {each.__name__: each for each in (Threshold, Loop, Scattered, LookedUp, AllExperts)}
BUFFERS = {each.__name__: each for each in (Buffers, FlatBuffers)}


def rules_for_width_and_experts(mesh):
    """Returns rules that shard the experts of `Experts` over an axis "expert", and their width over "model"."""
    layout_map = kd.LayoutMap(kd.create_device_mesh(mesh))
    layout_map[".*/up"] = "expert", None, "model"
    layout_map[".*/bias"] = None, "model"
    layout_map[".*/down"] = "expert", "model", None
    return layout_map


def inputs_and_layer(build, shape, routing="uniform"):
    """Returns inputs and a layer whose tokens choose experts evenly, "skewed" to few of them, or all the "same"."""
    keras.utils.set_random_seed(0)
    layer = build()
    layer.build(shape)
    x = keras.random.normal(shape, seed=1)
    x = ops.concatenate([ops.ones_like(x[..., :1]), x[..., 1:]], axis=-1)  # a feature that all tokens share
    for variable in layer.weights:
        if "scale" not in variable.path:
            variable.assign(keras.random.normal(variable.shape, seed=len(variable.path)) * 0.3)
        if tuple(variable.shape) == (WIDTH, EXPERTS):
            push = {"uniform": 0.0, "skewed": 1.0, "same": 50.0}[routing]
            first = ops.arange(EXPERTS, 0, -1, dtype="float32") * push
            variable.assign(ops.concatenate([first[None], variable[1:]]))
    return x, layer
