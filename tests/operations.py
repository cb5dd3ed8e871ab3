"""One table of the library's operations: each with JAX's own, and letters for its operands."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np

import jax_tilekern as jtk

ROWS = 8
LABELS = np.arange(ROWS, dtype=np.int32) % 4
SIZES = np.array([3, 5], np.int32)
# Rows and their residual, weights, vectors, weights of groups; batches of matrices that are
# regular (a) or positive definite (p), and their right-hand sides.
SHAPES = {
    "x": (ROWS, 4), "r": (ROWS, 4), "w": (4, 4), "u": (4, 4), "b": (4,), "v": (4,), "g": (2, 4, 4),
    "a": (ROWS, 4, 4), "p": (ROWS, 4, 4), "c": (ROWS, 4, 4),
}  # fmt: skip
# Those of which a device has some rows, or some matrices.
BY_ROWS = "xrapc"


def shapes_of(name):
    return [SHAPES[letter] for letter in OPERATIONS[name][2]]


def arrays_of(rng, name, dtype=np.float32):
    """Normal operands of an operation, in NumPy."""

    def drawn(letter):
        x = rng.standard_normal(SHAPES[letter]) / 2
        if letter == "a":
            return x + 4 * np.eye(4)
        return x @ x.mT + np.eye(4) if letter == "p" else x

    return [drawn(letter).astype(dtype) for letter in OPERATIONS[name][2]]


def tanh_plus(y, b):
    return jnp.tanh(y + b)


def layer(x, w, b):
    return tanh_plus(x @ w, b[None])


def by_groups(x, w):
    return jnp.concatenate([x[: SIZES[0]] @ w[0], x[SIZES[0] :] @ w[1]])


def cross_entropy(h, w):
    y = h @ w
    labelled = (jax.nn.one_hot(LABELS, 4, dtype=y.dtype) * y).sum(-1)
    return (jax.nn.logsumexp(y, -1) - labelled).mean()


def with_row(reduce):
    return lambda x, w: jtk.matmul(x, w, epilogue=reduce)


def tensor_product(name, *arguments, **keywords):
    """A function of the same name in both modules; subscripts come before the operands."""

    def of(module):
        return functools.partial(getattr(module, name), *arguments, **keywords)

    return of(jtk), of(jnp)


def segments(name):
    return tuple(lambda x, m=module: getattr(m, name)(x, LABELS, 4) for module in (jtk, jax.ops))


def message(x, w):
    return jnp.tanh(x) * w


# Ours, the same by JAX, and the letters of the operands.
OPERATIONS = {
    "matmul": (jtk.matmul, jnp.matmul, "xw"),
    "dot": (jtk.dot, jnp.dot, "xw"),
    "vdot": (jtk.vdot, jnp.vdot, "xr"),
    "matvec": (jtk.matvec, jnp.matvec, "xv"),
    "vecmat": (lambda x, v: jtk.vecmat(v, x.T), lambda x, v: jnp.vecmat(v, x.T), "xv"),
    "einsum": (*tensor_product("einsum", "ij,jk->ki"), "xw"),
    "einsum of three": (*tensor_product("einsum", "ij,jk,k->i"), "xwb"),
    "tensordot": (*tensor_product("tensordot", axes=1), "xw"),
    "inner": (jtk.inner, jnp.inner, "xw"),
    "vecdot": (jtk.vecdot, jnp.vecdot, "xr"),
    "multi_dot": (
        lambda *xs: jtk.multi_dot(xs),
        lambda *xs: jnp.linalg.multi_dot(xs),
        "xwu",
    ),
    "ragged_dot": (lambda x, w: jtk.ragged_dot(x, w, SIZES), by_groups, "xg"),
    "ragged_dot, epilogue": (
        lambda x, w, b: jtk.ragged_dot(x, w, SIZES, epilogue=tanh_plus, operands=(b,)),
        lambda x, w, b: tanh_plus(by_groups(x, w), b[None]),
        "xgb",
    ),
    "epilogue": (
        lambda x, w, b: jtk.matmul(x, w, epilogue=tanh_plus, operands=(b,)),
        layer,
        "xwb",
    ),
    "residual": (
        lambda x, w, r: jtk.matmul(x, w, epilogue=tanh_plus, operands=(r,)),
        lambda x, w, r: tanh_plus(x @ w, r),
        "xwr",
    ),
    "linear": (
        lambda x, w, b: jtk.linear(x, w, b, jax.nn.silu),
        lambda x, w, b: jax.nn.silu(x @ w + b[None]),
        "xwb",
    ),
    "gated_linear": (jtk.gated_linear, lambda x, w, u: jax.nn.silu(x @ w) * (x @ u), "xwu"),
    "row_sum": (
        with_row(lambda y: jtk.row_sum(y * y)),
        lambda x, w: ((x @ w) ** 2).sum(-1, dtype=x.dtype),
        "xw",
    ),
    "row_max": (with_row(jtk.row_max), lambda x, w: (x @ w).max(-1), "xw"),
    "row_logsumexp": (
        with_row(jtk.row_logsumexp),
        lambda x, w: jax.nn.logsumexp(x @ w, -1),
        "xw",
    ),
    "fuse": (jtk.fuse(layer), layer, "xwb"),
    "patch": (jtk.patch()(layer), layer, "xwb"),
    "sum": (lambda x: jtk.sum(x, 0, initial=1.5), lambda x: jnp.sum(x, 0, initial=1.5), "x"),
    "transpose": (jtk.transpose, jnp.transpose, "x"),
    "add": (jtk.add, jnp.add, "xr"),
    "strassen_matmul": (jtk.strassen_matmul, jnp.matmul, "xw"),
    "linear_cross_entropy": (
        lambda h, w: jtk.linear_cross_entropy(h, w, LABELS),
        cross_entropy,
        "xw",
    ),
    "segment_sum": (*segments("segment_sum"), "x"),
    "segment_max": (*segments("segment_max"), "x"),
    "segment_reduce": (
        lambda x, w: jtk.segment_reduce(
            message, w, x, segment_ids=LABELS, num_segments=4, gather=(LABELS, None)
        ),
        lambda x, w: jax.ops.segment_sum(message(w[LABELS], x), LABELS, 4),
        "xw",
    ),
    "take": (
        lambda w: jtk.take(w, LABELS, axis=0),
        lambda w: jnp.take(w, LABELS, axis=0),
        "w",
    ),
    "top_k": (lambda x: jtk.top_k(x, 2)[0], lambda x: jax.lax.top_k(x, 2)[0], "x"),
    "symmetric_matmul": (
        lambda p: jtk.symmetric_matmul(p, p, epilogue=jnp.add, operands=(p,)),
        lambda p: p @ p + p,
        "p",
    ),
    "svdvals": (jtk.linalg.svdvals, jnp.linalg.svdvals, "a"),
    "eigvalsh": (jtk.linalg.eigvalsh, jnp.linalg.eigvalsh, "p"),
    "qr": (lambda a: jtk.linalg.qr(a).Q, lambda a: jnp.linalg.qr(a).Q, "a"),
    "inv": (jtk.linalg.inv, jnp.linalg.inv, "a"),
    "det": (jtk.linalg.det, jnp.linalg.det, "a"),
    "slogdet": (lambda a: jtk.linalg.slogdet(a)[1], lambda a: jnp.linalg.slogdet(a)[1], "a"),
    "lu": (
        lambda a: jtk.linalg.lu(a)[2],
        jnp.vectorize(lambda a: jsp_linalg.lu(a)[2], signature="(n,n)->(n,n)"),
        "a",
    ),
    "lu_factor": (
        lambda a: jtk.linalg.lu_factor(a)[0],
        lambda a: jsp_linalg.lu_factor(a)[0],
        "a",
    ),
    "cholesky": (jtk.linalg.cholesky, jnp.linalg.cholesky, "p"),
    "solve": (jtk.linalg.solve, jnp.linalg.solve, "ac"),
    "solve_triangular": (
        functools.partial(jtk.linalg.solve_triangular, lower=True),
        functools.partial(jsp_linalg.solve_triangular, lower=True),
        "ac",
    ),
}
MATRICES = [name for name, (_, _, letters) in OPERATIONS.items() if letters[0] in "ap"]
