"""Compiled programs: the names of kernels, and what they must not contain."""

import functools
import os
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


X_BF16 = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
W_BF16 = jax.ShapeDtypeStruct((128, 96), jnp.bfloat16)
XS = jax.ShapeDtypeStruct((5, 64, 128), jnp.bfloat16)
WS = jax.ShapeDtypeStruct((5, 128, 96), jnp.bfloat16)


def operations(function, *args):
    """Names of the optimised program's instructions, fused ones included."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.findall(r"= \S+ ([a-z-]+)\(", text)


def assert_only_products(function, *args, products):
    names = operations(function, *args)
    assert names.count("custom-call") == products, names
    moved = {"transpose", "copy", "broadcast", "dot", "reshape", "concatenate", "pad"}
    assert not moved & set(names), names


def test_forward():
    assert_only_products(jtk.matmul, X_BF16, W_BF16, products=1)


def test_gradients_move_nothing():
    """Each operand's gradient is one product that reads the other two where they lie."""

    def pullback(x, w, g):
        return jax.vjp(jtk.matmul, x, w)[1](g)

    g = jax.ShapeDtypeStruct((64, 96), jnp.bfloat16)
    assert_only_products(pullback, X_BF16, W_BF16, g, products=2)


def test_gradients_of_every_major_order_move_nothing():
    g = jax.ShapeDtypeStruct((64, 96), jnp.bfloat16)
    for lhs, rhs in ((0, 0), (0, 1), (1, 0), (1, 1)):
        x = X_BF16 if lhs else jax.ShapeDtypeStruct(X_BF16.shape[::-1], X_BF16.dtype)
        w = jax.ShapeDtypeStruct(W_BF16.shape[::-1], W_BF16.dtype) if rhs else W_BF16

        def pullback(x, w, g, dims=(((lhs,), (rhs,)), ((), ()))):
            return jax.vjp(lambda x, w: jtk.dot_general(x, w, dims), x, w)[1](g)

        assert_only_products(pullback, x, w, g, products=2)


def test_transposed_operands_are_read_where_they_lie():
    assert_only_products(lambda x, w: jtk.matmul(w.T, x.T), X_BF16, W_BF16, products=1)
    assert_only_products(lambda x: jtk.matmul(x, x.T), X_BF16, products=1)
    assert_only_products(lambda x: jtk.matmul(jnp.swapaxes(x, 1, 2), x), XS, products=1)


def test_transposes_of_transposes_are_read_where_they_lie():
    """A kernel that read the inner transpose would need it in memory."""
    assert_only_products(lambda x, w: jtk.matmul(x.T.T, w.T.T), X_BF16, W_BF16, products=1)

    def permuted_twice(x):
        x = jnp.transpose(jnp.transpose(x, (1, 2, 0)), (2, 1, 0))  # (0, 2, 1) in all
        return jtk.matmul(x, jnp.swapaxes(x, 1, 2))

    assert_only_products(permuted_twice, XS, products=1)


@pytest.mark.parametrize(
    ("axes", "args"), [((0, None), (XS, W_BF16)), ((None, 0), (X_BF16, WS)), ((0, 0), (XS, WS))]
)
def test_vmap_is_one_call(axes, args):
    """The operand without the mapped axis is not materialised."""
    assert_only_products(jax.vmap(jtk.matmul, axes), *args, products=1)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_over_any_axis_moves_nothing(axis):
    shape = (64, 128)
    x = jax.ShapeDtypeStruct((*shape[:axis], 5, *shape[axis:]), jnp.float32)
    w = jax.ShapeDtypeStruct((128, 96), jnp.float32)
    function = jax.vmap(jtk.matmul, (axis, None))
    # A batch dimension that is innermost has no unit stride for a GPU kernel to read.
    if axis < 2 or jax.default_backend() == "cpu":
        assert_only_products(function, x, w, products=1)


def test_vmapped_matvec_is_a_matmul():
    vectors = jax.ShapeDtypeStruct((5, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((96, 128), jnp.bfloat16)
    function = jax.vmap(jtk.matmul, (None, 0))
    assert_only_products(function, w, vectors, products=1)


def test_per_example_gradients_are_one_call():
    def example(w, x):
        return jtk.matmul(x, w).sum()

    names = operations(jax.vmap(jax.grad(example), (None, 0)), W_BF16, XS)
    assert names.count("custom-call") == 1
    assert "transpose" not in names


def test_outer_products_are_fused_into_what_uses_them():
    """The per-example gradients of a vector input, of which only the norms are wanted."""

    def norm(w, x):
        return (jax.grad(lambda w: jtk.matmul(x, w).sum())(w) ** 2).sum()

    text = jax.jit(jax.vmap(norm, (None, 0))).lower(W_BF16, X_BF16).compile().as_text()
    assert "64,128,96" not in text.split("ENTRY")[1], "the gradients themselves were written"


def test_source_lines_are_the_users():
    """As with JAX's own functions, no frame of the package is in a program's locations."""

    def model(x, w):
        return jtk.einsum("ij,jk->ik", jtk.matmul(x, w), w.mT) + jtk.sum(x)

    text = jax.jit(model).lower(X_BF16, W_BF16).as_text(debug_info=True)
    assert __file__ in text
    assert f"{os.sep}jax_tilekern{os.sep}" not in text
