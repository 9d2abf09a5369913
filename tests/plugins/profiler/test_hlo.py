"""FLOPs and layers, read from the text of optimized programs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fulgurite_profiler.hlo import HLOProgram, parse_layer_path, parse_program


def compile_and_parse(function: Any, *arguments: Any) -> HLOProgram:
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return parse_program(text)


def count_all(program: HLOProgram, module: str) -> float:
    """Return the FLOPs of the instructions of the entry computation."""
    assert program.name == module
    *_, entry = program.computations.values()
    return sum(program.count_flops(name) for name in entry)


def multiply(a: Any, b: Any) -> Any:
    return jnp.tanh(a @ b) + 1


def convolve(images: Any, kernel: Any) -> Any:
    return jax.lax.conv(images, kernel, (1, 1), "SAME")


def test_products_and_convolutions_count_in_fusions_too() -> None:
    program = compile_and_parse(multiply, jnp.ones((8, 16)), jnp.ones((16, 32)))
    assert count_all(program, "jit_multiply") == 2 * 8 * 16 * 32
    program = compile_and_parse(multiply, jnp.ones((4, 8, 16)), jnp.ones((4, 16, 32)))
    assert count_all(program, "jit_multiply") == 4 * 2 * 8 * 16 * 32
    program = compile_and_parse(convolve, jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3)))
    assert count_all(program, "jit_convolve") == 2 * (2 * 5 * 8 * 8) * 27


GPU = """\
HloModule jit_step, is_scheduled=true

%gemm_fusion (p0: bf16[64,128], p1: bf16[128,32]) -> f32[64,32] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %p1 = bf16[128,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[64,128], b: f32[128,32], i: f32[8,32,32,3], k: f32[3,3,3,16]) -> f32[64,32] {
  %a = f32[64,128]{1,0} parameter(0)
  %b = f32[128,32]{1,0} parameter(1)
  %i = f32[8,32,32,3]{3,2,1,0} parameter(2)
  %k = f32[3,3,3,16]{3,2,1,0} parameter(3)
  %custom-call.1 = (f32[64,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/jvp(head)/dot_general"}, \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %conv.1 = (f32[8,32,32,16]{3,2,1,0}, u8[0]{0}) custom-call(%i, %k), \
window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, \
custom_call_target="__cudnn$convForward"
  ROOT %gemm_fusion.2 = f32[64,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_fusion
}
"""


def test_calls_of_libraries_on_gpus_count() -> None:
    program = parse_program(GPU)
    assert program.count_flops("custom-call.1") == 2 * 64 * 128 * 32
    assert program.count_flops("gemm_fusion.2") == 2 * 64 * 128 * 32
    assert program.count_flops("conv.1") == 2 * (8 * 32 * 32 * 16) * 27
    assert program.count_flops("a") == 0 and program.count_flops("unknown") == 0
    assert program.instructions["custom-call.1"].op_name == "jit(step)/jvp(head)/dot_general"


@pytest.mark.parametrize("text", ["", "HloModule", "HloModule x\n  %a = (\n  b\n %c = f32[2] dot"])
def test_text_of_another_form_has_nothing_in_it(text: str) -> None:
    assert not parse_program(text).instructions


@pytest.mark.parametrize(
    ("op_name", "layer"),
    [
        ("jit(_run)/while/body/jit(_trace)/jvp(features)/vmap(MLP)/Linear/dot_general", "features/MLP/Linear"),
        ("jit(_run)/transpose(jvp(features))/vmap(MLP)/dot_general", "features/MLP (backward)"),
        ("jit(f)/transpose(jvp())/checkpoint/rematted_computation/block/tanh", "block (backward)"),
        ("jit(f)/jvp(encoder/layer_3)/cond/branch_1_fun/add", "encoder/layer_3"),
        ("jit(f)/transpose(jvp(vmap(head)))/mul", "head (backward)"),
        ("jit(f)/add", "-"),
        ("", "-"),
    ],
)  # fmt: skip
def test_layer_of_an_operation_is_its_scopes(op_name: str, layer: str) -> None:
    assert str(parse_layer_path(op_name)) == layer
