"""What a program holds of kernels: each once, whole, and under names that a person can read."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jax_tilekern as jtk
from jax_tilekern.interop.gpu_target import gpu_target

W = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)


def deep(x, w):
    for _ in range(6):
        x = jnp.tanh(jtk.matmul(x, w))
    return x


def lowered_for_cuda(function, *args):
    with gpu_target("sm_90"):
        return (
            jax.jit(lambda *args: function(*args)).trace(*args).lower(lowering_platforms=("cuda",))
        )


def cubins(text):
    """Every cubin of a program, which MLIR prints as hexadecimal digits."""
    return [bytes.fromhex(digits) for digits in re.findall(r'dense<"0x(7F454C46[^"]*)">', text)]


def test_a_kernel_is_in_a_program_once():
    text = lowered_for_cuda(deep, W, W).as_text()
    assert text.count("stablehlo.custom_call") == 1
    assert len(re.findall(r"call @small_matmul\w+\(", text)) == 6
    assert len(cubins(text)) == 1


def test_a_kernel_is_in_a_loop_once():
    def loops(x, w):
        def body(x, _):
            return deep(x, w), None

        return jax.lax.cond(x[0, 0] > 0, deep, lambda x, w: jax.lax.scan(body, x, None, 3)[0], x, w)

    assert lowered_for_cuda(loops, W, W).as_text().count("stablehlo.custom_call") == 1


def test_calls_that_differ_are_apart():
    def both(x, w):
        return jtk.matmul(x, w), jtk.matmul(x, w, preferred_element_type=jnp.float32)

    assert lowered_for_cuda(both, W, W).as_text().count("stablehlo.custom_call") == 2


def model(matmul):
    """Return the loss of a transformer's layers, whose products are those of ``matmul``."""

    def normed(x):
        return (x * jax.lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True))).astype(
            x.dtype
        )

    def layer(x, weights):
        query, key, value, out, wide, narrow = weights
        heads = (
            matmul(normed(x), w).reshape(*x.shape[:2], 8, -1).transpose(0, 2, 1, 3)
            for w in (query, key, value)
        )
        q, k, v = heads
        scores = jax.nn.softmax(matmul(q, k.mT).astype(jnp.float32)).astype(x.dtype)
        x = x + matmul(matmul(scores, v).transpose(0, 2, 1, 3).reshape(x.shape), out)
        return x + matmul(jax.nn.gelu(matmul(normed(x), wide)), narrow)

    return lambda weights, x: functools.reduce(layer, weights, x).astype(jnp.float32).sum()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.one_in(2)
def test_a_model_besides_its_cubins_is_at_most_half_as_large_again_as_jaxs(gradients):
    def hlo_bytes(matmul):
        # A function of its own, of which JAX has kept nothing.
        loss = model(matmul)
        lowered = lowered_for_cuda(jax.grad(loss) if gradients else loss, layers, x)
        digits = sum(2 * len(cubin) for cubin in cubins(lowered.as_text()))
        return len(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()) - digits

    shapes = [*[(1024, 1024)] * 4, (1024, 4096), (4096, 1024)]
    layers = [[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]] * 32
    x = jax.ShapeDtypeStruct((4, 512, 1024), jnp.bfloat16)
    assert hlo_bytes(jtk.matmul) < 1.5 * hlo_bytes(jnp.matmul)


def test_an_exported_program_has_its_cubins():
    """So that it needs no NVRTC and no cache where it runs."""
    with gpu_target("sm_90"):
        exported = export.export(
            jax.jit(deep), platforms=["cuda"], disabled_checks=jtk.export_checks()
        )(W, W)
    again = export.deserialize(exported.serialize())
    (cubin,) = cubins(again.mlir_module())
    assert cubin[:4] == b"\x7fELF"

    def twice(x, w):
        return again.call(again.call(x, w), w)

    text = lowered_for_cuda(twice, W, W).as_text()
    assert {cubin} == set(cubins(text))


def test_names_say_which_kernel_and_where():
    def model(x, w):
        with jax.named_scope("attention"):
            x = jtk.matmul(x, w)
        with jax.named_scope("perceptron"):
            return jtk.matmul(jnp.tanh(x), w)

    x = jax.ShapeDtypeStruct((24, 24), jnp.float32)
    text = jax.jit(model).trace(x, x).lower(lowering_platforms=("cpu",)).as_text("hlo")
    assert len(re.findall(r"cpu_matmul\S* = \S+ custom-call\(", text)) == 1
    if jax.default_backend() == "cpu":
        text = jax.jit(model).lower(x, x).compile().as_text()
        names = re.findall(r'custom-call.*op_name="([^"]*)"', text)
        assert [name.split("/")[1] for name in names] == ["attention", "perceptron"]
        assert all("tilekern_contract" in name for name in names)
