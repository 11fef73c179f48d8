"""FLOP and memory traffic of single instructions."""

import pytest
from support.hlo_text import module_of, read_module


class TestFlopOfLibraryCalls:
    LEFT, RIGHT = "%a = bf16[4,128,256]{2,1,0} parameter(0)", "%b = bf16[4,256,512]{2,1,0} parameter(1)"

    @pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
    def test_cublas_matmuls(self, target):
        costs = read_module(
            module_of(
                self.LEFT,
                self.RIGHT,
                f'%c = (f32[4,128,512]{{2,1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), custom_call_target="{target}", '
                'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
                '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}',
                "ROOT %d = f32[4,128,512]{2,1,0} get-tuple-element(%c), index=0",
            )
        )
        assert dict(costs.flops_by_dtype) == {"bf16": 2 * 4 * 128 * 256 * 512}
        assert costs.opaque_calls == ()
        assert costs.memory_bytes == 4 * (2 * 128 * 256 + 2 * 256 * 512 + 4 * 128 * 512)  # without the scratch space

    @pytest.mark.parametrize(("left", "transposed"), [("f32[128,256]", "false"), ("f32[256,128]", "true")])
    def test_onednn_matmuls(self, left, transposed):
        costs = read_module(
            module_of(
                f"%a = {left}{{1,0}} parameter(0)",
                "%b = f32[256,512]{1,0} parameter(1)",
                'ROOT %c = f32[128,512]{1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul", '
                f'backend_config={{"onednn_matmul_config":{{"transpose_a":{transposed}}}}}',
            )
        )
        assert costs.flops == 2 * 128 * 256 * 512

    @pytest.mark.parametrize(
        ("target", "operands", "result"),
        [
            ("__cudnn$convForward", ("f32[2,16,16,8]", "f32[32,3,3,8]"), "f32[2,14,14,32]"),
            ("__cudnn$convBackwardInput", ("f32[2,14,14,32]", "f32[32,3,3,8]"), "f32[2,16,16,8]"),
            ("__cudnn$convBackwardFilter", ("f32[2,16,16,8]", "f32[2,14,14,32]"), "f32[32,3,3,8]"),
            ("__cudnn$convBiasActivationForward", ("f32[2,16,16,8]", "f32[32,3,3,8]"), "f32[2,14,14,32]"),
        ],
    )
    def test_cudnn_convolutions_and_their_gradients(self, target, operands, result):
        costs = read_module(
            module_of(
                f"%a = {operands[0]}{{3,2,1,0}} parameter(0)",
                f"%b = {operands[1]}{{3,2,1,0}} parameter(1)",
                f"ROOT %c = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3}}, "
                f'dim_labels=b01f_o01i->b01f, custom_call_target="{target}"',
            )
        )
        assert costs.flops == 2 * (2 * 14 * 14 * 32) * (3 * 3 * 8)

    def test_dot_as_a_dilated_convolution(self):
        costs = read_module(
            module_of(
                "%a = f32[8,128,256]{2,1,0} parameter(0)",
                "%b = f32[8,256,512]{2,1,0} parameter(1)",
                "ROOT %c = f32[8,128,512]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, "
                "dim_labels=0bf_0io->0bf",
            )
        )
        assert costs.flops == 2 * 8 * 128 * 256 * 512

    @pytest.mark.parametrize("stride", [1, 2, 3, 4])
    @pytest.mark.parametrize("dilation", [1, 2, 4, 6])
    @pytest.mark.parametrize("pad", [-1, 0, 3])
    def test_convolution_counts_only_elements_of_the_image(self, stride, dilation, pad):
        image, kernel, kernel_dilation = 7, 4, 3
        spread = (image - 1) * dilation + 1 + 2 * pad - ((kernel - 1) * kernel_dilation + 1)
        result = spread // stride + 1 if spread >= 0 else 0
        met = sum(
            (place := out * stride + tap * kernel_dilation - pad) % dilation == 0
            and 0 <= place <= (image - 1) * dilation
            for out in range(result)
            for tap in range(kernel)
        )
        costs = read_module(
            module_of(
                f"%a = f32[2,{image},8]{{2,1,0}} parameter(0)",
                f"%b = f32[{kernel},8,5]{{2,1,0}} parameter(1)",
                f"ROOT %c = f32[2,{result},5]{{2,1,0}} convolution(%a, %b), window={{size={kernel} stride={stride} "
                f"pad={pad}_{pad} lhs_dilate={dilation} rhs_dilate={kernel_dilation}}}, dim_labels=b0f_0io->b0f",
            )
        )
        assert costs.flops == 2 * (2 * 8 * 5) * met

    def test_pallas_kernel_with_a_cost_estimate(self):
        call = 'ROOT %c = bf16[4,128,512]{2,1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call"'
        config = (
            ", backend_config="
            '{"custom_call_config":{"body":"TUw=","cost_estimate":{"flops":"1000","bytes_accessed":"8"}}}'
        )
        costs = read_module(module_of(self.LEFT, self.RIGHT, call + config))
        assert (costs.flops, costs.opaque_calls) == (1000, ())

    def test_pallas_kernel_without_a_cost_estimate_is_reported(self):
        call = 'ROOT %c = bf16[4,128,512]{2,1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call"'
        costs = read_module(module_of(self.LEFT, self.RIGHT, call))
        assert (costs.flops, costs.opaque_calls) == (0, ("tpu_custom_call",))


