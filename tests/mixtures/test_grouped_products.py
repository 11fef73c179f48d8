"""Grouped products: the numbers of each form and its derivatives, against a product with the weights of each row."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.slow_cases import crossed, slow

import keras_dist as kd
from keras_dist.mixtures import kernels
from keras_dist.mixtures.blocks import block_rows, num_blocks
from keras_dist.mixtures.grouped_products import choose_form, grouped_product
from keras_dist.planning.costs.model_flops import count_model_flops

INPUTS, OUTPUTS = 24, 40
ROUTINGS = {
    "uniform": (16, 16, 16, 16),
    "skewed": (1, 40, 0, 23),
    "all to one expert": (0, 0, 64, 0),
    "all to the first": (64, 0, 0, 0),
    "all to the last": (0, 0, 0, 64),
    "one row": (0, 0, 1, 0),
    "fewer rows than experts": (1, 0, 0, 2),
    "odd": (7, 0, 29, 1),
}
EPSILON = {"float32": 2e-6, "bfloat16": 8e-3}


def operands(sizes, dtype, inputs=INPUTS, outputs=OUTPUTS):
    generator = np.random.default_rng(0)
    num_rows, num_experts = sum(sizes), len(sizes)
    shapes = (num_rows, inputs), (num_experts, inputs, outputs), (num_rows, outputs)
    rows, weights, gradient = (jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)
    return rows, weights, jnp.asarray(sizes, "int32"), gradient


def output_and_gradients(product, rows, weights, sizes, gradient):
    output, pull = jax.vjp(lambda rows, weights: product(rows, weights, sizes), rows, weights)
    return output, *pull(gradient.astype(output.dtype))


def dense(rows, weights, sizes):
    """In float32, with the weights of each row."""
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
    return jnp.einsum("rk,rkn->rn", rows.astype("float32"), weights.astype("float32")[expert])


def check(form, arguments, product=None):
    """Compares the output and both gradients with those of dense products, in units of their largest element."""
    product = product or functools.partial(grouped_product, form=form)
    found = jax.jit(functools.partial(output_and_gradients, product))(*arguments)
    rows, weights, sizes, gradient = arguments
    wide = (each.astype("float32") for each in (rows, weights))
    expected = jax.jit(functools.partial(output_and_gradients, dense))(*wide, sizes, gradient)
    for each, right in zip(found, expected, strict=True):
        assert each.dtype == rows.dtype
        limit = EPSILON[str(rows.dtype)] * max(1.0, float(jnp.abs(right).max()))
        np.testing.assert_allclose(np.asarray(each, "float32"), right, rtol=0, atol=limit)
    has_no_rows = np.asarray(sizes) == 0
    assert not np.asarray(found[2], "float32")[has_no_rows].any()


@pytest.mark.parametrize(("routing", "dtype"), crossed(ROUTINGS, EPSILON))
@pytest.mark.parametrize("form", ["blocks", "batched"])
def test_forms_in_xla_give_the_numbers_of_dense_products(form, routing, dtype):
    check(form, operands(ROUTINGS[routing], dtype))


@pytest.mark.parametrize("form", ["blocks", "batched", "megablox"])
@pytest.mark.parametrize("sizes", [(16, 0, 5, 20), (0, 0, 0, 0), (50, 0, 0, 0)])
@pytest.mark.usefixtures("megablox_on_cpus")
def test_rows_of_no_expert_change_nothing(form, sizes):
    rows, weights, _, gradient = operands((64, 0, 0, 0), "float32")
    product, used = functools.partial(grouped_product, form=form), sum(sizes)
    sizes = jnp.asarray(sizes, "int32")
    found = output_and_gradients(product, rows, weights, sizes, gradient)
    right = output_and_gradients(dense, rows[:used], weights, sizes, gradient[:used])
    for each, expected in zip((found[0][:used], found[1][:used], found[2]), right, strict=True):
        np.testing.assert_allclose(each, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["blocks", "batched", "megablox"])
@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (16, 0, 5, 20), (0, 0, 64, 0)])
@pytest.mark.usefixtures("megablox_on_cpus")
def test_gates_multiply_rows_and_no_product_is_kept(form, sizes):
    rows, weights, _, gradient = operands((64, 0, 0, 0), "float32")
    gates, sizes, used = jnp.cos(jnp.arange(64.0)), jnp.asarray(sizes, "int32"), sum(sizes)
    output, pull = jax.vjp(
        lambda rows, weights, gates: grouped_product(rows, weights, sizes, form, gates=gates), rows, weights, gates
    )
    expected, pull_expected = jax.vjp(
        lambda rows, weights, gates: dense(rows, weights, sizes) * gates[:, None], rows[:used], weights, gates[:used]
    )
    found = output, *pull(gradient)
    for each, right in zip(found, (expected, *pull_expected(gradient[:used])), strict=True):
        np.testing.assert_allclose(each[: len(right)], right, rtol=0, atol=1e-4)
    kept = {getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(pull)}
    assert rows.shape in kept
    assert output.shape not in kept


@pytest.fixture
def megablox_on_cpus(monkeypatch):
    """The kernels of megablox run in Pallas's interpreter."""
    interpreted = [functools.partial(kernel, interpret=True) for kernel in kernels._megablox_kernels()]
    monkeypatch.setattr(kernels, "_megablox_kernels", lambda: interpreted)


