import jax
import jax.numpy as jnp
import pytest

import jax_tilekern as jtk


def test_lists_each_call_with_its_kernel():
    x, w = jnp.ones((64, 128)), jnp.ones((128, 32))
    choices = jtk.explain(jax.grad(lambda w, x: (jtk.matmul(x, w) ** 2).sum()), w, x)
    assert [choice.call for choice in choices] == ["mk,kn->mn", "km,kn->mn"]
    assert choices[0].operands == ("f32[64,128]", "f32[128,32]")
    assert choices[0].result == "f32[64,32]"
    assert all(choice.kernel for choice in choices)


def test_prints_a_line_a_call():
    x = jnp.ones((8, 8))
    text = str(jtk.explain(lambda x: jtk.matmul(jtk.matmul(x, x), x.astype(jnp.int16)), x))
    assert len(text.splitlines()) == 2
    assert "f32[8,8]" in text
    assert str(jtk.explain(lambda x: x + 1, x)) == "no call of jax_tilekern"


def test_parts_of_a_call_are_below_it():
    x = jnp.ones((64, 64))
    product, other = jtk.explain(
        lambda x: jtk.matmul(jtk.matmul(x, x, epilogue=jax.nn.gelu), x), x, platform="cpu"
    )[1:]
    assert (product.depth, other.depth) == (1, 0)
    text = str(jtk.explain(lambda x: jtk.matmul(x, x, epilogue=jax.nn.gelu), x, platform="cpu"))
    call, part = text.splitlines()
    assert call.startswith("contract mk,kn->mn, gelu")
    assert part.startswith("  mk,kn->mn  f32[64,64]")


def test_says_why_a_cpu_kernel_takes_a_call():
    x = jnp.ones((512, 512))
    reasons = [
        jtk.explain(function, *args, platform="cpu")[0].reason
        for function, *args in (
            (jtk.matmul, x, x),
            (jtk.matmul, x, x[:, 0]),
            (jtk.matmul, x[0], x[0]),
            (jtk.transpose, x),
            (jtk.sum, x),
        )
    ]
    starts = [
        "large or narrow operands are packed for the caches first; computes in float32",
        "a product with a vector reads the matrix once, as it lies; computes in float32",
        "a dot product reads both vectors once, as they lie; computes in float32",
        "sizes (512, 512) in the order (1, 0)",
        "sizes (262144,)",
    ]
    for reason, start in zip(reasons, starts, strict=True):
        assert reason.startswith(start)


def test_says_why_xla_takes_a_call():
    x = jnp.ones((8, 8), jnp.int16)
    (choice,) = jtk.explain(jtk.matmul, x, x)
    assert choice.kernel is None
    assert choice.reason == "no kernel for int16 x int16 -> int16 at precision DEFAULT"
    (choice,) = jtk.explain(jtk.matmul, jnp.ones((0, 3)), jnp.ones((3, 4)))
    assert choice.reason == "an operand is empty, so there is nothing to compute"
    (choice,) = jtk.explain(jtk.matmul, jnp.ones((5, 1)), jnp.ones((1, 4)))
    assert choice.kernel is None
    assert choice.reason.startswith("nothing is contracted")


def test_an_array_in_place_of_the_function_is_refused():
    x = jnp.ones((4, 4))
    with pytest.raises(TypeError, match=r"as in explain\(matmul, a, b\), got ArrayImpl"):
        jtk.explain(jtk.matmul(x, x))


def test_needs_no_execution_and_no_arrays():
    big = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.bfloat16)
    assert len(jtk.explain(jtk.matmul, big, big, platform="cpu")) == 1


def test_repeated_explanations_agree():
    x = jnp.ones((16, 16))
    function = jax.jit(lambda x: jtk.matmul(x, x))
    function(x)
    assert jtk.explain(function, x) == jtk.explain(function, x)
    assert len(jtk.explain(function, x)) == 1


def test_for_a_gpu_that_is_not_here():
    x = jnp.ones((512, 512), jnp.bfloat16)
    for arch in ("sm_80", "sm_90", "sm_120"):
        with jtk.gpu_target(arch):
            (choice,) = jtk.explain(jtk.matmul, x, x, platform="gpu")
        assert choice.platform == "cuda"
        assert choice.kernel


def test_without_any_gpu_falls_back(monkeypatch):
    from jax_tilekern.ops import planned_kernel
    from jax_tilekern.plans.gpu import NoGpu

    def none():
        raise NoGpu("no NVIDIA driver on this machine")

    monkeypatch.setattr(planned_kernel, "current_gpu", none)
    x = jnp.ones((64, 64))
    (choice,) = jtk.explain(jtk.matmul, x, x, platform="cuda")
    assert choice.kernel is None
    assert choice.reason == "no NVIDIA driver on this machine"
