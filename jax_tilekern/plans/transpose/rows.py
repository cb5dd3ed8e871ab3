"""Plans for permutations that keep the innermost dimension: ``transpose/rows.cuh``."""

from __future__ import annotations

import math

from jax_tilekern.compilation.compiler import Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.transpose.candidate import THREADS, TransposeCandidate
from jax_tilekern.plans.transpose.permutation import Permutation
from jax_tilekern.plans.transpose.shape import DIVISOR, VECTOR_BYTES, OuterDims, divisor


def row_transpose(permutation: Permutation) -> TransposeCandidate:
    """Return what copies rows to other places, by vectors of 16 bytes of the result."""
    row_bytes = permutation.row_bytes
    outer = OuterDims.of(permutation, (len(permutation.sizes) - 1,))
    # Rows start at multiples of a unit, and their length is one. Below 16 bytes, vectors are
    # assembled from rows that start anywhere.
    unit = math.gcd(row_bytes, VECTOR_BYTES)
    if unit < VECTOR_BYTES:
        unit = min(unit, 4)
    # The copies of a thread, which are all in flight at once.
    copies = 2 if unit == VECTOR_BYTES else 4
    # A row that starts off the vectors' grid may touch one vector more.
    row_vectors = -(-(row_bytes + VECTOR_BYTES - unit) // VECTOR_BYTES)
    vectors = outer.count * row_vectors
    config = cxx_config("RowTransposeConfig", unit_bytes=unit, copies=copies)
    return TransposeCandidate(
        kernel=Kernel("transpose/rows.cuh", f"tilekern::transpose_rows<{config}>"),
        form="rows",
        reason=f"{outer.count} rows of {row_bytes} bytes",
        count=vectors,
        counts_per_block=THREADS * copies,
        layout=f"{DIVISOR}Iq{OuterDims.LAYOUT}",
        values=(*divisor(row_vectors), vectors, row_bytes, *outer.values),
    )
