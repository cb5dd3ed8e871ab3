"""The README's promise of equal bits, and what it does not say."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tilekern as jtk

SIZES = np.array([70, 0, 58], np.int32)


# Functions of random operands whose sums have many orders.
PROGRAMS = {
    "matmul": (jtk.matmul, [(128, 1000), (1000, 70)]),
    "matvec": (jtk.matvec, [(3, 40000), (40000,)]),
    "linear": (functools.partial(jtk.linear, activation=jnp.tanh), [(128, 300), (300, 70), (70,)]),
    "ragged_dot": (lambda x, w: jtk.ragged_dot(x, w, SIZES), [(128, 300), (3, 300, 70)]),
    "gradients": (
        jax.grad(lambda x, w: (jtk.matmul(x, w) ** 2).sum(), (0, 1)), [(128, 300), (300, 70)],
    ),
    "sum of few long rows": (functools.partial(jtk.sum, axis=1), [(2, 600000)]),
    "sum of columns": (functools.partial(jtk.sum, axis=0), [(5000, 70)]),
    "vdot": (jtk.vdot, [(600000,), (600000,)]),
    "linear_cross_entropy": (
        lambda x, w: jtk.linear_cross_entropy(x, w, np.arange(128)), [(128, 300), (300, 512)],
    ),
    "segment_sum": (lambda x: jtk.segment_sum(x, np.arange(40000) % 7, 7), [(40000, 9)]),
    "segment_sum of wide rows": (
        lambda x: jtk.segment_sum(x, np.arange(3000) % 3, 3, indices_are_sorted=True),
        [(3000, 300)],
    ),
    "solve": (jtk.linalg.solve, [(9, 20, 20), (9, 20, 2)]),
    "inv": (jtk.linalg.inv, [(9, 20, 20)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(3)
def test_the_same_bits_in_every_call_and_when_compiled_again(rng, name):
    function, shapes = PROGRAMS[name]
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*operands).compile()
    first = jax.tree.leaves(compiled(*operands))
    jax.clear_caches()
    again = jax.jit(function).lower(*operands).compile()
    # Copies lie elsewhere in memory.
    runs = [compiled(*operands), *(again(*map(np.copy, operands)) for _ in range(5))]
    for run in runs:
        for x, y in zip(jax.tree.leaves(run), first, strict=True):
            np.testing.assert_array_equal(x, y)
