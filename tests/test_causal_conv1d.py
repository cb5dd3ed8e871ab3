"""``causal_conv1d``: what its description does not draw, and its kernels on emulated threads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from nvrtc_mark import needs_emulator
from products import BF16, F16, F32, H100
from sharded import EXPLICIT, devices, mesh_of, put
from test_emulated_kernels import run

import jax_tilekern as jtk
from benchmarks.catalog.convolution import causal_conv1d as draw_call
from benchmarks.catalog.draw import Draw
from jax_tilekern.plans.causal_conv1d import (
    CausalConv,
    plan_causal_conv1d,
    plan_causal_conv1d_gradient,
)
from jax_tilekern.plans.launch import NoKernel

RNG = np.random.default_rng(0)
X, WEIGHTS = jnp.asarray(RNG.standard_normal((2, 3, 9, 6)), F32), jnp.ones((4, 6), F32)


def test_a_sequence_in_parts():
    whole = jtk.causal_conv1d(X, WEIGHTS, activation="silu")
    state, parts = jnp.zeros((2, 3, 3, 6)), []
    for first, last in ((0, 1), (1, 3), (3, 3), (3, 9)):
        part, state = jtk.causal_conv1d(
            X[..., first:last, :], WEIGHTS, activation="silu", state=state
        )
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, -2), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(state, X[..., -3:, :])


def test_types_are_promoted():
    out = jtk.causal_conv1d(X.astype(jnp.bfloat16), WEIGHTS)
    assert out.dtype == np.float32
    assert jtk.causal_conv1d(X.astype(jnp.bfloat16), WEIGHTS.astype(jnp.bfloat16)).dtype == BF16


def test_a_width_of_one_and_filters_that_are_mapped():
    np.testing.assert_allclose(jtk.causal_conv1d(X, 2 * WEIGHTS[:1]), 2 * X)
    filters = jnp.stack([WEIGHTS, 2 * WEIGHTS])
    found = jax.vmap(jtk.causal_conv1d)(X, filters)
    np.testing.assert_allclose(found[1], jtk.causal_conv1d(X[1], filters[1]), rtol=1e-6)


def test_derivatives_of_mapped_calls_have_one_gradient_each():
    def loss(x, weights):
        return (jtk.causal_conv1d(x, weights, activation="silu") ** 2).sum()

    both = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(X, WEIGHTS)
    for i in range(2):
        for found, wanted in zip(both, jax.grad(loss, (0, 1))(X[i], WEIGHTS), strict=True):
            np.testing.assert_allclose(found[i], wanted, rtol=2e-5, atol=1e-5)


# Kernels.


# Batch, length and channels: chunks of several threads, short sequences, vectors of 4, 2 and 1.
SIZES = [(2, 41, 24), (1, 1, 8), (3, 2, 6), (1, 200, 5), (1, 17, 640)]


@needs_emulator
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.one_in(5)
def test_emulated_kernels(rng, sizes, dtype):
    draw = Draw(rng)
    draw.sizes = lambda *_: dict(zip("blc", sizes, strict=True))
    draw.type = lambda *_: dtype
    call = draw_call(draw, "causal_conv1d")
    x, weights, bias, *rest = (draw.value(operand, special=False) for operand in call.operands)
    batch, _, channels = sizes
    width = len(weights)
    state = rest[0] if rest else np.zeros((batch, width - 1, channels), dtype)
    activation = "silu" if "silu" in call.arguments else None
    problem = CausalConv(*sizes, width, dtype, activation)
    operands, how = [x, state, weights, bias], {"backwards": bool(rng.integers(2))}
    (out,) = run(lambda: plan_causal_conv1d(problem, H100), operands, [(x.shape, dtype)], **how)
    d_out = rng.standard_normal(x.shape).astype(dtype)
    results = [(x.shape, dtype), (state.shape, dtype), (weights.shape, F32), (bias.shape, F32)]
    cotangents = run(
        lambda: plan_causal_conv1d_gradient(problem, H100), [*operands, d_out], results, **how
    )
    d_x, d_state, d_weights, d_bias = cotangents
    found = [*call.errors(out, x, weights, bias, *rest)]
    found += call.cotangent_errors(
        [d_x, d_weights, d_bias, d_state], d_out, x, weights, bias, *rest
    )
    for error, bound in found:
        assert np.all(error <= bound)


def test_plans_beyond_their_limits():
    long = CausalConv(1, 2**31, 8, 4, BF16, None)
    assert isinstance(plan_causal_conv1d(long, H100), NoKernel)
    assert isinstance(plan_causal_conv1d_gradient(long, H100), NoKernel)


def test_symbolic_sizes():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, length, 6"), F32)
    exported = jax.export.export(jax.jit(lambda x: jtk.causal_conv1d(x, WEIGHTS)))(shape)
    expected = jtk.causal_conv1d(X[0], WEIGHTS)
    np.testing.assert_allclose(exported.call(X[0]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(devices() is None, reason="needs eight CPU devices")
@pytest.mark.parametrize("spec", [P("m"), P(None, None, "d"), P("m", None, "d")], ids=str)
def test_explicit_axes(spec):
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    of_weights = P(None, spec[2]) if len(spec) == 3 else P()

    def loss(x, weights):
        return (jtk.causal_conv1d(x, weights, activation="silu") ** 2).sum()

    x = jnp.asarray(RNG.standard_normal((4, 9, 6)), F32)
    expected = jax.grad(loss, (0, 1))(x, WEIGHTS)
    with jax.set_mesh(mesh):
        operands = put(mesh, x, spec), put(mesh, WEIGHTS, of_weights)
        found = jax.jit(jax.grad(loss, (0, 1)))(*operands)
        assert found[0].sharding.is_equivalent_to(operands[0].sharding, 3)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)
