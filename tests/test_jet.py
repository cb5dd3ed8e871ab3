"""Taylor mode: ``jax.experimental.jet`` takes every operation, to third order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from numerics import assert_close

import jax_tilekern as jtk

ORDER = 3
SIZES = np.array([3, 5], np.int32)
LABELS = np.arange(8, dtype=np.int32) % 4


def bias_and_tanh(x, w, b):
    return jnp.tanh(x @ w + b)


def loss_of_logits(x, w):
    logits = x @ w
    labels = jax.nn.one_hot(LABELS, 4)
    return (jax.nn.logsumexp(logits, -1) - (labels * logits).sum(-1)).mean()


TRIPLED = jtk.cuda_kernel(
    "__global__ void triple(const float* x, float* out) { out[threadIdx.x] = 3 * x[threadIdx.x]; }",
    out=lambda x: x, grid=1, block=lambda x: x.size, reference=lambda x: 3 * x,
)  # fmt: skip
TRIPLED.deflinear(0, lambda cotangent, x: 3 * cotangent)


# Ours, JAX's, and the operands' shapes.
X, W = (8, 4), (4, 4)
LIKE_JAXS = {
    "matmul": (jtk.matmul, jnp.matmul, [X, W]),
    "einsum": (
        lambda x, w: jtk.einsum("ij,jk->ki", x, w), lambda x, w: jnp.einsum("ij,jk->ki", x, w),
        [X, W],
    ),
    "vmap": (jax.vmap(jtk.matmul, (0, None)), jax.vmap(jnp.matmul, (0, None)), [X, W]),
    "jit of matvec": (jax.jit(jtk.matvec), jnp.matmul, [X, (4,)]),
    "sum": (lambda x: jtk.sum(x**2, 0), lambda x: (x**2).sum(0), [X]),
    "transpose": (lambda x: jtk.transpose(x) ** 2, lambda x: x.T**2, [X]),
    "add": (lambda x, y: jtk.add(x, y) ** 2, lambda x, y: (x + y) ** 2, [X, (4,)]),
    "strassen_matmul": (jtk.strassen_matmul, jnp.matmul, [X, W]),
    "linear": (functools.partial(jtk.linear, activation=jnp.tanh), bias_and_tanh, [X, W, (4,)]),
    "gated_linear": (
        functools.partial(jtk.gated_linear, activation=jnp.tanh),
        lambda x, w, up: jnp.tanh(x @ w) * (x @ up), [X, W, W],
    ),
    "fuse": (jtk.fuse(bias_and_tanh), bias_and_tanh, [X, W, (4,)]),
    "row_logsumexp": (
        lambda x, w: jtk.matmul(x, w, epilogue=jtk.row_logsumexp),
        lambda x, w: jax.nn.logsumexp(x @ w, -1), [X, W],
    ),
    "ragged_dot": (
        lambda x, w: jtk.ragged_dot(x, w, SIZES),
        lambda x, w: jnp.concatenate([x[:3] @ w[0], x[3:] @ w[1]]), [X, (2, *W)],
    ),
    "linear_cross_entropy": (
        lambda x, w: jtk.linear_cross_entropy(x, w, LABELS), loss_of_logits, [X, W],
    ),
    "cuda_kernel": (TRIPLED, lambda x: 3 * x, [X]),
}  # fmt: skip


def operands(rng, shapes):
    def normal(shape):
        return (rng.standard_normal(shape) / 2).astype(np.float32)

    return [normal(shape) for shape in shapes], [[normal(s) for _ in range(ORDER)] for s in shapes]


@pytest.mark.parametrize("name", LIKE_JAXS)
@pytest.mark.one_in(2)
def test_like_jaxs(rng, name):
    ours, theirs, shapes = LIKE_JAXS[name]
    primals, series = operands(rng, shapes)
    with jax.default_matmul_precision("highest"):
        got, wanted = (jet(f, primals, series) for f in (ours, theirs))
    assert_close(jax.tree.leaves(got), jax.tree.leaves(wanted))


def definite(a):
    return a @ a.mT + 3 * jnp.eye(a.shape[-1])


# jet has no rules for JAX's.
MATRICES = {
    "inv": lambda a: jtk.linalg.inv(definite(a)),
    "solve": lambda a, b: jtk.linalg.solve(definite(a), b),
    "solve_triangular": lambda a, b: jtk.linalg.solve_triangular(definite(a), b, lower=True),
    "cholesky": lambda a: jtk.linalg.cholesky(definite(a)),
    "lu_factor": lambda a: jtk.linalg.lu_factor(definite(a))[0],
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.one_in(2)
def test_matrices(rng, name):
    """The derivatives along a curve are those of nested forward mode."""
    function = MATRICES[name]
    primals, series = operands(rng, [(5, 3, 3), (5, 3, 2)][: 1 + name.startswith("solve")])

    def at(time):
        weights = [1, time, time**2 / 2, time**3 / 6]
        arrays = [[x, *terms] for x, terms in zip(primals, series, strict=True)]
        return function(*(sum(w * x for w, x in zip(weights, xs, strict=True)) for xs in arrays))

    derivatives = [at]
    for _ in range(ORDER):
        derivatives.append(jax.jacfwd(derivatives[-1]))

    @jax.jit
    def both():
        value, terms = jet(function, primals, series)
        return [value, *terms], [f(0.0) for f in derivatives]

    with jax.default_matmul_precision("highest"):
        assert_close(*both())


def test_a_kernel_without_derivatives_says_so():
    kernel = jtk.cuda_kernel(
        "__global__ void copy(const float* x, float* out) {}",
        out=lambda x: x, grid=1, block=1, reference=lambda x: x,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="deflinear"):
        jet(kernel, (np.ones(3, np.float32),), ([np.ones(3, np.float32)],))
