"""Complex products that are computed as real ones, on the device where their operands are.

A complex contraction is differentiated, batched and partitioned as such. Where it is lowered, it is
rewritten to a real one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.ops.labelled_operands import transposed
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.complex_product import Pairing


def by_real_product(
    contract: Callable[..., Array],
    contraction: Contraction,
    pairing: Pairing,
    precision: Any,
    out_dtype: np.dtype[Any],
    lhs: Array,
    rhs: Array,
) -> Array:
    """Contract two complex arrays by a real contraction."""
    at = pairing.pairs.index(pairing.contracted_part)
    real = [
        _matrices(x, labels, pairing) if i == pairing.expanded else jnp.stack([x.real, x.imag], at)
        for i, (x, labels) in enumerate(zip((lhs, rhs), contraction.operands, strict=True))
    ]
    out = contract(*real, contraction=pairing.contraction, precision=precision, out_dtype=out_dtype)
    part = functools.partial(
        lax.index_in_dim, out, axis=pairing.contraction.out.index(pairing.result_part),
        keepdims=False,
    )  # fmt: skip
    return lax.complex(part(0), part(1))


def _matrices(x: Array, labels: tuple[int, ...], pairing: Pairing) -> Array:
    """Return the 2x2 matrices by which pairs are multiplied in place of complex numbers."""
    parts = (pairing.contracted_part, pairing.result_part)
    x = transposed(x, labels, tuple(x for x in pairing.matrices if x not in parts))
    re, im = x.real, x.imag
    # Its rows are the parts that are contracted.
    matrix = [[re, im], [-im, re]]
    outer, inner = sorted(map(pairing.matrices.index, parts))
    if pairing.matrices[outer] == pairing.result_part:
        matrix = [list(column) for column in zip(*matrix, strict=True)]
    return jnp.stack([jnp.stack(row, inner - 1) for row in matrix], outer)