@pytest.mark.usefixtures("megablox_on_cpus")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    crossed([(60, 100, 0, 57), (0, 0, 300, 0), (0, 1, 0, 0), (7, 0, 29, 1)], ["float32", "bfloat16"]),
)
def test_megablox_gives_the_numbers_of_dense_products(sizes, dtype):
    check("megablox", operands(sizes, dtype, 96, 200))


@pytest.mark.parametrize("visits_empty", [False, True])
@pytest.mark.parametrize("sizes", [(60, 100, 0, 96), (0, 0, 256, 0), (0, 0, 0, 256), (256, 0, 0, 0), (64, 64, 0, 128)])
def test_visits_of_tiles_are_those_of_megablox(sizes, visits_empty):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

    arguments = {
        "group_sizes": jnp.asarray(sizes, "int32"), "m": 256, "tm": 64, "start_group": jnp.int32(0),
        "num_nonzero_groups": 4, "visit_empty_groups": visits_empty,
    }  # fmt: skip
    (offsets, groups, tiles), visits = kernels.visits_of_tiles(**arguments)
    (right_offsets, right_groups, right_tiles), right_visits = make_group_metadata(**arguments)
    assert visits == right_visits
    np.testing.assert_array_equal(offsets, right_offsets)
    np.testing.assert_array_equal(groups[:visits], right_groups[:visits])
    np.testing.assert_array_equal(tiles[:visits], right_tiles[:visits])


@pytest.fixture
def mosaic_on_cpus(monkeypatch):
    """The Mosaic kernels run in the interpreter of JAX 0.12, with few thread blocks."""
    from jax.experimental.pallas import mosaic_gpu

    if not hasattr(mosaic_gpu, "InterpretGPUParams"):
        pytest.skip("this version of JAX has no interpreter of Mosaic kernels for GPUs")
    interpreted = functools.partial(mosaic_gpu.kernel, interpret=mosaic_gpu.InterpretGPUParams())
    monkeypatch.setattr(mosaic_gpu, "kernel", interpreted)


@pytest.mark.slow
@pytest.mark.usefixtures("mosaic_on_cpus")
@pytest.mark.parametrize("sizes", [(60, 100, 0, 57), (0, 0, 300, 0), (0, 1, 0, 0)])
def test_mosaic_gives_the_numbers_of_dense_products(sizes):
    check("mosaic", operands(sizes, "bfloat16", 128, 192))