class TestMemoryOfInstructions:
    def test_a_slice_that_is_converted_is_read_in_its_own_dtype(self):
        fused = """%fused (w: f32[64,8,128], i: s32[]) -> bf16[1,8,128] {
  %w = f32[64,8,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %s = bf16[1,8,128]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,8,128}
}"""
        weights, index = "%w = f32[64,8,128]{2,1,0} parameter(0)", "%i = s32[] parameter(1)"
        call = "ROOT %y = bf16[1,8,128]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%fused"
        costs = read_module(module_of(weights, index, call, computations=fused))
        assert costs.memory_bytes == (4 + 2) * 8 * 128 + 4  # and the index

    @pytest.mark.parametrize(("num_rows", "num_experts"), [("8.0", 8), ("100.0", 64)])
    def test_a_grouped_product_reads_the_weights_of_an_expert_for_each_row_at_most(self, num_rows, num_experts):
        scope = f"jit(step)/moe/grouped_product{num_rows}/pallas_call"
        call = 'ROOT %y = bf16[128,32]{1,0} custom-call(%n, %x, %w), custom_call_target="tpu_custom_call"'
        estimate = '{"custom_call_config":{"body":"TUw=","cost_estimate":{"flops":"131072","bytes_accessed":"8"}}}'
        costs = read_module(
            module_of(
                "%n = s32[64]{0} parameter(0)",
                "%x = bf16[128,16]{1,0} parameter(1)",
                "%w = bf16[64,16,32]{2,1,0} parameter(2)",
                f'{call}, metadata={{op_name="{scope}"}}, backend_config={estimate}',
            )
        )
        assert costs.memory_bytes == 4 * 64 + 2 * (128 * (16 + 32) + num_experts * 16 * 32)
        assert costs.flops == 2 * float(num_rows) * 16 * 32

    def test_copies_between_vmem_and_memory_count_once(self):
        costs = read_module(
            module_of(
                "%x = f32[1024]{0:T(1024)} parameter(0)",
                "%s = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%x)",
                "%v = f32[1024]{0:T(1024)S(1)} copy-done(%s)",
                "%w = f32[1024]{0:T(1024)S(1)} add(%v, %v)",
                "ROOT %y = f32[1024]{0:T(1024)} copy(%w)",
            )
        )
        assert costs.memory_bytes == 2 * 4096

    def test_gather_reads_only_its_rows(self):
        costs = read_module(
            module_of(
                "%table = f32[50000,64]{1,0} parameter(0)",
                "%ids = s32[16,1]{1,0} parameter(1)",
                "ROOT %rows = f32[16,64]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,64}",
            )
        )
        assert costs.memory_bytes == 2 * 16 * 64 * 4 + 16 * 4

    def test_in_place_update_writes_only_the_update(self):
        costs = read_module(
            module_of(
                "%array = f32[50000,64]{1,0} parameter(0)",
                "%row = f32[1,64]{1,0} parameter(1)",
                "%i = s32[] constant(3)",
                "ROOT %new = f32[50000,64]{1,0} dynamic-update-slice(%array, %row, %i, %i)",
            )
        )
        assert costs.memory_bytes == 2 * 64 * 4 + 2 * 4

    def test_scatter_reads_and_writes_only_its_rows(self):
        costs = read_module(
            module_of(
                "%table = f32[50000,64]{1,0} parameter(0)",
                "%ids = s32[16,1]{1,0} parameter(1)",
                "%rows = f32[16,64]{1,0} parameter(2)",
                "ROOT %new = f32[50000,64]{1,0} scatter(%table, %ids, %rows), update_window_dims={1}, to_apply=%add",
            )
        )
        assert costs.memory_bytes == 2 * 16 * 64 * 4 + 16 * 4

    def test_values_passed_through_a_fusion_are_not_traffic(self):
        fused = (
            "%fused (p: f32[256], q: f32[256]) -> (f32[256], f32[256]) {\n"
            "  %p = f32[256]{0} parameter(0)\n  %q = f32[256]{0} parameter(1)\n  %n = f32[256]{0} negate(%q)\n"
            "  ROOT %t = (f32[256]{0}, f32[256]{0}) tuple(%p, %n)\n}\n"
        )
        costs = read_module(
            module_of(
                "%x = f32[256]{0} parameter(0)",
                "%y = f32[256]{0} parameter(1)",
                "ROOT %f = (f32[256]{0}, f32[256]{0}) fusion(%x, %y), kind=kLoop, calls=%fused",
                computations=fused,
            )
        )
        assert costs.memory_bytes == 2 * 1024

    def test_results_parameters_and_updates_are_not_large_values(self):
        costs = read_module(
            module_of(
                "%x = f32[1024,1024]{1,0} parameter(0)",
                '%y = f32[1024,512]{1,0} slice(%x), slice={[0:1024], [0:512]}, metadata={op_name="jit(f)/slice"}',
                "%z = f32[512]{0} parameter(1)",
                "%i = s32[] constant(3)",
                "%w = f32[1024,512]{1,0} dynamic-update-slice(%y, %z, %i, %i)",
                "%v = f32[1024,512]{1,0} bitcast(%w)",
                "%o = f32[1024,1024]{1,0} concatenate(%v, %v), dimensions={1}",
                "ROOT %t = (f32[1024,1024]{1,0}) tuple(%o)",
            )
        )
        [value] = costs.largest_values
        assert (value.bytes, value.shape, value.op_name, value.name) == (2**21, "f32[1024,512]", "jit(f)/slice", "y")


