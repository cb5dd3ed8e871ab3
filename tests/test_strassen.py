"""``strassen_matmul``: values, the growth of errors, ``vmap`` and derivatives."""

import jax.numpy as jnp
import numpy as np
import pytest
from numerics import BF16, UNIT_ROUNDOFF, assert_equal, exact, random

from jax_tilekern import strassen_matmul


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.int8, np.int32, np.uint8])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 48, 80), (33, 17, 65), (1, 5, 3)])
@pytest.mark.one_in(56)
def test_values(rng, x64, m, n, k, dtype, levels):
    """Higham, Accuracy and Stability of Numerical Algorithms, theorem 23.3: 18 ** levels."""
    a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
    product = strassen_matmul(a, b, levels=levels, precision="highest")
    if np.dtype(dtype).kind in "iu":
        return assert_equal(product, jnp.matmul(a, b))
    # Sums of blocks add the roundoff of a narrow type.
    depth, unit = -(-k // 2**levels), UNIT_ROUNDOFF[np.dtype(dtype)]
    bound = 18**levels * (depth**2 * min(unit, 2.0**-24) + 6 * depth * unit) + k * unit
    norms = np.abs(exact(a)).max() * np.abs(exact(b)).max()
    assert product.dtype == dtype
    assert np.abs(exact(product) - exact(a) @ exact(b)).max() <= bound * norms


@pytest.mark.parametrize(("shape", "levels"), [((4, 3), -1), ((4,), 1)])
def test_errors(shape, levels):
    with pytest.raises(ValueError, match=rf"shapes \(3, 4\) and \(4,.*, levels={levels}"):
        strassen_matmul(jnp.ones((3, 4)), jnp.ones(shape), levels=levels)
