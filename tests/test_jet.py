"""Taylor mode: ``jax.experimental.jet`` takes every operation, to third order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from numerics import assert_close
from operations import MATRICES, OPERATIONS, SHAPES, shapes_of

import jax_tilekern as jtk

ORDER = 3

TRIPLED = jtk.cuda_kernel(
    "__global__ void triple(const float* x, float* out) { out[threadIdx.x] = 3 * x[threadIdx.x]; }",
    out=lambda x: x, grid=1, block=lambda x: x.size, reference=lambda x: 3 * x,
)  # fmt: skip
TRIPLED.deflinear(0, lambda cotangent, x: 3 * cotangent)


X, W = SHAPES["x"], SHAPES["w"]
LIKE_JAXS = {
    **{
        name: (*OPERATIONS[name][:2], shapes_of(name))
        for name in OPERATIONS
        # jet has no rules for JAX's functions of matrices and maxima.
        if name not in (*MATRICES, "row_max", "segment_max", "top_k", "sum", "transpose", "add")
    },
    "vmap": (jax.vmap(jtk.matmul, (0, None)), jax.vmap(jnp.matmul, (0, None)), [X, W]),
    "sum": (lambda x: jtk.sum(x**2, 0), lambda x: (x**2).sum(0), [X]),
    "transpose": (lambda x: jtk.transpose(x) ** 2, lambda x: x.T**2, [X]),
    "add": (lambda x, y: jtk.add(x, y) ** 2, lambda x, y: (x + y) ** 2, [X, (4,)]),
    "cuda_kernel": (TRIPLED, lambda x: 3 * x, [X]),
}


def operands(rng, shapes):
    def normal(shape):
        return (rng.standard_normal(shape) / 2).astype(np.float32)

    return [normal(shape) for shape in shapes], [[normal(s) for _ in range(ORDER)] for s in shapes]


@pytest.mark.parametrize("name", LIKE_JAXS)
@pytest.mark.one_in(3)
def test_like_jaxs(rng, name):
    ours, theirs, shapes = LIKE_JAXS[name]
    primals, series = operands(rng, shapes)
    with jax.default_matmul_precision("highest"):
        got, wanted = (jet(f, primals, series) for f in (ours, theirs))
    assert_close(jax.tree.leaves(got), jax.tree.leaves(wanted))


def definite(a):
    return a @ a.mT + 3 * jnp.eye(a.shape[-1])


# jet has no rules for JAX's.
OF_MATRICES = {
    "inv": lambda a: jtk.linalg.inv(definite(a)),
    "solve": lambda a, b: jtk.linalg.solve(definite(a), b),
    "solve_triangular": lambda a, b: jtk.linalg.solve_triangular(definite(a), b, lower=True),
    "cholesky": lambda a: jtk.linalg.cholesky(definite(a)),
    "lu_factor": lambda a: jtk.linalg.lu_factor(definite(a))[0],
}


@pytest.mark.parametrize("name", OF_MATRICES)
@pytest.mark.one_in(3)
def test_matrices(rng, name):
    """The derivatives along a curve are those of nested forward mode."""
    function = OF_MATRICES[name]
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


def test_a_kernel_has_the_polynomial_of_its_reference():
    kernel = jtk.cuda_kernel(
        "__global__ void sine(const float* x, float* out) {"
        " out[threadIdx.x] = sinf(x[threadIdx.x]); }",
        out=lambda x: x, grid=1, block=3, reference=jnp.sin,
    )  # fmt: skip
    x, series = jnp.ones(3), [jnp.ones(3), jnp.zeros(3), jnp.ones(3)]
    found, wanted = (jet(lambda x, f=f: f(x), (x,), (series,)) for f in (kernel, jnp.sin))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, wanted)


def test_a_kernel_without_derivatives_says_so():
    kernel = jtk.cuda_kernel(
        "__global__ void copy(const float* x, float* out) {}",
        out=lambda x: x, grid=1, block=1,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="deflinear"):
        jet(kernel, (np.ones(3, np.float32),), ([np.ones(3, np.float32)],))