def test_asynchronous_fusion_costs_as_much_as_a_fusion():
    text = """HloModule m, num_partitions=8

%fused (p0: f32[50,64,128], p1: s32[], p2: f32[8,64]) -> f32[50,64,128] {
  %p0 = f32[50,64,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8,64]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %w = f32[64,128]{1,0} constant({...})
  %dot = f32[8,128]{1,0} dot(%p2, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %b = f32[1,8,128]{2,1,0} bitcast(%dot)
  ROOT %u = f32[50,64,128]{2,1,0} dynamic-update-slice(%p0, %b, %p1, %zero, %zero)
}

ENTRY %main (a: f32[50,64,128], i: s32[], x: f32[8,64]) -> f32[50,64,128] {
  %a = f32[50,64,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[8,64]{1,0} parameter(2)
  %s = ((f32[50,64,128]{2,1,0}, s32[]), f32[50,64,128]{2,1,0}, u32[]) fusion-start(%a, %i, %x), calls=%fused
  ROOT %d = f32[50,64,128]{2,1,0} fusion-done(%s)
}
"""
    costs = read_module(text)
    assert costs.flops == 2 * 8 * 64 * 128
    assert costs.memory_bytes == 4 + 8 * 64 * 4 + 8 * 128 * 4  # the index, x, and the update that is written
