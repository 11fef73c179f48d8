import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from support.hlo_programs import (
    COMPILERS,
    GPUS,
    SLICES,
    TPUS,
    devices_of,
    mapped,
    mesh_of,
    mesh_of_slices,
    partitioned,
    partitioned_program,
)

from keras_dist.mesh.topology import networks_of
from keras_dist.planning.hlo.collectives import wire_bytes
from keras_dist.planning.hlo.module_costs import read_module

SHARD = ((256, 1024), jnp.float32)
SHARD_BYTES = 256 * 1024 * 4

every_compiler = pytest.mark.parametrize("compiler", COMPILERS)
every_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


pytestmark = pytest.mark.usefixtures("full_compilation")


def axes_of(mesh):
    return dict(mesh.shape)


def only_collective(text, mesh):
    [collective] = read_module(text, axes_of(mesh)).collectives
    return collective


def bytes_per_element(compiler, dtype):
    # XLA:CPU has no bfloat16 collectives: it promotes them to float32.
    return 4 if compiler == "cpu" else jnp.dtype(dtype).itemsize


class TestCollectivesThatAProgramAsksFor:
    @every_compiler
    @every_dtype
    def test_a_sum_over_all_devices(self, compiler, dtype):
        mesh = mesh_of(compiler, "x")
        text = mapped(mesh, lambda t: lax.psum(t, "x"), (P("x"),), P(), ((256, 1024), dtype))
        found = only_collective(text, mesh)
        n, size = mesh.size, 256 * 1024 * bytes_per_element(compiler, dtype)
        assert (found.kind, found.bytes, found.count, found.tensors) == ("all-reduce", size, 1, 1)
        assert (found.axes, found.group_size) == (("x",), n)
        assert sorted(found.groups[0]) == list(range(n))
        assert found.wire_bytes == pytest.approx(2 * size * (n - 1) / n)
        assert found.dtype == ("bf16" if dtype == jnp.bfloat16 and compiler != "cpu" else "f32")
        assert found.op_name.endswith("psum")

    @every_compiler
    @pytest.mark.parametrize("shuffled", [False, True], ids=["devices in order", "devices shuffled"])
    @pytest.mark.parametrize("axis", ["a", "b"])
    def test_a_sum_over_one_of_two_axes(self, compiler, axis, shuffled):
        mesh = mesh_of(compiler, "a", "b", shuffled=shuffled)
        other = "b" if axis == "a" else "a"
        text = mapped(mesh, lambda t: lax.psum(t, axis), (P(("a", "b")),), P(other), SHARD)
        found = only_collective(text, mesh)
        positions = np.arange(mesh.size).reshape(2, -1)
        expected = positions.T if axis == "a" else positions
        assert (found.kind, found.axes, found.bytes) == ("all-reduce", (axis,), SHARD_BYTES)
        assert {frozenset(group) for group in found.groups} == {frozenset(map(int, group)) for group in expected}

    @every_compiler
    @pytest.mark.parametrize("axes", [("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")], ids="+".join)
    def test_a_sum_over_several_of_three_axes(self, compiler, axes):
        mesh = mesh_of(compiler, "a", "b", "c")
        rest = tuple(axis for axis in mesh.axis_names if axis not in axes)
        text = mapped(mesh, lambda t: lax.psum(t, axes), (P(mesh.axis_names),), P(rest or None), SHARD)
        found = only_collective(text, mesh)
        assert found.axes == axes
        assert found.group_size == np.prod([mesh.shape[axis] for axis in axes])

    @every_compiler
    def test_the_means_of_three_tensors_are_combined(self, compiler):
        mesh = mesh_of(compiler, "x")
        text = mapped(
            mesh, lambda *t: lax.pmean(t, "x"), (P("x"),) * 3, (P(),) * 3, SHARD, SHARD, ((512, 128), jnp.float32)
        )
        found = only_collective(text, mesh)
        assert (found.kind, found.bytes) == ("all-reduce", 2 * SHARD_BYTES + 512 * 128 * 4)
        # XLA:GPU concatenates small tensors first, and then reduces one.
        assert found.tensors == (1 if compiler.startswith("h100") else 3)

    @every_compiler
    @every_dtype
    @pytest.mark.parametrize("tiled", [False, True], ids=["stacked", "concatenated"])
    def test_a_gather_along_one_axis(self, compiler, dtype, tiled):
        mesh = mesh_of(compiler, "a", "b")
        text = mapped(
            mesh, lambda t: lax.all_gather(t, "b", tiled=tiled), (P(("a", "b")),), P("a"), ((256, 1024), dtype)
        )
        found = only_collective(text, mesh)
        n = mesh.shape["b"]
        gathered = n * 256 * 1024 * bytes_per_element(compiler, dtype)
        assert (found.kind, found.axes, found.group_size, found.bytes) == ("all-gather", ("b",), n, gathered)
        assert found.wire_bytes == pytest.approx(gathered * (n - 1) / n)

    @every_compiler
    def test_a_gather_of_a_few_bytes_is_a_gather_or_a_sum(self, compiler):
        # TPUs gather small shards by adding them up with zeros.
        mesh = mesh_of(compiler, "x")
        text = mapped(mesh, lambda t: lax.all_gather(t, "x"), (P("x"),), P(), ((1,), jnp.float32))
        found = only_collective(text, mesh)
        n = mesh.size
        assert found.axes == ("x",)
        forms = {"all-gather": 4 * n * (n - 1) / n, "all-reduce": 2 * 4 * n * (n - 1) / n}
        assert found.wire_bytes == pytest.approx(forms[found.kind])

    @every_compiler
    @every_dtype
    def test_a_scattered_sum(self, compiler, dtype):
        mesh = mesh_of(compiler, "x")
        n = mesh.size
        text = mapped(mesh, lambda t: lax.psum_scatter(t, "x", tiled=True), (P("x"),), P("x"), ((n * 256, 1024), dtype))
        found = only_collective(text, mesh)
        size = n * 256 * 1024 * bytes_per_element(compiler, dtype)
        # On some TPU topologies a scattered sum is a whole one, of which each device keeps its part.
        factor = {"reduce-scatter": 1, "all-reduce": 2}[found.kind]
        assert (found.kind == "reduce-scatter") or compiler in ("v5e:4x4", "v5p:2x2x2")
        assert (found.axes, found.bytes) == (("x",), size)
        assert found.wire_bytes == pytest.approx(factor * size * (n - 1) / n)

    @every_compiler
    @pytest.mark.parametrize("tiled", [False, True], ids=["stacked", "concatenated"])
    def test_an_exchange_of_all_with_all(self, compiler, tiled):
        # XLA:CPU prints the pieces of the tensor as operands, TPUs and GPUs print the tensor and the dim to split.
        mesh = mesh_of(compiler, "x")
        n = mesh.size
        shape = (8, n, 128)
        text = mapped(
            mesh, lambda t: lax.all_to_all(t, "x", 1, 0, tiled=tiled), (P("x"),), P("x"), (shape, jnp.float32)
        )
        found = only_collective(text, mesh)
        size = 8 * n * 128 * 4
        assert (found.kind, found.axes, found.bytes, found.tensors) == ("all-to-all", ("x",), size, 1)
        assert found.wire_bytes == pytest.approx(size * (n - 1) / n)

    @every_compiler
    @pytest.mark.parametrize("axis", ["a", "b"])
    def test_a_shift_along_one_axis(self, compiler, axis):
        mesh = mesh_of(compiler, "a", "b")
        n = mesh.shape[axis]
        ring = [(i, (i + 1) % n) for i in range(n)]
        text = mapped(mesh, lambda t: lax.ppermute(t, axis, ring), (P(("a", "b")),), P(("a", "b")), SHARD)
        found = only_collective(text, mesh)
        assert (found.kind, found.axes, found.bytes) == ("collective-permute", (axis,), SHARD_BYTES)
        assert (found.wire_bytes, found.group_size, found.part_of) == (SHARD_BYTES, 2, None)
        assert len(found.groups) == mesh.size

    @every_compiler
    def test_a_shift_between_some_devices(self, compiler):
        mesh = mesh_of(compiler, "x")
        text = mapped(mesh, lambda t: lax.ppermute(t, "x", [(0, 1), (2, 3)]), (P("x"),), P("x"), SHARD)
        found = only_collective(text, mesh)
        assert found.groups == ((0, 1), (2, 3))
        assert (found.axes, found.wire_bytes) == (("x",), SHARD_BYTES)

    @every_compiler
    def test_a_program_without_any(self, compiler):
        mesh = mesh_of(compiler, "x")
        costs = read_module(mapped(mesh, jnp.tanh, (P("x"),), P("x"), SHARD), axes_of(mesh))
        assert (costs.collectives, costs.wire_bytes, costs.flops) == ((), 0, 0)
        assert costs.devices == mesh.size


