"""Plans of long sequences that devices share: KerasHub's Llama 3 with few blocks.

`benchmarks/plan_llama.py` plans the model with 8 billion parameters, on more tokens and more devices.
"""

import jax
import keras
import pytest
from support.compilers import needs_cuda

import keras_dist as kd

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation")]

WIDTH, LENGTH, HEADS, KEY_HEADS, SIZE = 1024, 2**15, 8, 2, 128


def build(depth):
    keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=1024,
        num_layers=depth,
        num_query_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=2 * WIDTH,
        dtype="mixed_bfloat16",
    )
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
    model.compile("adamw", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def plan_of(distribution):
    """The plan of one sequence for 8 blocks, extrapolated from 1 and 2."""
    tokens = jax.ShapeDtypeStruct((1, LENGTH), "int32")
    batch = {"token_ids": tokens, "padding_mask": jax.ShapeDtypeStruct((1, LENGTH), "bool")}, tokens
    return kd.plan(build, distribution, batch, depth=8, compile_depths=(1, 2))


@pytest.mark.slow
@needs_cuda
def test_fully_sharded_and_context_parallel():
    mesh = kd.create_device_mesh("fsdp:1,context:8", devices=kd.target("h100:8"))
    plan = plan_of(kd.FullyShardedDataParallel(mesh, sequence_dim_name="context", reshard_after_forward=True))
    assert plan.fits
    [attention] = plan.attention
    assert (attention.implementation, attention.calls, attention.logits_bytes) == ("cuDNN", 8, 0)
    assert attention.exchange == "all-to-all over 'context'"
    assert plan.memory.state == pytest.approx(12 * plan.parameters / 8, rel=0.01)
    # In units of the width: what a block holds, at most 40 in bfloat16, and the logits.
    assert plan.memory.temporaries < LENGTH // 8 * WIDTH * (2 * 40 * 8 + 4 * 4)
    # Each device has all key heads of its query head: both are exchanged 4 times.
    exchanged = 8 * 7 / 8 * LENGTH // 8 * HEADS * SIZE * 2 * 8
    of_weights = 3 * 7 / 8 * 2 * plan.parameters
    assert exchanged < plan.wire_bytes < 1.02 * exchanged + of_weights
