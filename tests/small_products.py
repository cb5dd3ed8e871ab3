"""Random products for the kernels of small products."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from jax_tilekern.tuning.tuner import products_of

SPECS = [
    "bmk,bkn->bmn", "bkm,bnk->bmn", "mbk,kbn->bmn", "kbm,nbk->bmn", "bmk,kn->bmn", "mk,bnk->bmn",
    "mk,nk->mn", "bcmk,cbkn->bcmn", "bmk,bkn->mbn", "bcmk,bkn->mcbn",
]  # fmt: skip
# Operands whose rows run across k, one or both.
ACROSS_K = ["bkm,bkn->bmn", "kbm,kbn->bmn", "bkm,bnk->bmn", "bmk,bkn->bmn"]
# Sizes of m, n and k whose rows are of whole vectors, and others.
SIZES = [
    (5, 6, 7), (16, 8, 32), (33, 17, 65), (64, 48, 64), (3, 130, 31), (130, 3, 129), (48, 80, 2),
    (24, 40, 200), (100, 90, 1100), (2, 2, 4096), (257, 19, 24), (40, 41, 513),
]  # fmt: skip
# Sizes that leave rows across k aligned to words, to two bytes, or not at all.
SIZES_ACROSS_K = [
    (3, 2, 5), (12, 20, 36), (22, 38, 33), (27, 39, 66), (48, 64, 32), (124, 165, 40), (2, 126, 70),
    (50, 100, 2), (100, 3, 131),
]  # fmt: skip
# The types of lhs, of rhs if that is another, and of the result; and the precision.
TYPES = [
    ("bfloat16", None, None, None),
    ("bfloat16", None, "float32", None),
    ("float16", None, None, None),
    ("float32", None, None, None),
    ("float32", None, None, "highest"),
    ("float64", None, None, None),
    ("int8", None, "int32", None),
    ("float8_e4m3fn", None, "float32", None),
    ("float8_e5m2", "float8_e4m3fn", "float16", None),
]


def bound(product):
    """The largest error of a result, relative to its scale in the Frobenius norm.

    It is the rounding of operands and of the result, and that of sums of k terms in float32.
    """
    of_sums = max(1e-6, 1e-7 * product.geometry.k**0.5)
    bounds = {
        "bf16": 4e-3, "f16": 5e-4, "tf32": 6e-4, "f32": of_sums, "f64": 1e-14, "int8": 0,
        "fp8": 4e-3, "fp8_fast": 4e-3,
    }  # fmt: skip
    return bounds[product.arithmetic]


def _drawn(rng, shape, dtype):
    if dtype == "int8":
        return jnp.asarray(rng.integers(-128, 128, shape, np.int8))
    return jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))


def random_product(numbers, types, sizes, most_matrices, specs=SPECS):
    """Draw a product: how it is planned for, its operands, the result in float64, and its scale.

    The scale is the Frobenius norm of what the result would be with random signs. That of few
    results may be far less.
    """
    lhs_type, rhs_type, result, precision = types
    rng = np.random.default_rng(numbers.getrandbits(32))
    spec = numbers.choice(specs)
    # A batch may become rows, and larger products have no kernel.
    most_matrices = min(most_matrices, (1 << 24) // math.prod(sizes))
    b = numbers.choice([x for x in (1, 3, 20) if x <= most_matrices])
    letters = dict(zip("mnkbc", (*sizes, b, 2), strict=True))
    of_lhs, of_rhs, _ = spec.replace("->", ",").split(",")
    lhs = _drawn(rng, [letters[x] for x in of_lhs], lhs_type)
    rhs = _drawn(rng, [letters[x] for x in of_rhs], rhs_type or lhs_type)
    out_type = jnp.dtype(result or lhs_type)
    (product,) = products_of(
        lambda x, y: jtk.einsum(spec, x, y, precision=precision, preferred_element_type=out_type),
        jax.typeof(lhs),
        jax.typeof(rhs),
    )
    left, right = (np.asarray(x).astype(np.float64) for x in (lhs, rhs))
    scale = np.sqrt(np.einsum(spec, left**2, right**2).sum())
    return product, (lhs, rhs), np.einsum(spec, left, right), scale
