"""Each row of the table of arithmetic in ``docs/design.md``, whoever computes the product."""

import functools

import jax
import numpy as np
import pytest
from numerics import BF16, F8E4, F8E5, assert_product, operands, poison, roundoff, supported

import jax_tilekern as jtk

pytestmark = pytest.mark.defaults

ROWS = {
    "float32": (np.float32, np.float32, np.float32),
    "float64": (np.float64, np.float64, np.float64),
    "bfloat16": (BF16, BF16, BF16),
    "bfloat16 to float32": (BF16, BF16, np.float32),
    "float16": (np.float16, np.float16, np.float16),
    "float16 to float32": (np.float16, np.float16, np.float32),
    "float8 to float32": (F8E4, F8E5, np.float32),
    "float8 to bfloat16": (F8E4, F8E4, BF16),
    "int8": (np.int8, np.int8, np.int32),
}
# Matrices, a vector on either side, a dot product, batches, an outer product, and a long k.
CALLS = {
    "mk,kn->mn": [(33, 65, 70), (64, 64, 256), (37, 1, 320), (1, 41, 77), (1, 1, 500), (9, 11, 1),
                  (5, 300, 1500)],
    "km,nk->mn": [(33, 65, 70), (1, 41, 77)],
    "bmk,bkn->bmn": [(17, 9, 33), (12, 1, 40)],
    "bkm,kbn->bmn": [(17, 9, 33)],
    "mbk,bkn->mbn": [(17, 9, 33), (1, 6, 20)],
    "mpk,kn->nmp": [(8, 2, 59), (64, 48, 200)],
    "pmk,kn->mpn": [(8, 2, 59), (64, 48, 200)],
    "mpk,kqn->mpqn": [(8, 2, 59)],
}  # fmt: skip


@pytest.mark.parametrize("policy", ["auto", "kernels", "xla"])
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.one_in(36)
def test_a_product_is_as_exact_as_the_table_says(rng, row, precision, policy):
    lhs, rhs, out = ROWS[row]
    if not supported(lhs):
        pytest.skip(f"no {np.dtype(lhs)} on this device")
    with jax.enable_x64(True), jtk.policy(policy):
        for spec, shapes in CALLS.items():
            multiply = functools.partial(
                jtk.einsum, spec, precision=precision, preferred_element_type=out
            )
            for m, n, k in shapes:
                sizes = {"b": 3, "p": 3, "q": 2, "m": m, "n": n, "k": k}
                x, y = operands(rng, spec, sizes, lhs, rhs)
                poison((3, m, n), out)
                found = jax.jit(multiply)(x, y)
                assert found.dtype == out
                assert_product(found, x, y, spec, roundoff(lhs, precision))
