"""Operations with their GPU kernels, emulated: values and gradients without a GPU."""

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from jax import lax

import jax_tilekern as jtk

pytestmark = pytest.mark.skipif(emulated_plans.COMPILER is None, reason="there is no g++")

SIZES = np.array([37, 0, 91, 72], np.int32)
IDS = np.arange(600, dtype=np.int32) * 7 % 50
BF16, F32 = jnp.bfloat16, jnp.float32


def regular(x):
    return x + x.shape[-1] ** 0.5 * jnp.eye(x.shape[-1], dtype=x.dtype)


def definite(x):
    return x @ x.mT + jnp.eye(x.shape[-1], dtype=x.dtype)


def layer_by_experts(x, up, down, gate, logits):
    """Every expert computes every token."""
    top, indices = lax.top_k(logits, 2)
    weights = jnp.zeros(logits.shape).at[jnp.arange(len(x))[:, None], indices].set(
        jax.nn.softmax(top, -1)
    )  # fmt: skip
    hidden = jax.nn.silu(jnp.einsum("td,edi->tei", x, gate)) * jnp.einsum("td,edi->tei", x, up)
    return jnp.einsum("tei,eid,te->td", hidden, down, weights)


def layer(x, up, down, gate, logits):
    routing = jtk.route(logits, 2)
    return jtk.moe(x, up, down, routing, w_gate=gate)


def reduced(name):
    return tuple(lambda x, m=module: getattr(m, name)(x, IDS, 50) for module in (jtk, jax.ops))


# What is computed, the same by JAX, shapes, their type, and names of plans that run.
OPERATIONS = {
    "linear": (
        lambda x, w, b: jtk.linear(x, w, b, jax.nn.gelu),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        [(264, 128), (128, 256), (256,)], BF16, ["wgmma_matmul bf16"],
    ),
    "gated_linear": (
        jtk.gated_linear,
        lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up),
        [(264, 128), (128, 256), (128, 256)], BF16, ["wgmma_matmul bf16"],
    ),
    "ragged_dot": (
        lambda x, w: jtk.ragged_dot(x, w, SIZES),
        lambda x, w: lax.ragged_dot(x, w, SIZES),
        [(200, 136), (4, 136, 264)], BF16, ["ragged_wgmma_matmul bf16"],
    ),
    "moe": (
        layer, layer_by_experts,
        [(96, 64), (4, 64, 128), (4, 128, 64), (4, 64, 128), (96, 4)], BF16,
        ["combine rows of bfloat16", "ragged_wgmma_matmul bf16", "spread rows of bfloat16"],
    ),
    "matvec": (
        jtk.matvec, jnp.matvec, [(300, 257), (257,)], F32, ["vector_product tf32"],
    ),
    "transpose": (
        lambda x: jtk.transpose(x, (1, 2, 0)), lambda x: jnp.transpose(x, (1, 2, 0)),
        [(33, 70, 96)], F32, ["transpose"],
    ),
    "add": (jtk.add, jnp.add, [(70, 96), (70, 96)], F32, ["add float32"]),
    "segment_sum": (
        *reduced("segment_sum"), [(600, 96)], F32, ["segment_sum float32, few edges"],
    ),
    "segment_max": (
        *reduced("segment_max"), [(600, 33)], F32, ["segment_max float32, few edges"],
    ),
    "segment_reduce": (
        lambda x, w: jtk.segment_reduce(
            jnp.multiply, x, w, segment_ids=IDS, num_segments=50, gather=(IDS % 50 - 25, None)
        ),
        lambda x, w: jax.ops.segment_sum(x[IDS % 50 - 25] * w, IDS, 50),
        [(50, 33), (600, 33)], F32, ["segment_sum float32, few edges"],
    ),
    "take": (
        lambda x: jtk.take(x, IDS, 0), lambda x: x[IDS],
        [(50, 64)], F32, ["segment_sum float32, few edges"],
    ),
    "top_k": (
        lambda x: jtk.top_k(x, 8)[0], lambda x: lax.top_k(x, 8)[0],
        [(40, 256)], F32, ["top_k float32"],
    ),
    "inv": (
        lambda x: jtk.linalg.inv(regular(x)), lambda x: jnp.linalg.inv(regular(x)),
        [(9, 8, 8)], F32, ["matrix_inverse float32 8x8"],
    ),
    "solve": (
        lambda x, b: jtk.linalg.solve(regular(x), b),
        lambda x, b: jnp.linalg.solve(regular(x), b),
        [(9, 16, 16), (9, 16, 3)], F32, ["matrix_solve float32 16x16"],
    ),
    "cholesky": (
        lambda x: jtk.linalg.cholesky(definite(x)), lambda x: jnp.linalg.cholesky(definite(x)),
        [(200, 200)], F32, ["blocked_cholesky float32 200x200"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.one_in(21)
def test_values_and_gradients(name):
    ours, theirs, shapes, dtype, plans = OPERATIONS[name]
    generator = np.random.default_rng(len(name))
    operands = [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]
    weights = generator.normal(size=jax.eval_shape(ours, *operands).shape)

    def with_gradients(function):
        def total(*operands):
            result = function(*operands)
            return (result * weights.astype(result.dtype)).astype(F32).sum(), result

        every = tuple(range(len(operands)))
        return jax.jit(jax.value_and_grad(total, every, has_aux=True))

    wide = [x.astype(F32) for x in operands]
    with jax.default_matmul_precision("highest"):
        (_, value), gradients = with_gradients(theirs)(*wide)
    # Sums of squares of operands are about 1 per element.
    tolerance = 2**-5 if dtype == BF16 else 2**-8
    for how in ({"late": ["reads"], "backwards": True}, {"late": ["writes"]}):
        with emulated_gpu(**how) as ran:
            (_, ours_value), ours_gradients = with_gradients(ours)(*operands)
        assert set(plans) <= {plan.name for plan in ran}
        results = zip((ours_value, *ours_gradients), (value, *gradients), strict=True)
        for found, expected in results:
            error = np.abs(np.asarray(found, np.float32) - np.asarray(expected))
            assert error.max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.thorough
def test_complex_products(precision):
    generator = np.random.default_rng(3)
    a, b, weights = (
        jnp.asarray(generator.normal(size=shape) + 1j * generator.normal(size=shape), jnp.complex64)
        for shape in ((136, 72), (72, 264), (136, 264))
    )

    def with_cotangents(matmul):
        return jax.jit(lambda a, b: (matmul(a, b), jax.vjp(matmul, a, b)[1](weights)))

    expected = with_cotangents(lambda a, b: jnp.matmul(a, b, precision="highest"))(a, b)
    with emulated_gpu(late=["writes"]) as ran:
        found = with_cotangents(lambda a, b: jtk.matmul(a, b, precision=precision))(a, b)
    names = {"default": "wgmma_matmul tf32", "highest": "split_float16_matmul f32"}
    assert {plan.name for plan in ran} == {names[precision]}
    tolerance = {"default": 2**-9, "highest": 2**-18}[precision]
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()
