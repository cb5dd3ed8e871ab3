import jax
import pytest

import jax_tilekern as jtk
from jax_tilekern.cli import explain, main
from jax_tilekern.cli.product_call import ProductCallError, parse_product
from jax_tilekern.compilation.nvrtc import NvrtcNotFound


@pytest.mark.parametrize(
    ("text", "shapes", "result"),
    [
        ("matmul bf16 40x16x512", ["bfloat16[40,512]", "bfloat16[512,16]"], "bfloat16[40,16]"),
        ("matmul f32 40x16x512 NT", ["float32[40,512]", "float32[16,512]"], "float32[40,16]"),
        ("matmul int8 8x32x16x64 TN", ["int8[8,64,32]", "int8[8,64,16]"], "int32[8,32,16]"),
        ("matmul e4m3 8x9x10 TT", ["float8_e4m3fn[10,8]", "float8_e4m3fn[9,10]"], "bfloat16[8,9]"),
        ("matmul f64 8x8x8", ["float64[8,8]", "float64[8,8]"], "float64[8,8]"),
    ],
)
def test_a_product_has_the_shapes_that_its_text_names(text, shapes, result):
    call = parse_product(text)
    assert [shape(operand) for operand in call.operands] == shapes
    with call.types_enabled():
        assert shape(jax.eval_shape(call.function, *call.operands)) == result


def shape(array):
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


@pytest.mark.parametrize(
    "text",
    ["", "matmul bf16 8x8", "matmul bf16 8x0x8", "matmul bf16 8x8x8 XX", "sum bf16 8x8x8"],
)
def test_malformed_products(text):
    with pytest.raises(ProductCallError, match="is not matmul TYPE MxNxK"):
        parse_product(text)


def test_explains_for_a_named_gpu(capsys):
    # Products need no quotes.
    words = ["matmul", "bf16", "4096x4096x4096", "NT", "matmul int16 8x8x8"]
    assert main(["explain", *words, "--gpu", "sm_90"]) == 0
    printed = capsys.readouterr().out
    call = parse_product("matmul bf16 4096x4096x4096 NT")
    with jtk.gpu_target("sm_90"):
        (choice,) = jtk.explain(call.function, *call.operands)
    assert choice.kernel in printed
    assert "wgmma" in printed
    assert "no kernel for int16" in printed
    assert "\nkernels for 1 of 2 calls" in printed


def test_a_named_gpu_takes_a_compiler(capsys, monkeypatch):
    def none():
        raise NvrtcNotFound("no NVRTC here")

    monkeypatch.setattr(explain, "nvrtc", none)
    assert main(["explain", "matmul", "bf16", "64x64x64", "--gpu", "h100"]) == 2
    assert capsys.readouterr().err == "no NVRTC here\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a product"),
        (["matmul bf16"], "is not matmul"),
        (["matmul f33 8x8x8"], "f33"),
        (["matmul f32 8x8x8", "--gpu", "sm_1"], "sm_1"),
        (["matmul f32 8x8x8", "--precision", "sharp"], "sharp"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err