class TestLoops:
    @every_compiler
    def test_a_scan_runs_its_collectives_and_matmuls_once_a_step(self, compiler):
        mesh = mesh_of(compiler, "x")

        def program(t, weights):
            return lax.scan(lambda c, w: (jnp.tanh(lax.psum(c @ w, "x")), None), t, weights)[0]

        arguments = ((128, 256), jnp.float32), ((12, 256, 256), jnp.float32)
        costs = read_module(mapped(mesh, program, (P(), P()), P(), *arguments), axes_of(mesh))
        [found] = costs.collectives
        assert (found.kind, found.bytes, found.count) == ("all-reduce", 128 * 256 * 4, 12)
        assert costs.flops == 12 * 2 * 128 * 256 * 256
        assert costs.wire_bytes == 12 * found.wire_bytes
        assert costs.unknown_loops == 0

    @every_compiler
    def test_nested_loops_multiply(self, compiler):
        mesh = mesh_of(compiler, "x")

        def program(t, weights):
            def outer(c, w):
                return lax.fori_loop(3, 8, lambda i, c: jnp.tanh(lax.psum(c @ w, "x")), c) + 1, None

            return lax.psum(lax.scan(outer, t, weights)[0], "x")

        arguments = ((128, 256), jnp.float32), ((12, 256, 256), jnp.float32)
        costs = read_module(mapped(mesh, program, (P(), P()), P(), *arguments), axes_of(mesh))
        assert sorted(each.count for each in costs.collectives) == [1, 60]
        assert costs.flops == 60 * 2 * 128 * 256 * 256
        assert costs.unknown_loops == 0

    @every_compiler
    @pytest.mark.parametrize("kind", ["gather", "scatter", "permute", "exchange"])
    def test_every_kind_of_collective_in_a_loop(self, compiler, kind):
        mesh = mesh_of(compiler, "x")
        n = mesh.size
        run = {
            "gather": lambda t: lax.all_gather(t, "x", tiled=True).reshape(n, *t.shape).sum(0),
            "scatter": lambda t: jnp.tile(lax.psum_scatter(t, "x", tiled=True), (n, 1)),
            "permute": lambda t: lax.ppermute(t, "x", [(i, (i + 1) % n) for i in range(n)]),
            "exchange": lambda t: lax.all_to_all(t, "x", 0, 0, tiled=True),
        }[kind]
        shape, size = (n * 128, 1024), n * 128 * 1024 * 4
        text = mapped(
            mesh,
            lambda t: lax.fori_loop(0, 7, lambda i, c: jnp.tanh(run(c)), t),
            (P("x"),),
            P("x"),
            (shape, jnp.float32),
        )
        costs = read_module(text, axes_of(mesh))
        share = (n - 1) / n
        forms = {
            "gather": {"all-gather": n * size * share},
            # A scattered sum may be a whole one, see above.
            "scatter": {"reduce-scatter": size * share, "all-reduce": 2 * size * share},
            "permute": {"collective-permute": size},
            "exchange": {"all-to-all": size * share},
        }[kind]
        kinds = {each.kind for each in costs.collectives}
        assert len(kinds) == 1
        assert costs.wire_bytes == pytest.approx(7 * forms[kinds.pop()])

    @every_compiler
    def test_a_loop_of_unknown_length_counts_once_and_is_reported(self, compiler):
        mesh = mesh_of(compiler, "x")

        def program(t, w):
            return lax.while_loop(lambda c: c[0, 0] < 5, lambda c: jnp.tanh(lax.psum(c @ w, "x")), t)

        arguments = ((128, 256), jnp.float32), ((256, 256), jnp.float32)
        costs = read_module(mapped(mesh, program, (P(), P()), P(), *arguments), axes_of(mesh))
        [found] = costs.collectives
        assert (found.count, costs.unknown_loops) == (1, 1)
        assert costs.flops == 2 * 128 * 256 * 256

    @every_compiler
    def test_the_branch_that_sends_most_counts(self, compiler):
        mesh = mesh_of(compiler, "x")
        branches = [jnp.tanh, lambda t: lax.psum(t, "x"), lambda t: lax.pmax(lax.psum(t, "x") * t, "x")]

        def program(t, which):
            return lax.switch(which[0], branches, t)

        arguments = ((128, 256), jnp.float32), ((1,), jnp.int32)
        costs = read_module(mapped(mesh, program, (P(), P()), P(), *arguments), axes_of(mesh))
        assert [each.bytes for each in costs.collectives] == [128 * 256 * 4] * 2


