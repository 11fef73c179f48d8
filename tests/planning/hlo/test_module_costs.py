"""Costs of programs compiled for CPUs, TPUs and GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.compilers import needs_libtpu
from support.hlo_programs import (
    COMPILERS,
    GPUS,
    TPUS,
    axes_of,
    devices_of,
    mapped,
    mesh_of,
    partitioned,
    partitioned_program,
)
from support.hlo_text import read_module

SHARD = ((256, 1024), jnp.float32)
SHARD_BYTES = 256 * 1024 * 4

every_compiler = pytest.mark.parametrize("compiler", COMPILERS)
every_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


pytestmark = pytest.mark.usefixtures("full_compilation")


def only_collective(text, mesh):
    [collective] = read_module(text, axes_of(mesh)).collectives
    return collective


def bytes_per_element(compiler, dtype):
    # XLA:CPU has no bfloat16 collectives: it promotes them to float32.
    return 4 if compiler == "cpu" else jnp.dtype(dtype).itemsize


class TestExplicitCollectives:
    @every_compiler
    @every_dtype
    def test_all_reduce_over_all_devices(self, compiler, dtype):
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
    def test_all_reduce_over_one_of_two_axes(self, compiler, axis, shuffled):
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
    def test_all_reduce_over_several_of_three_axes(self, compiler, axes):
        mesh = mesh_of(compiler, "a", "b", "c")
        rest = tuple(axis for axis in mesh.axis_names if axis not in axes)
        text = mapped(mesh, lambda t: lax.psum(t, axes), (P(mesh.axis_names),), P(rest or None), SHARD)
        found = only_collective(text, mesh)
        assert found.axes == axes
        assert found.group_size == np.prod([mesh.shape[axis] for axis in axes])

    @every_compiler
    def test_all_reduces_of_three_tensors_are_combined(self, compiler):
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
    def test_all_gather_along_one_axis(self, compiler, dtype, tiled):
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
    def test_small_all_gather_may_be_an_all_reduce(self, compiler):
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
    def test_reduce_scatter(self, compiler, dtype):
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
    def test_all_to_all(self, compiler, tiled):
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
    def test_collective_permute_along_one_axis(self, compiler, axis):
        mesh = mesh_of(compiler, "a", "b")
        n = mesh.shape[axis]
        ring = [(i, (i + 1) % n) for i in range(n)]
        text = mapped(mesh, lambda t: lax.ppermute(t, axis, ring), (P(("a", "b")),), P(("a", "b")), SHARD)
        found = only_collective(text, mesh)
        assert (found.kind, found.axes, found.bytes) == ("collective-permute", (axis,), SHARD_BYTES)
        assert (found.wire_bytes, found.group_size, found.part_of) == (SHARD_BYTES, 2, None)
        assert len(found.groups) == mesh.size

    @every_compiler
    def test_collective_permute_between_some_devices(self, compiler):
        mesh = mesh_of(compiler, "x")
        text = mapped(mesh, lambda t: lax.ppermute(t, "x", [(0, 1), (2, 3)]), (P("x"),), P("x"), SHARD)
        found = only_collective(text, mesh)
        assert found.groups == ((0, 1), (2, 3))
        assert (found.axes, found.wire_bytes) == (("x",), SHARD_BYTES)

    @every_compiler
    def test_program_without_collectives(self, compiler):
        mesh = mesh_of(compiler, "x")
        costs = read_module(mapped(mesh, jnp.tanh, (P("x"),), P("x"), SHARD), axes_of(mesh))
        assert (costs.collectives, costs.wire_bytes, costs.flops) == ((), 0, 0)


class TestLoops:
    @every_compiler
    def test_scan_runs_collectives_and_matmuls_once_per_step(self, compiler):
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
    def test_loop_with_unknown_trip_count_counts_once_and_is_reported(self, compiler):
        mesh = mesh_of(compiler, "x")

        def program(t, w):
            return lax.while_loop(lambda c: c[0, 0] < 5, lambda c: jnp.tanh(lax.psum(c @ w, "x")), t)

        arguments = ((128, 256), jnp.float32), ((256, 256), jnp.float32)
        costs = read_module(mapped(mesh, program, (P(), P()), P(), *arguments), axes_of(mesh))
        [found] = costs.collectives
        assert (found.count, costs.unknown_loops) == (1, 1)
        assert costs.flops == 2 * 128 * 256 * 256

    @every_compiler
    def test_branch_that_sends_most_counts(self, compiler):
        mesh = mesh_of(compiler, "x")
        branches = [jnp.tanh, lambda t: lax.psum(t, "x"), lambda t: lax.pmax(lax.psum(t, "x") * t, "x")]

        def program(t, which):
            return lax.switch(which[0], branches, t)

        arguments = ((128, 256), jnp.float32), ((1,), jnp.int32)
        costs = read_module(mapped(mesh, program, (P(), P()), P(), *arguments), axes_of(mesh))
        assert [each.bytes for each in costs.collectives] == [128 * 256 * 4] * 2


class TestCollectivesChosenByTheCompiler:
    @pytest.mark.parametrize("compiler", TPUS)
    @pytest.mark.parametrize("part_of", ["all-gather", "reduce-scatter"])
    def test_windowed_einsum_of_all_gather_or_reduce_scatter_on_tpus(self, compiler, part_of):
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
    def test_data_parallel_training_all_reduces_gradients(self, compiler):
        costs, parameters, _ = self._training_step(compiler, P())
        size = bytes_per_element(compiler, jnp.bfloat16)
        large = [each for each in costs.collectives if each.bytes > 4]
        assert {each.kind for each in large} == {"all-reduce"}
        # XLA:CPU combines the loss with them.
        assert sum(each.bytes for each in large) - parameters * size in (0, 4)
        # Forward, and backward for the weights and for all inputs but the first.
        assert costs.flops == 2 * 512 * 2048 * 2048 * (4 + 4 + 3)

    @every_compiler
    def test_fully_sharded_training_gathers_weights_and_scatters_gradients(self, compiler):
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
    def test_fully_sharded_training_reduce_scatters_gradients_on_gpus(self, compiler):
        costs, parameters, _ = self._training_step(compiler, P("x"))
        [scatter] = [each for each in costs.collectives if each.kind == "reduce-scatter"]
        assert (scatter.bytes, scatter.tensors) == (2 * parameters, 4)

    @pytest.mark.compiler
    @needs_libtpu
    def test_fused_reduce_scatters_and_fragmented_all_gathers_on_tpus(self):
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
    def test_matmul(self, compiler):
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
    def test_einsum(self, compiler, equation, left, right, multiply_adds):
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
    def test_convolution_and_each_gradient_have_the_same_flop(self, options, padding):
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
    def test_convolution_and_gradients_on_gpus(self, compiler):
        mesh = mesh_of(compiler, "x")

        def loss(image, kernel):
            numbers = ("NHWC", "HWIO", "NHWC")
            return jnp.sum(lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=numbers) ** 2)

        arguments = ((4, 16, 20, 8), jnp.float32, P()), ((3, 5, 8, 12), jnp.float32, P())
        costs = read_module(partitioned(mesh, jax.grad(loss, (0, 1)), (P(), P()), *arguments))
        assert costs.flops == 3 * 2 * (4 * 14 * 16 * 12) * (3 * 5 * 8)


class TestMemory:
    @every_compiler
    def test_addition_reads_two_tensors_and_writes_one(self, compiler):
        mesh = mesh_of(compiler, "x")
        arguments = [((1024 * mesh.size, 8192), jnp.float32, P("x"))] * 2
        text = partitioned(mesh, lambda a, b: jnp.tanh(a) + b, P("x"), *arguments)
        assert read_module(text).memory_bytes == 3 * 1024 * 8192 * 4

    @every_compiler
    def test_scan_reads_only_a_slice_of_its_weights_per_step(self, compiler):
        mesh = mesh_of(compiler, "x")
        steps = 50

        def program(c, ws):
            return lax.scan(lambda c, w: (c * w, None), c, ws)[0]

        text = mapped(mesh, program, (P(), P()), P(), ((64, 128), jnp.float32), ((steps, 64, 128), jnp.float32))
        step = 64 * 128 * 4
        # A step reads a slice of the weights and reads and writes the carry; some compilers write the slice first.
        assert steps * step <= read_module(text).memory_bytes <= 6 * steps * step

    @every_compiler
    def test_stacked_outputs_of_a_scan_are_written_once(self, compiler):
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
    def test_memory_traffic_equals_that_of_xla_on_cpu(self, function):
        mesh = mesh_of("cpu", "x")
        arguments = ((1024, 512), jnp.float32, P("x")), ((512, 256), jnp.float32, P())
        program = partitioned_program(mesh, function, P(), *arguments)
        expected = program.cost_analysis()["bytes accessed"]
        assert read_module(program.as_text()).memory_bytes == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("compiler", TPUS)
    def test_values_in_vmem_are_not_traffic(self, compiler):
        mesh = mesh_of(compiler, "x")
        arguments = ((128 * mesh.size, 512), jnp.bfloat16, P("x")), ((512, 256), jnp.bfloat16, P())
        costs = read_module(partitioned(mesh, jnp.matmul, P("x"), *arguments))
        assert costs.memory_bytes == 2 * (128 * 512 + 512 * 256 + 128 * 256)

    @every_compiler
    def test_largest_values_have_shapes_and_op_names(self, compiler):
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


def test_number_of_simulated_devices():
    assert len(devices_of("cpu")) == 8
