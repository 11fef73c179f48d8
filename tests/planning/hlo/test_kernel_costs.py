"""FLOP and workspace of kernels that the compiler only calls."""

import pytest
from support.hlo_text import read_module

from keras_dist.planning.hlo.kernel_costs import workspace_bytes
from keras_dist.planning.hlo.parser import parse_module

B, N, T, H = 2, 4, 256, 64
PAIRS = B * N * T * T
# ruff: noqa: E501 (lines of HLO)
SPLASH = """HloModule jit_step

ENTRY %main (m: s8[1,2,2], q: bf16[2,4,256,64], k: bf16[2,2,256,64], v: bf16[2,2,256,64]) -> f32[2,4,256] {{
  %m = s8[1,2,2]{{2,1,0}} parameter(0)
  %q = bf16[2,4,256,64]{{3,2,1,0}} parameter(1)
  %k = bf16[2,2,256,64]{{3,2,1,0}} parameter(2)
  %v = bf16[2,2,256,64]{{3,2,1,0}} parameter(3)
  ROOT %{name}.1 = f32[2,4,256]{{2,1,0}} custom-call(%m, %q, %k, %v), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 512}}"
}}}}, metadata={{op_name="jit(step)/{scope}/pallas_call"}}, backend_config={{}}
}}"""
CUDNN = """HloModule jit_step

ENTRY %main (q: bf16[2,256,4,64], k: bf16[2,256,2,64], v: bf16[2,256,2,64]) -> bf16[2,256,4,64] {{
  %q = bf16[2,256,4,64]{{3,2,1,0}} parameter(0)
  %k = bf16[2,256,2,64]{{3,2,1,0}} parameter(1)
  %v = bf16[2,256,2,64]{{3,2,1,0}} parameter(2)
  %call = (bf16[2,256,4,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %v), custom_call_target="{target}", metadata={{op_name="jit(step)/{scope}/dot_product_attention"}}
  ROOT %y = bf16[2,256,4,64]{{3,2,1,0}} get-tuple-element(%call), index=0
}}"""


@pytest.mark.parametrize(
    ("name", "matmuls"),
    [("splash_mha_fwd_residuals", 2), ("splash_mha_dq_no_residuals", 3), ("splash_mha_dkv_segmented", 4)],
)
@pytest.mark.parametrize(("scope", "fraction"), [("attention_of_0.500000", 0.5), ("mine", 1.0)])
def test_splash_attention(name, matmuls, scope, fraction):
    costs = read_module(SPLASH.format(name=name, scope=scope))
    assert costs.flops_by_dtype == {"bf16": 2 * fraction * matmuls * PAIRS * H}
    assert (costs.closed_forms, costs.opaque_calls, costs.workspace_bytes) == (("tpu_custom_call",), (), 0)


@pytest.mark.parametrize(("target", "matmuls"), [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)])
def test_attention_of_cudnn(target, matmuls):
    costs = read_module(CUDNN.format(target=target, scope="attention_of_0.250000"))
    assert costs.flops == 2 * 0.25 * matmuls * PAIRS * H
    assert (costs.closed_forms, costs.opaque_calls) == ((target,), ())


def test_workspace_of_cudnn_is_of_the_backward_pass():
    forward = read_module(CUDNN.format(target="__cudnn$fmhaSoftmax", scope=""))
    backward = read_module(CUDNN.format(target="__cudnn$fmhaSoftmaxBackward", scope=""))
    gradients_of_queries, sums, gradients_of_keys_and_values = 4 * B * N * T * H, 4 * B * N * T, 2 * 2 * B * N * T * H
    assert forward.workspace_bytes == 0
    assert backward.workspace_bytes == gradients_of_queries + sums + gradients_of_keys_and_values


def test_a_branch_with_a_kernel_counts():
    text = """HloModule jit_step

%kernel (q: bf16[2,256,4,64]) -> bf16[2,256,4,64] {
  %q = bf16[2,256,4,64]{3,2,1,0} parameter(0)
  %call = (bf16[2,256,4,64]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %y = bf16[2,256,4,64]{3,2,1,0} get-tuple-element(%call), index=0
}

%other (p: bf16[2,256,4,64]) -> bf16[2,256,4,64] {
  %p = bf16[2,256,4,64]{3,2,1,0} parameter(0)
  %m = bf16[512,256]{1,0} bitcast(%p)
  %big = f32[512,512]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %huge = f32[512,512]{1,0} dot(%big, %big), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %copy = bf16[2,256,4,64]{3,2,1,0} copy(%p)
}

ENTRY %main (c: pred[], x: bf16[2,256,4,64]) -> bf16[2,256,4,64] {
  %c = pred[] parameter(0)
  %x = bf16[2,256,4,64]{3,2,1,0} parameter(1)
  ROOT %result = bf16[2,256,4,64]{3,2,1,0} conditional(%c, %x, %x), branch_computations={%other, %kernel}
}"""
    assert read_module(text).flops == 2 * 2 * PAIRS * H


@pytest.mark.parametrize(
    ("operands", "target", "passes"),
    [("%x, %h, %h", "cudnn_rnn_ffi", 1), ("%y, %h, %h, %x, %h, %h", "cudnn_rnn_bwd_ffi", 2)],
)
def test_lstm_of_cudnn(operands, target, passes):
    text = f"""HloModule jit_step

ENTRY %main (x: f32[8,64,32], h: f32[2,8,128], y: f32[8,64,256]) -> f32[8,64,256] {{
  %x = f32[8,64,32]{{2,1,0}} parameter(0)
  %h = f32[2,8,128]{{2,1,0}} parameter(1)
  %y = f32[8,64,256]{{2,1,0}} parameter(2)
  ROOT %out = f32[8,64,256]{{2,1,0}} custom-call({operands}), custom_call_target="{target}"
}}"""
    costs = read_module(text)
    assert costs.flops == passes * 2 * 8 * 64 * 2 * 4 * 128 * (32 + 128)
    assert costs.closed_forms == (target,)


def test_lines_within_an_instruction_belong_to_it():
    text = SPLASH.format(name="splash_mha_fwd", scope="attention_of_0.500000")
    module = parse_module(text)
    instruction = module.computations[module.entry].instructions["splash_mha_fwd.1"]
    assert module.computations[module.entry].root == "splash_mha_fwd.1"
    assert instruction.op_name == "jit(step)/attention_of_0.500000/pallas_call"
    assert workspace_bytes(module.computations[module.entry], instruction) == 0
