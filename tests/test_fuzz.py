"""Random calls of all operations at the defaults: what is left to XLA is left to it here, too."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import outcomes
from numerics import BF16, F8E4, on_gpu

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS, FAMILIES

pytestmark = pytest.mark.defaults

ORDERED = [x.name for x in FAMILIES["selection"]] + ["cummax", "cummin", "cumsum", "cumprod"]
# Each operation is called so often.
CALLS, THOROUGH = 1, 8


HOW = [
    (CALLS, None),
    *(pytest.param(THOROUGH, x, marks=pytest.mark.thorough) for x in (None, "kernels")),
]


@pytest.mark.parametrize(("calls", "policy"), HOW)
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_errors_are_within_the_bounds(rng, name, calls, policy):
    """``python tests/fuzz.py`` runs more, and explains the worst."""
    failed = [outcome for outcome in outcomes(rng, calls, [name], policy) if outcome.failed]
    unknown = [outcome for outcome in failed if outcome.known is None]
    assert not unknown, "\n".join(map(str, unknown))
    if failed:
        pytest.xfail("\n".join(f"{outcome.known}:\n{outcome}" for outcome in failed))


def test_selections_and_scans_have_the_bits_of_jax(rng):
    """``python tests/fuzz.py --calls 2000 --operation top_k sort ...`` runs more."""
    failed = [x for x in outcomes(rng, 20, ORDERED) if x.failed]
    assert not failed, "\n".join(map(str, failed))


# What `Outcome.known` allows: the calls that show it best.


@pytest.mark.xfail(
    not on_gpu(), strict=True, reason="an integer is rounded to the float of 8 bits, as by JAX"
)
def test_integers_times_floats_of_8_bits():
    x, y = jnp.array([1.0, -1.0], F8E4), jnp.array([17, 16], jnp.int16)
    assert float(jtk.dot(x, y)) == 1


@pytest.mark.parametrize("columns", [(), (4,)])
def test_products_of_16_bits_with_few_columns(rng, columns):
    x, y = (rng.standard_normal(shape).astype(BF16) for shape in ((3, 60), (60, *columns)))
    wide = [operand.astype(np.float64) for operand in (x, y)]
    found = np.asarray(jtk.matmul(x, y, preferred_element_type=jnp.float32))
    magnitude = np.abs(wide[0]) @ np.abs(wide[1])
    assert (np.abs(found - wide[0] @ wide[1]) <= 61 * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_small_products_of_16_bits_whose_batch_is_not_first(rng, dtype):
    x, y = (rng.standard_normal(shape).astype(dtype) for shape in ((5, 2, 6), (6, 5, 4)))
    multiply = functools.partial(jtk.einsum, "bmk,kbn->bmn", preferred_element_type=jnp.float32)
    exact, magnitude = (
        np.einsum("bmk,kbn->bmn", *(of(z.astype(np.float64)) for z in (x, y)))
        for of in (lambda z: z, np.abs)
    )
    assert (np.abs(np.asarray(multiply(x, y)) - exact) <= 7 * 2.0**-24 * magnitude).all()