class TestCollectivesThatTheCompilerChooses:
    @pytest.mark.parametrize("compiler", TPUS)
    @pytest.mark.parametrize("part_of", ["all-gather", "reduce-scatter"])
    def test_tpus_write_a_matmul_with_a_gather_or_a_scattered_sum_as_permutes(self, compiler, part_of):
        mesh = mesh_of(compiler, "x")
        n = mesh.size
        if part_of == "all-gather":
            left, right, out = ((1024 * n, 4096), P("x")), ((4096, 1024 * n), P(None, "x")), P(None, "x")
        else:
            left, right, out = ((1024 * n, 1024 * n), P(None, "x")), ((1024 * n, 4096), P("x")), P("x")
        arguments = ((shape, jnp.bfloat16, spec) for shape, spec in (left, right))
        costs = read_module(partitioned(mesh, jnp.matmul, out, *arguments), axes_of(mesh))
        assert {(each.kind, each.part_of, each.axes) for each in costs.collectives} == {
            ("collective-permute", part_of, ("x",))
        }
        # In a ring each device sends n - 1 shards, of 1024 x 4096. The compiler's two-way rings send up to two more.
        assert n - 1 <= costs.wire_bytes / (1024 * 4096 * 2) <= n + 1
        assert costs.flops == 2 * 1024 * 4096 * 1024 * n
        assert costs.unknown_loops == 0

    @every_compiler
    def test_data_parallel_training_reduces_the_gradients(self, compiler):
        costs, parameters, _ = self._training_step(compiler, P())
        size = bytes_per_element(compiler, jnp.bfloat16)
        large = [each for each in costs.collectives if each.bytes > 4]
        assert {each.kind for each in large} == {"all-reduce"}
        # XLA:CPU combines the loss with them.
        assert sum(each.bytes for each in large) - parameters * size in (0, 4)
        # Forward, and backward for the weights and for all inputs but the first.
        assert costs.flops == 2 * 512 * 2048 * 2048 * (4 + 4 + 3)

    @every_compiler
    def test_fully_sharded_training_gathers_and_scatters(self, compiler):
        costs, parameters, n = self._training_step(compiler, P("x"))
        size = bytes_per_element(compiler, jnp.bfloat16)
        sent = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0.0)
        for each in costs.collectives:
            sent[each.part_of or each.kind] += each.wire_bytes * each.count
        shards = parameters * size * (n - 1) / n
        # Rings for matmuls may send up to 2 shards more, weights may be gathered again for the backward pass.
        assert shards <= sent["all-gather"] <= 2 * shards * (n + 1) / (n - 1)
        scattered = sent["reduce-scatter"] + sent["all-reduce"]
        assert shards <= scattered <= 2.01 * shards * (n + 1) / (n - 1)
        assert costs.flops == 2 * 512 * 2048 * 2048 * (4 + 4 + 3)

    @pytest.mark.parametrize("compiler", GPUS)
    def test_gpus_scatter_the_gradients_of_fully_sharded_training(self, compiler):
        costs, parameters, _ = self._training_step(compiler, P("x"))
        [scatter] = [each for each in costs.collectives if each.kind == "reduce-scatter"]
        assert (scatter.bytes, scatter.tensors) == (2 * parameters, 4)

    @pytest.mark.skipif(TPUS[0].marks[0].args[0], reason="needs libtpu: pip install 'keras-dist[tpu]'")
    def test_tpus_write_scattered_sums_as_fusions_and_gathers_in_fragments(self):
        costs, parameters, _ = self._training_step("v5e:2x4", P("x"))
        text = self._text
        assert text.count('custom_call_target="AsyncCollectiveStart"') > 0
        assert "calls=%all-reduce-scatter" in text
        kinds = sorted((each.kind, each.bytes) for each in costs.collectives if each.bytes > 4)
        assert kinds == [("all-gather", 2 * parameters // 4)] * 4 + [("reduce-scatter", 2 * parameters // 4)] * 4

    def _training_step(self, compiler, spec):
        mesh = mesh_of(compiler, "x")

        def step(weights, x, y):
            def loss(weights):
                h = x
                for w in weights:
                    h = jax.nn.relu(h @ w)
                return jnp.mean((h - y) ** 2)

            value, gradients = jax.value_and_grad(loss)(weights)
            return value, [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

        def flat(x, y, *weights):
            return step(list(weights), x, y)

        batch = ((512 * mesh.size, 2048), jnp.bfloat16, P("x"))
        weights = [((2048, 2048), jnp.bfloat16, spec)] * 4
        self._text = partitioned(mesh, flat, (P(), [spec] * 4), batch, batch, *weights)
        return read_module(self._text, axes_of(mesh)), 4 * 2048 * 2048, mesh.size


class TestFlop:
    @every_compiler
    def test_a_matmul(self, compiler):
        mesh = mesh_of(compiler, "x")
        n = mesh.size
        text = partitioned(
            mesh, jnp.matmul, P("x"), ((128 * n, 512), jnp.bfloat16, P("x")), ((512, 256), jnp.bfloat16, P())
        )
        assert read_module(text).flops == 2 * 128 * 512 * 256

    @every_compiler
    @pytest.mark.parametrize(
        ("equation", "left", "right", "multiply_adds"),
        [
            ("bij,bjk->bik", (8, 128, 256), (8, 256, 512), 8 * 128 * 256 * 512),
            ("bthd,bshd->bhts", (8, 128, 4, 64), (8, 128, 4, 64), 8 * 4 * 128 * 128 * 64),
            ("bthd,hde->bte", (8, 128, 4, 64), (4, 64, 512), 8 * 128 * 4 * 64 * 512),
        ],
        ids=["of batches", "of attention scores", "of heads to features"],
    )
    def test_an_einsum(self, compiler, equation, left, right, multiply_adds):
        mesh = mesh_of(compiler, "x")
        n = mesh.size
        inputs = equation.split("->")[0].split(",")
        arguments = []
        for shape, letters in zip((left, right), inputs, strict=True):
            sharded = letters[0] == "b"
            arguments.append(((shape[0] * (n if sharded else 1), *shape[1:]), jnp.float32, P("x") if sharded else P()))
        text = partitioned(mesh, lambda a, b: jnp.einsum(equation, a, b), P("x"), *arguments)
        costs = read_module(text)
        assert costs.flops == 2 * multiply_adds
        assert dict(costs.flops_by_dtype) == {"f32": 2 * multiply_adds}

    @pytest.mark.parametrize("padding", ["SAME", "VALID"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"window_strides": (2, 3)}, {"rhs_dilation": (2, 2)}, {"feature_group_count": 4}],
        ids=["plain", "strided", "dilated", "grouped"],
    )
    def test_a_convolution_counts_what_it_multiplies_and_each_gradient_as_much(self, options, padding):
        mesh = mesh_of("cpu", "x")

        def convolution(image, kernel):
            keywords = {"window_strides": (1, 1), **options}
            numbers = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(image, kernel, padding=padding, dimension_numbers=numbers, **keywords)

        groups = options.get("feature_group_count", 1)
        shapes = (2, 16, 20, 8), (3, 5, 8 // groups, 12)
        # All devices do the same: what is counted is the compiler's text, not its partitioner.
        arguments = [(shape, jnp.float32, P()) for shape in shapes]
        forward = read_module(partitioned(mesh, convolution, P(), *arguments))
        # Counted by multiplying ones: each output is the number of multiply-adds that made it.
        ones = convolution(jnp.ones(shapes[0]), jnp.ones(shapes[1]))
        assert forward.flops == 2 * float(ones.sum())

        def loss(image, kernel):
            return jnp.sum(convolution(image, kernel) ** 2)

        both = read_module(partitioned(mesh, jax.grad(loss, (0, 1)), (P(), P()), *arguments))
        assert both.flops == 3 * forward.flops

    @pytest.mark.parametrize("compiler", GPUS)
    def test_a_convolution_and_its_gradients_on_gpus(self, compiler):
        mesh = mesh_of(compiler, "x")

        def loss(image, kernel):
            numbers = ("NHWC", "HWIO", "NHWC")
            return jnp.sum(lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=numbers) ** 2)

        arguments = ((4, 16, 20, 8), jnp.float32, P()), ((3, 5, 8, 12), jnp.float32, P())
        costs = read_module(partitioned(mesh, jax.grad(loss, (0, 1)), (P(), P()), *arguments))
        assert costs.flops == 3 * 2 * (4 * 14 * 16 * 12) * (3 * 5 * 8)


class TestMemory:
    @every_compiler
    def test_a_sum_of_two_tensors_reads_both_and_writes_one(self, compiler):
        mesh = mesh_of(compiler, "x")
        arguments = [((1024 * mesh.size, 8192), jnp.float32, P("x"))] * 2
        text = partitioned(mesh, lambda a, b: jnp.tanh(a) + b, P("x"), *arguments)
        assert read_module(text).memory_bytes == 3 * 1024 * 8192 * 4

    @every_compiler
    def test_a_scan_reads_its_weights_once_not_once_a_step(self, compiler):
        mesh = mesh_of(compiler, "x")
        steps = 50

        def program(c, ws):
            return lax.scan(lambda c, w: (c * w, None), c, ws)[0]

        text = mapped(mesh, program, (P(), P()), P(), ((64, 128), jnp.float32), ((steps, 64, 128), jnp.float32))
        step = 64 * 128 * 4
        # A step reads a slice of the weights and reads and writes the carry; some compilers write the slice first.
        assert steps * step <= read_module(text).memory_bytes <= 6 * steps * step

    @every_compiler
    def test_stacking_the_steps_of_a_scan_writes_each_once(self, compiler):
        mesh = mesh_of(compiler, "x")
        steps = 50

        def program(c):
            def body(c, _):
                c = jnp.tanh(c)
                return c, c

            return lax.scan(body, c, None, length=steps)

        text = mapped(mesh, program, (P(),), (P(), P()), ((64, 128), jnp.float32))
        step = 64 * 128 * 4
        assert steps * step <= read_module(text).memory_bytes <= 7 * steps * step

    @pytest.mark.parametrize(
        "function",
        [jnp.matmul, lambda a, b: jnp.tanh(a @ b).sum(), lambda a, b: jax.nn.softmax(a @ b, axis=-1) @ b.T],
        ids=["a matmul", "a matmul and a sum", "attention"],
    )
    def test_loop_free_programs_move_what_xla_counts_on_the_cpu(self, function):
        mesh = mesh_of("cpu", "x")
        arguments = ((1024, 512), jnp.float32, P("x")), ((512, 256), jnp.float32, P())
        program = partitioned_program(mesh, function, P(), *arguments)
        expected = program.cost_analysis()["bytes accessed"]
        assert read_module(program.as_text()).memory_bytes == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("compiler", TPUS)
    def test_values_in_vmem_are_no_traffic(self, compiler):
        mesh = mesh_of(compiler, "x")
        arguments = ((128 * mesh.size, 512), jnp.bfloat16, P("x")), ((512, 256), jnp.bfloat16, P())
        costs = read_module(partitioned(mesh, jnp.matmul, P("x"), *arguments))
        assert costs.memory_bytes == 2 * (128 * 512 + 512 * 256 + 128 * 256)

    @every_compiler
    def test_the_largest_values_are_named(self, compiler):
        mesh = mesh_of(compiler, "x")

        # A sum over devices is never fused, and this one is larger than a TPU's VMEM.
        def program(t):
            return jnp.tanh(lax.psum(t * 2, "x")).sum()

        costs = read_module(mapped(mesh, program, (P("x"),), P(), ((8192, 16384), jnp.float32)))
        assert {(value.shape, value.bytes) for value in costs.largest_values[:2]} == {
            ("f32[8192,16384]", 8192 * 16384 * 4)
        }
        assert "psum" in [value.op_name.split("/")[-1] for value in costs.largest_values]
        assert all(value.bytes < 8192 * 16384 for value in costs.largest_values[3:])


TILE = ((24 * 16, 1024), jnp.float32)  # splits among 2, 3, 4, 6, 8 and 12 devices
TILE_BYTES = 24 * 16 * 1024 * 4

# Per device, what is asked for along an axis of n, with the bytes of the whole and its wire bytes over those.
ALONG_AXIS = {
    "all-reduce": (lambda t, axis, n: lax.psum(t, axis), lambda n: TILE_BYTES, lambda n: 2 * (n - 1) / n),
    "all-gather": (
        lambda t, axis, n: lax.all_gather(t, axis, tiled=True),
        lambda n: n * TILE_BYTES,
        lambda n: (n - 1) / n,
    ),
    "reduce-scatter": (
        lambda t, axis, n: lax.psum_scatter(t, axis, tiled=True),
        lambda n: TILE_BYTES,
        lambda n: (n - 1) / n,
    ),
    "all-to-all": (
        lambda t, axis, n: lax.all_to_all(t, axis, 0, 1, tiled=True),
        lambda n: TILE_BYTES,
        lambda n: (n - 1) / n,
    ),
    "collective-permute": (
        lambda t, axis, n: lax.ppermute(t, axis, [(i, (i + 1) % n) for i in range(n)]),
        lambda n: TILE_BYTES,
        lambda n: 1,
    ),
}


def along(mesh, kind, axis):
    """Text of a program that does one thing along one axis."""
    function, n = ALONG_AXIS[kind][0], mesh.shape[axis]
    everywhere = P(mesh.axis_names)
    summed = kind in ("all-reduce", "all-gather")
    rest = tuple(name for name in mesh.axis_names if name != axis)
    out = P(rest or None) if summed else everywhere
    return mapped(mesh, lambda t: function(t, axis, n), (everywhere,), out, TILE)


def costs_of(text, mesh):
    devices = mesh.devices.ravel().tolist()
    return read_module(text, axes_of(mesh), networks_of(devices).tolist(), [device.id for device in devices])


def groups_along(mesh, kind, axis):
    """The groups, or pairs, of positions that differ only along an axis."""
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    lines = np.moveaxis(positions, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis]).tolist()
    if kind == "collective-permute":
        return {(line[i - 1], line[i]) for line in lines for i in range(len(line))}
    return {frozenset(line) for line in lines}


def found_groups(collective):
    as_set = tuple if collective.kind == "collective-permute" else frozenset
    return {as_set(group) for group in collective.groups}


def in_order(slices):
    return np.arange(4 * slices).reshape(slices, 4)


def numbered_otherwise(slices):
    places = in_order(slices)
    places[1] = places[1][[2, 0, 3, 1]]
    return places


class TestSeveralSlices:
    """The module is that of one slice, and what crosses slices are sends to the hosts."""

    LAYOUTS = (
        pytest.param(("slice", "chip"), in_order, id="slices outside"),
        pytest.param(("chip", "slice"), lambda slices: in_order(slices).T, id="slices inside"),
        pytest.param(("slice", "chip"), lambda slices: in_order(slices)[::-1, [2, 0, 3, 1]], id="in another order"),
        pytest.param(("slice", "chip"), numbered_otherwise, id="each slice in its own order"),
    )

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize(("names", "places"), LAYOUTS)
    @pytest.mark.parametrize("kind", ALONG_AXIS)
    @pytest.mark.parametrize("axis", ["slice", "chip"])
    def test_each_kind_between_and_inside_slices(self, slices, names, places, kind, axis):
        sizes = {"slice": slices, "chip": 4}
        mesh = mesh_of_slices(slices, {name: sizes[name] for name in names}, places(slices))
        costs = costs_of(along(mesh, kind, axis), mesh)
        [found] = costs.collectives
        n, (_, size, per_byte) = sizes[axis], ALONG_AXIS[kind]
        assert (found.kind, found.axes, found.count, found.tensors) == (kind, (axis,), 1, 1)
        assert (found.bytes, found.group_size, found.dtype) == (size(n), 2 if kind.endswith("permute") else n, "f32")
        assert found.wire_bytes == pytest.approx(size(n) * per_byte(n))
        assert found_groups(found) == groups_along(mesh, kind, axis)
        assert (costs.devices, costs.opaque_calls) == (mesh.size, ())

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize("kind", ALONG_AXIS)
    @pytest.mark.parametrize("axis", ["a", "b"])
    def test_inside_slices_along_each_of_two_axes_around_that_of_the_slices(self, slices, kind, axis):
        places = in_order(slices).reshape(slices, 2, 2).transpose(1, 0, 2)
        mesh = mesh_of_slices(slices, {"a": 2, "slice": slices, "b": 2}, places)
        [found] = costs_of(along(mesh, kind, axis), mesh).collectives
        assert (found.kind, found.axes, found.group_size) == (kind, (axis,), 2)
        assert found_groups(found) == groups_along(mesh, kind, axis)

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize(
        "places", [in_order, lambda slices: in_order(slices).T], ids=["slice after slice", "slices taking turns"]
    )
    def test_a_sum_over_an_axis_of_chips_of_several_slices_is_scattered_summed_and_gathered(self, slices, places):
        n = 4 * slices
        mesh = mesh_of_slices(slices, {"data": n}, places(slices))
        first, between, last = costs_of(along(mesh, "all-reduce", "data"), mesh).collectives
        assert [each.kind for each in (first, between, last)] == ["reduce-scatter", "all-reduce", "all-gather"]
        assert [each.axes for each in (first, between, last)] == [("data",)] * 3
        assert [each.group_size for each in (first, between, last)] == [4, slices, 4]
        ordered = np.argsort(places(slices).ravel()).reshape(slices, 4)
        assert found_groups(first) == found_groups(last) == {frozenset(chips) for chips in ordered.tolist()}
        assert found_groups(between) == {frozenset(places) for places in ordered.T.tolist()}
        # All three together send what one ring through all devices would.
        assert first.wire_bytes + between.wire_bytes + last.wire_bytes == pytest.approx(2 * TILE_BYTES * (n - 1) / n)

    @pytest.mark.parametrize("slices", SLICES)
    def test_a_shift_over_an_axis_of_chips_of_several_slices_is_one_inside_and_one_between(self, slices):
        mesh = mesh_of_slices(slices, {"data": 4 * slices}, in_order(slices))
        between, inside = costs_of(along(mesh, "collective-permute", "data"), mesh).collectives
        assert found_groups(between) | found_groups(inside) == groups_along(mesh, "collective-permute", "data")
        assert found_groups(between) == {(4 * i + 3, 4 * (i + 1) % mesh.size) for i in range(slices)}
        assert (between.axes, between.wire_bytes) == (inside.axes, inside.wire_bytes) == (("data",), TILE_BYTES)

    @pytest.mark.parametrize("slices", SLICES)
    def test_an_exchange_of_all_chips_of_several_slices_goes_through_the_hosts_as_a_whole(self, slices):
        n = 4 * slices
        mesh = mesh_of_slices(slices, {"data": n}, in_order(slices))
        [found] = costs_of(along(mesh, "all-to-all", "data"), mesh).collectives
        assert (found.kind, found.axes, found.group_size, found.bytes) == ("all-to-all", ("data",), n, TILE_BYTES)
        assert found.wire_bytes == pytest.approx(TILE_BYTES * (n - 1) / n)

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize("chips", [[1, 3], [2, 3], [2]], ids=str)
    @pytest.mark.parametrize("kind", ["all-reduce", "collective-permute"])
    def test_some_chips_of_each_slice(self, slices, chips, kind):
        mesh = mesh_of_slices(slices, {"slice": slices, "chip": len(chips)}, in_order(slices)[:, chips])
        [found] = costs_of(along(mesh, kind, "slice"), mesh).collectives
        assert (found.kind, found.axes, found.bytes) == (kind, ("slice",), TILE_BYTES)
        assert found_groups(found) == groups_along(mesh, kind, "slice")

    @pytest.mark.parametrize("slices", SLICES)
    def test_ids_are_needed_only_where_devices_are_not_in_their_order(self, slices):
        mesh = mesh_of_slices(slices, {"slice": slices, "chip": 4}, in_order(slices))
        text = along(mesh, "all-to-all", "slice")
        networks = networks_of(mesh.devices.ravel().tolist()).tolist()
        assert read_module(text, axes_of(mesh), networks) == costs_of(text, mesh)
        [unknown] = read_module(text, axes_of(mesh)).collectives
        assert (unknown.kind, unknown.bytes, unknown.group_size) == ("all-to-all", TILE_BYTES, slices)
        assert (unknown.axes, unknown.groups) == (None, ())

    @pytest.mark.parametrize("slices", SLICES)
    def test_a_sum_between_slices_in_a_scan_runs_once_a_step(self, slices):
        mesh = mesh_of_slices(slices, {"slice": slices, "chip": 4}, in_order(slices))

        def program(t, weights):
            return lax.scan(lambda c, w: (jnp.tanh(lax.psum(c @ w, "slice")), None), t, weights)[0]

        arguments = ((128, 256), jnp.float32), ((12, 256, 256), jnp.float32)
        costs = costs_of(mapped(mesh, program, (P(("slice", "chip")), P()), P("chip"), *arguments), mesh)
        [found] = costs.collectives
        assert (found.kind, found.axes, found.bytes, found.count) == ("all-reduce", ("slice",), 128 * 256 * 4, 12)
        assert costs.flops == 12 * 2 * 128 * 256 * 256

    @pytest.mark.parametrize("slices", SLICES)
    def test_small_tensors_are_sent_with_their_padding(self, slices):
        mesh = mesh_of_slices(slices, {"slice": slices, "chip": 4}, in_order(slices))
        everywhere = P(("slice", "chip"))
        text = mapped(mesh, lambda t: lax.psum(t, "slice"), (everywhere,), P("chip"), ((7,), jnp.bfloat16))
        costs = costs_of(text, mesh)
        [found] = costs.collectives
        assert (found.kind, found.axes, found.dtype, found.bytes) == ("all-reduce", ("slice",), "bf16", 256 * 2)
        assert costs.opaque_calls == ()


class TestWireBytes:
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("all-reduce", 1500.0),
            ("all-gather", 750.0),
            ("reduce-scatter", 750.0),
            ("all-to-all", 750.0),
            ("collective-permute", 1000.0),
            ("collective-broadcast", 1000.0),
        ],
    )
    def test_of_each_kind(self, kind, expected):
        assert wire_bytes(kind, 1000, 4) == expected

    @given(st.integers(1, 10**12), st.integers(1, 4096))
    @settings(max_examples=50, deadline=None)
    def test_a_sum_is_a_scattered_sum_and_a_gather(self, size, group):
        parts = wire_bytes("reduce-scatter", size, group) + wire_bytes("all-gather", size, group)
        assert wire_bytes("all-reduce", size, group) == pytest.approx(parts)

    @pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "collective-broadcast", "all-to-all"])
    def test_a_group_of_one_sends_nothing(self, kind):
        assert wire_bytes(kind, 1000, 1) == 0


def test_the_devices_of_the_compilers_are_what_their_names_say():
    assert len(devices_of("cpu")) == 8
