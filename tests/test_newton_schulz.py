"""Newton-Schulz iterations: against exact singular values, in every type, form and layout."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import AUTO, bytes_sent, collectives, devices, mesh_of

import jax_tilekern as jtk
from jax_tilekern.ops.muon.newton_schulz import COEFFICIENTS
from jax_tilekern.ops.muon.newton_schulz_iteration import Form, iterated, largest_power_of_two

pytestmark = pytest.mark.usefixtures("highest_precision")

CONVERGENT = (1.875, -1.25, 0.375)
METHODS = ("standard", "gram")
newton_schulz = jtk.linalg.newton_schulz


def polynomial(s, steps=5, coefficients=COEFFICIENTS):
    a, b, c = coefficients
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


def exact(x, **kwargs):
    """The function of singular values that the iteration is, in float64."""
    u, s, vh = np.linalg.svd(np.asarray(x).astype(np.complex128 if x.dtype.kind == "c" else float),
                             full_matrices=False)  # fmt: skip
    norm = np.sqrt((s**2).sum(-1, keepdims=True))
    return (u * polynomial(s / norm, **kwargs)[..., None, :]) @ vh


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16), (2, 3, 8, 40), (3, 40, 8)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_in(6)
def test_singular_values_are_mapped_by_the_polynomial(rng, shape, method):
    x = rng.normal(size=shape).astype(np.float32)
    # Rounding errors of a Gram matrix grow by at most 3.4445**2 a step, twice between restarts.
    tolerance = 1e-5 if method == "standard" else 1e-4
    for values in (x, (x + 1j * rng.normal(size=shape)).astype(np.complex64)):
        got = newton_schulz(values, method=method)
        assert got.dtype == values.dtype
        np.testing.assert_allclose(got, exact(values), atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_types_of_16_bits(rng, dtype):
    x = jnp.asarray(rng.normal(size=(3, 16, 64)), dtype)
    errors = {
        method: np.abs(newton_schulz(x, method=method).astype(np.float32) - exact(x)).max()
        for method in METHODS
    }
    unit = float(jnp.finfo(dtype).eps)
    assert errors["standard"] < 8 * unit
    # Computed in float16, and rounded.
    assert errors["gram"] < 8 * 2.0**-10 + unit


def test_float64(x64, rng):
    x = rng.normal(size=(12, 40))
    for method in METHODS:
        np.testing.assert_allclose(newton_schulz(x, eps=0.0, method=method), exact(x), atol=1e-12)


def with_singular_values(rng, s, columns, dtype=np.float32):
    u, v = (np.linalg.qr(rng.normal(size=(n, len(s))))[0] for n in (len(s), columns))
    return ((u * s) @ v.T).astype(dtype), u @ v.T


# Products in float16, where those of float32 are in TF32.


class Tf32(Form):
    """Products whose operands are rounded to TF32, and their results to float32."""

    @staticmethod
    def operand(x):
        return jax.lax.reduce_precision(x, 8, 10)

    def gram(self, x, out_type=None):
        return super().gram(self.operand(x), out_type)

    def times(self, factor, x, **how):
        return super().times(self.operand(factor), self.operand(x), **how)

    def gram_product(self, first, second, epilogue, *operands):
        second = first if second is None else second
        return super().gram_product(self.operand(first), self.operand(second), epilogue, *operands)


def conditioned(rng, kind):
    """Return matrices that rounding errors hurt in different ways."""
    x = rng.normal(size=(96, 384))
    if kind == "low rank":
        x = rng.normal(size=(96, 4)) @ rng.normal(size=(4, 384)) + 1e-2 * x
    elif kind == "decaying":
        x = with_singular_values(rng, np.arange(1.0, 97) ** -1.5, 384, float)[0]
    elif kind == "outliers":
        x *= np.exp(3 * rng.normal(size=x.shape))
    elif kind == "tiny":
        x *= 1e-12
    return x.astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["normal", "low rank", "decaying", "outliers", "tiny"])
@pytest.mark.one_in(5)
def test_float16_is_as_accurate_as_tf32(rng, kind, method):
    x = conditioned(rng, kind)
    options = {"preconditioning": "frobenius", "method": method}
    table = jnp.broadcast_to(jnp.asarray(COEFFICIENTS), (5, 3))

    @jax.jit
    def in_float16(x):
        return iterated(x, table, jnp.float32(0), precision=None, in_float16=True, **options)

    @jax.jit
    def in_tf32(x):
        form = Tf32(True, "highest")
        iterate = form.standard if method == "standard" else form.by_gram_matrix
        return iterate(form.scaled(x, "frobenius", jnp.float32(0)), table)

    wanted = exact(x)
    error, of_tf32 = (np.linalg.norm(f(x) - wanted) for f in (in_float16, in_tf32))
    assert error < 1.5 * of_tf32 < 0.1 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "table",
    [
        COEFFICIENTS, CONVERGENT, (1.5, -0.5, 0.0), (2.0, 0.0, 0.0), (0.0, 0.0, 0.0),
        (0.0, 3.0, 1.0), (8.2872, -23.5959, 17.3004), (2.0, 0.5, 0.25), (-3.0, 4.0, -2.0),
        (1.0, 0.0, 2.0),
    ],
)  # fmt: skip
def test_no_element_overflows_float16(table):
    steps = 3
    table = np.broadcast_to(np.float32(table), (steps, 3))
    largest, s = 1.0, np.linspace(0, 1, 2001)
    for a, b, c in table.astype(float):
        z = b * s**2 + c * s**4
        largest = max(largest, np.abs(z).max(), (s**2).max())
        s = np.linspace(0, np.abs(s * (a + z)).max(), 2001)
    scale = float(largest_power_of_two(jnp.asarray(table)))
    assert np.frexp(scale)[0] == 0.5
    # At least a quarter of the range is used.
    assert 2**12 < scale**2 * max(largest, s.max(), (s**2).max()) <= 2**15


@pytest.mark.parametrize("method", METHODS)
def test_float16_with_steep_coefficients_nan_and_zeros(rng, method):
    x = rng.normal(size=(3, 16, 64)).astype(np.float32)
    x[1, 2, 3], x[2] = np.nan, 0
    table = jnp.asarray([(20.0, -30.0, 15.0), (10.0, 0.5, 0.25)])
    by = functools.partial(
        iterated, x, table, jnp.float32(1e-8), preconditioning="frobenius", method=method,
        precision=None,
    )  # fmt: skip
    got, wanted = by(in_float16=True), by()
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_allclose(got, wanted, atol=3e-3 * np.abs(wanted[0]).max())


@pytest.mark.parametrize("method", METHODS)
def test_the_documented_distance_from_the_polar_factor(rng, method):
    s = np.geomspace(0.01, 1, 32)
    x, polar = with_singular_values(rng, s, 96)
    smallest = s[0] / np.linalg.norm(s)
    got = newton_schulz(x, method=method)
    assert smallest > 0.002
    # The difference has the singular vectors of x: its norm is the largest error of the values.
    assert np.linalg.norm(got - polar, 2) < 0.33
    converged = newton_schulz(x, steps=12, coefficients=CONVERGENT, method=method)
    np.testing.assert_allclose(converged, polar, atol=2e-4)


def test_restarts_keep_gram_matrices_of_16_bits_stable(rng):
    x, _ = with_singular_values(rng, np.geomspace(1e-6, 1, 64), 256, np.float16)
    got = np.asarray(newton_schulz(x, steps=8, method="gram"), np.float32)
    assert np.linalg.norm(got, 2) < 1.3


def test_the_form_is_chosen_by_the_aspect(rng):
    def form(*shape):
        return jtk.explain(newton_schulz, jnp.ones(shape))[0].call

    assert form(8, 16) == form(16, 8) == "newton_schulz, standard"
    assert form(8, 17) == form(17, 8) == "newton_schulz, gram"


def test_zeros_and_empty_matrices():
    zeros = jnp.zeros((2, 4, 16), jnp.float16)
    for preconditioning in ("frobenius", "spectral", "aol", "schatten"):
        got = newton_schulz(zeros, steps=2, preconditioning=preconditioning)
        np.testing.assert_array_equal(got, zeros)
    gradient = jax.grad(lambda x: newton_schulz(x).sum())(jnp.zeros((4, 8)))
    assert np.isfinite(gradient).all()
    for shape in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        assert newton_schulz(jnp.ones(shape)).shape == shape


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32, np.complex64])
def test_no_steps_scale(rng, dtype):
    x = jnp.asarray(rng.normal(size=(2, 4, 16)), dtype)
    wanted = newton_schulz(x, steps=0, method="standard")
    norm = np.linalg.norm(x.astype(np.complex64), axis=(1, 2), keepdims=True)
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(wanted.astype(np.complex64), x / norm, 4 * unit)
    for how in ({"method": "gram"}, {"coefficients": np.zeros((0, 3))}):
        np.testing.assert_array_equal(newton_schulz(x, steps=0, **how), wanted)


def test_coefficients_of_each_step(rng):
    x = rng.normal(size=(8, 24)).astype(np.float32)
    table = np.stack([COEFFICIENTS, CONVERGENT, CONVERGENT])
    s = np.linalg.svd(x, compute_uv=False)
    wanted = polynomial(polynomial(s / np.linalg.norm(s), 1), 2, CONVERGENT)
    for method in METHODS:
        got = jax.jit(newton_schulz, static_argnames=("steps", "method"))(
            x, steps=3, coefficients=table, method=method
        )
        np.testing.assert_allclose(np.linalg.svd(got, compute_uv=False), np.sort(wanted)[::-1],
                                   atol=1e-4)  # fmt: skip


@pytest.mark.parametrize(
    ("error", "x", "kwargs", "words"),
    [
        (ValueError, np.ones(3, np.float32), {}, r"matrices \(..., m, n\), not shape \(3,\)"),
        (TypeError, np.ones((3, 3), np.int32), {}, "not int32"),
        (TypeError, np.ones((3, 3), jnp.float8_e5m2), {}, "not float8_e5m2"),
        (ValueError, np.ones((3, 3), np.float32), {"coefficients": (1.0, 2.0)}, r"not \(2,\)"),
        (ValueError, np.ones((3, 3), np.float32), {"coefficients": np.ones((4, 3))}, "5 steps"),
        (ValueError, np.ones((3, 3), np.float32), {"steps": -1}, "number of steps, not -1"),
        (ValueError, np.ones((3, 3), np.float32), {"steps": 2.5}, "number of steps, not 2.5"),
        (TypeError, np.ones((3, 3), np.float32), {"steps": True}, "number of steps, not True"),
        (TypeError, np.ones((3, 3), np.float32), {"coefficients": (1j, 1, 1)}, "not complex"),
        (ValueError, np.ones((3, 3), np.float32), {"eps": np.ones(3)}, r"shape \(3,\)"),
        (
            ValueError,
            np.ones((3, 3), np.float32),
            {"method": "fast"},
            "'auto', 'standard' or 'gram'",
        ),
        (ValueError, np.ones((3, 3), np.float32), {"preconditioning": "l1"}, "frobenius"),
    ],
)
def test_errors(error, x, kwargs, words):
    with pytest.raises(error, match=words):
        newton_schulz(x, **kwargs)


# Several devices.


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_devices_share_the_batch_and_exchange_parts():
    mesh = mesh_of((AUTO, AUTO))

    def compiled_for(spec):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32, sharding=sharding)
        return jax.jit(newton_schulz, out_shardings=sharding).lower(x).compile()

    for spec, count in ((P(None, "d", "m"), 4), (P(None, ("d", "m")), 2), (P("d", None, "m"), 2)):
        kinds = [found.kind for found in collectives(compiled_for(spec))]
        assert kinds == ["all-to-all"] * count, spec
    # Devices have copies, and compute a part each.
    assert [found.kind for found in collectives(compiled_for(P()))] == ["all-gather"]
    # Devices of one axis have copies: the result is sliced, and only then gathered.
    assert bytes_sent(compiled_for(P(None, "d"))) < 0.8 * 8 * 512 * 512 * 4