@pytest.mark.parametrize("num_experts", [1, 4, 32, 128])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 100, 1000, 4096, 16384, 100_003])
def test_blocks_hold_the_rows_of_any_routing_with_few_to_spare(num_rows, num_experts):
    size, blocks = block_rows(num_rows, num_experts), num_blocks(num_rows, num_experts)
    assert blocks * size <= 1.25 * num_rows
    used = min(num_rows, num_experts)
    ones, rest = np.ones(used, int), num_rows - used
    whole, remainder = divmod(rest, size)
    worst = ones + np.bincount([0], minlength=used) * whole * size
    worst[-1] += remainder
    assert (-(-worst // size)).sum() <= blocks


@pytest.mark.parametrize("form", ["blocks", "batched"])
def test_few_rows_read_the_weights_of_their_experts_only(form):
    rows, weights, sizes, _ = operands((0, 1, 0, 0, 0, 1, 0, 0), "float32")
    weights = weights.at[jnp.asarray([0, 2, 3, 4, 6, 7])].set(jnp.nan)
    assert np.isfinite(grouped_product(rows, weights, sizes, form)).all()
    assert num_blocks(2, 8) == 2


@pytest.mark.parametrize("form", ["blocks", "batched"])
def test_gradient_of_weights_is_summed_in_float32(form):
    num_rows = 4096
    rows, gradient = jnp.full((num_rows, 1), 0.01, "bfloat16"), jnp.ones((num_rows, 1), "bfloat16")
    weights, sizes = jnp.ones((1, 1, 1), "bfloat16"), jnp.asarray([num_rows], "int32")
    product = functools.partial(grouped_product, form=form)
    _, _, of_weights = output_and_gradients(product, rows, weights, sizes, gradient)
    np.testing.assert_allclose(float(of_weights[0, 0, 0]), num_rows * float(rows[0, 0]), rtol=4e-3)


@pytest.mark.parametrize("form", ["blocks", slow("batched")])
def test_product_in_a_rematerialized_scan(form):
    arguments = operands(ROUTINGS["skewed"], "float32")

    @jax.checkpoint
    def product(rows, weights, sizes):
        def layer(total, weight):
            return total + grouped_product(rows, weight, sizes, form), None

        initial = jnp.zeros((rows.shape[0], weights.shape[-1]), rows.dtype)
        return jax.lax.scan(layer, initial, 0.5 * jnp.stack([weights, weights]))[0]

    check(form, arguments, product)


@pytest.mark.parametrize("form", ["blocks", "batched"])
def test_product_of_the_rows_of_each_device(form, mesh):
    sizes = ROUTINGS["skewed"]
    rows, weights, sizes, gradient = operands(sizes, "float32")
    specs = PartitionSpec(), PartitionSpec(None, None, "model"), PartitionSpec()
    product = jax.shard_map(
        functools.partial(grouped_product, form=form), mesh=mesh.backend_mesh, in_specs=specs,
        out_specs=PartitionSpec(None, "model"), check_vma=False,
    )  # fmt: skip
    check(form, (rows, weights, sizes, gradient), product)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "form"),
    [
        (((8, 4), (2, 5, 3), (2,)), ("float32", "float32", "int32"), "blocks"),
        (((8, 4), (2, 4, 3), (3,)), ("float32", "float32", "int32"), "blocks"),
        (((8, 4), (2, 4, 3), (2,)), ("float32", "bfloat16", "int32"), "blocks"),
        (((8, 4), (2, 4, 3), (2,)), ("float32", "float32", "uint32"), "blocks"),
        (((8, 4), (2, 4, 3), (2,)), ("float32", "float32", "int32"), "ragged"),
    ],
)
def test_operands_that_do_not_suit_each_other(shapes, dtypes, form):
    with pytest.raises(ValueError, match=r"grouped product"):
        grouped_product(*map(jnp.zeros, shapes, dtypes), form)


def gpu(kind, capability):
    return types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


V5E, V3, H100 = kd.mock_tpus("v5e:2x4")[0], kd.mock_tpus("v3:2x2")[0], gpu("NVIDIA H100 80GB HBM3", "9.0")


@pytest.mark.parametrize(
    ("device", "width", "dtype", "name", "reason"),
    [
        (V5E, 256, "bfloat16", "megablox", None),
        (V5E, 250, "float32", "megablox", None),
        (V5E, 256, "float16", "batched", "float16"),
        (V3, 256, "bfloat16", "batched", "TPU v3"),
        (H100, 256, "bfloat16", "mosaic", None),
        (H100, 256, "float32", "batched", "float32"),
        (H100, 250, "bfloat16", "batched", "250"),
        (gpu("NVIDIA A100-SXM4-80GB", "8.0"), 256, "bfloat16", "batched", "8.0"),
        (gpu("NVIDIA B200", "10.0"), 256, "bfloat16", "batched", "10.0"),
        (kd.mock_gpus(1)[0], 256, "bfloat16", "batched", "mock GPU"),
        (jax.devices("cpu")[0], 256, "bfloat16", "blocks", None),
    ],
)
def test_form_for_a_device(device, width, dtype, name, reason):
    chosen = choose_form(device, 8192, (8, 512, width), dtype)
    assert chosen.name == name
    assert chosen.reason is None if reason is None else reason in chosen.reason


def test_form_for_fewer_rows_than_experts():
    assert choose_form(V5E, 4, (8, 512, 256), "bfloat16").name == "megablox"
    assert choose_form(V3, 4, (8, 512, 256), "bfloat16").name == "blocks"
    assert choose_form(H100, 4, (8, 512, 256), "bfloat16").name == "batched"


@pytest.mark.parametrize("form", ["blocks", "batched", "megablox", "mosaic"])
@pytest.mark.parametrize("wrap", [lambda function: function, jax.checkpoint])
def test_model_flops_are_those_of_the_rows(form, wrap):
    num_rows, shape = 4000, (8, 512, 192)
    shapes = (num_rows, shape[1]), shape, shape[:1], (num_rows, shape[2])
    dtypes = "bfloat16", "bfloat16", "int32", "bfloat16"
    product = wrap(functools.partial(grouped_product, form=form))
    step = functools.partial(output_and_gradients, product)
    traced = jax.make_jaxpr(step)(*map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert count_model_flops(traced.jaxpr) == 3 * 2 * num_rows * shape[1] * shape[2]
