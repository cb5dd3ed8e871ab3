"""Functions of batches of matrices."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.catalog.bounds import F32, F64, UNIT_ROUNDOFF, wide
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw, text_of
from benchmarks.catalog.oracles import ORACLES


def _identity(a):
    """Return one for each matrix, of its rank."""
    return jnp.broadcast_to(jnp.eye(a.shape[-2], a.shape[-1], dtype=a.dtype), a.shape)


def linear_algebra(draw: Draw, name: str) -> Call:
    """Draw a call whose residual is bounded by the computed factors and solution (Higham)."""
    name = name.removeprefix("linalg.")
    n, columns = draw.matrix_size(100), draw.matrix_size(20)
    batch = draw.batch(n * (n + columns), (), (), (3,), (17,))
    dtype = draw.type(F32, F64)
    u = 16 * max(8, n) * UNIT_ROUNDOFF[dtype]
    right_side = (*batch, n, columns)
    if name == "solve" and draw.for_tests:  # One vector or matrix for all systems.
        right_side = draw.one(right_side, right_side, (n,), (n, columns))
    shapes = [(*batch, n, n), right_side][: 1 + ("solve" in name)]
    operands = tuple(draw.operand(shape, dtype) for shape in shapes)
    lower, transposed, unit_diagonal = (draw.chance(0.5) for _ in range(3))
    left_side = name == "solve_triangular" or (draw.for_tests and draw.chance(0.5))
    # The triangle that is not read is NaN.
    has_nan = draw.for_tests and draw.only is None and draw.chance(0.5)

    def call(m, a, *others):
        a = jnp.matmul(a, a.mT, precision="highest") / n if name == "cholesky" else a
        a = a + (1 if name == "cholesky" else 2 * math.sqrt(n)) * _identity(a)
        function = getattr(m.linalg, name)
        read = jnp.tri(n, dtype=bool) if lower or name == "cholesky" else jnp.tri(n, dtype=bool).T
        if has_nan and (name == "cholesky" or "triangular" in name):
            a = jnp.where(read, a, jnp.nan)
        if name == "cholesky":
            options = {"symmetrize_input": False} if has_nan else {}
            options |= {"upper": True} if unit_diagonal else {}
            return a, function(a, **options)
        if name == "solve_triangular":
            options = {"lower": lower, "unit_diagonal": unit_diagonal}
            return a, function(a, *others, trans=int(transposed), **options)
        if name == "triangular_solve":
            options = {"lower": lower, "unit_diagonal": unit_diagonal}
            options["transpose_a"] = transposed == left_side
            if left_side:
                return a, function(a, *others, left_side=True, **options)
            return a, function(a, others[0].mT, left_side=False, **options).mT
        return a, function(a, *others)

    def errors(result, _, *others):
        eye = np.eye(n)
        a, found = (jax.tree.map(wide, x) for x in result)
        size = np.abs(a)
        if name == "inv":
            return [(np.abs(a @ found - eye), u * (size @ np.abs(found)))]
        if name == "solve":
            b = wide(others[0])
            found, b = (x[..., None] if b.ndim == 1 else x for x in (found, b))
            return [(np.abs(a @ found - b), u * (size @ np.abs(found)))]
        if name in ("solve_triangular", "triangular_solve"):
            a = np.tril(a) if lower else np.triu(a)
            a = a - a * eye + eye if unit_diagonal else a
            a = a.swapaxes(-1, -2) if transposed else a
            return [(np.abs(a @ found - wide(others[0])), u * (np.abs(a) @ np.abs(found)))]
        if name == "cholesky":
            a = np.tril(a) + np.tril(a, -1).swapaxes(-1, -2)
            found = found.swapaxes(-1, -2) if unit_diagonal else found
            upper = np.swapaxes(found, -1, -2)
            above = (np.abs(np.triu(found, 1)), np.zeros(a.shape))
            return [above, (np.abs(found @ upper - a), u * (np.abs(found) @ np.abs(upper)))]
        if name == "lu":
            p, left, upper = found
            return [(np.abs(p @ left @ upper - a), u * (p @ (np.abs(left) @ np.abs(upper))))]
        if name == "lu_factor":
            factors, pivots = found
            left, upper = np.tril(factors, -1) + eye, np.triu(factors)
            order = np.broadcast_to(np.arange(n), pivots.shape).copy()
            for i in range(n):
                j = pivots[..., i : i + 1]
                order[..., [i]], moved = np.take_along_axis(order, j, -1), order[..., [i]]
                np.put_along_axis(order, j, moved, -1)
            permuted = np.take_along_axis(a, order[..., None], -2)
            return [(np.abs(left @ upper - permuted), u * (np.abs(left) @ np.abs(upper)))]
        if name == "det":
            exact = np.linalg.det(a.astype(np.float64))
            condition = np.linalg.cond(a.astype(np.float64))
            bound = u * condition * np.abs(exact)
            overflows = np.abs(exact) + bound >= np.finfo(dtype).max
            with np.errstate(invalid="ignore"):
                return [(np.where(overflows, 0, np.abs(found - exact)), bound)]
        sign, logarithm = np.linalg.slogdet(a.astype(np.float64))
        return [
            (np.abs(found[0] - sign), np.zeros_like(sign)),
            (np.abs(found[1] - logarithm), u * n * np.ones_like(logarithm)),
        ]

    text = f"{lower=}, {transposed=}, {unit_diagonal=}" if "triangular" in name else ""
    if draw.for_tests:
        text = f"{lower=}, {transposed=}, {unit_diagonal=}, {left_side=}, {has_nan=}"
    return Call(f"linalg.{name}", text, operands, call, errors, is_plain=False)


def norms(a):
    """Return the Frobenius norm of each matrix, of shape ``(..., 1, 1)``."""
    return np.sqrt((np.abs(a) ** 2).sum((-2, -1), keepdims=True)).astype(np.float64)


def column_products(x):
    """Return the products of columns, without the identity."""
    return np.abs(x.mT @ x - np.eye(x.shape[-1]))


def decompositions(draw: Draw, name: str) -> Call:
    """Draw orthogonal factors whose product errs by roundings of the matrix's norm."""
    name = name.removeprefix("linalg.")
    rows, columns = draw.matrix_size(70), draw.matrix_size(70)
    rows = columns if name.startswith("eig") else rows
    batch = draw.batch(rows * columns, (), (4,), (2, 9))
    dtype = draw.type(F32, F64)
    options, rank, scale = {}, None, np.ones(columns)
    if name == "svd":
        options["full_matrices"] = draw.only is None and draw.chance(0.5)
    if name == "qr":
        options["mode"] = draw.one("reduced", "complete", "r") if draw.only is None else "reduced"
    if draw.only is None:
        powers = np.zeros(columns), np.linspace(0, -5, columns), np.full(columns, 12)
        scale, rank = 10.0 ** draw.one(*powers), draw.one(None, None, 0, 1)
    elif name == "qr":  # Derivatives of wide matrices' factors are newer than the oldest JAX.
        rows = max(rows, columns)
    operand = draw.operand((*batch, rows, columns), dtype)
    share = 12 * max(rows, columns) * UNIT_ROUNDOFF[dtype]

    def call(m, a):
        a = a if rank is None else a[..., :, :rank] @ a[..., :rank, :]
        a = a * jnp.broadcast_to(scale.astype(dtype), a.shape)
        a = (a + a.mT) / 2 if name.startswith("eig") else a
        return a, getattr(m.linalg, name)(a, **options)

    def errors(result, _):
        a = np.asarray(result[0], np.float64)
        found = [np.asarray(x, np.float64) for x in jax.tree.leaves(result[1])]
        bound = share * norms(a)
        if name in ("svdvals", "eigvalsh"):
            expected = getattr(np.linalg, name)(a)
            return [(np.abs(found[0] - expected), bound[..., 0])]
        if name == "eigh":
            w, v = found
            product, orthogonal = (v * w[..., None, :]) @ v.mT, [v]
        elif name == "svd":
            u, w, vh = found
            count = w.shape[-1]
            product = (u[..., :count] * w[..., None, :]) @ vh[..., :count, :]
            orthogonal = [u, vh.mT]
            w = -w
            if (w > 0).any():
                return [(np.full(1, np.inf), np.zeros(1))]
        elif options["mode"] == "r":
            # The factor of the product of columns is the same up to signs.
            r = found[0]
            return [
                (np.abs(r.mT @ r - a.mT @ a), 2 * bound * norms(a)),
                (np.abs(np.tril(r, -1)), 0 * bound),
            ]
        else:
            q, r = found
            product, orthogonal, w = q @ r, [q], np.zeros(1)
            if np.tril(r, -1).any():
                return [(np.full(1, np.inf), np.zeros(1))]
        # Values are in order.
        return [
            (np.abs(product - a), bound),
            *((column_products(x), np.full(1, share)) for x in orthogonal),
            ((np.diff(w) < 0).astype(float), np.zeros(1)),
        ]

    return Call(
        f"linalg.{name}",
        f"{text_of(options)}, columns times {scale[0]:.0e} to {scale[-1]:.0e}, {rank=}",
        (operand,),
        call,
        errors,
        is_plain=False,
        up_to_signs=True,
    )


def _exponential(a):
    """Return the exponentials of matrices by Taylor's series, in extended precision.

    SciPy's float64 results are up to 8 times the bound away from these.
    """
    halvings = 3 + max(0, int(np.ceil(np.log2(1 + np.linalg.norm(a, 2, axis=(-2, -1)).max()))))
    a = a.astype(np.longdouble) / 2**halvings
    term = result = np.broadcast_to(np.eye(a.shape[-1], dtype=np.longdouble), a.shape)
    for k in range(1, 20):
        term = term @ a / k
        result = result + term
    for _ in range(halvings):
        result = result @ result
    return result


def matrix_functions(draw: Draw, name: str) -> Call:
    """Draw functions of which condition numbers bound the error (Higham)."""
    name = name.removeprefix("linalg.")
    rows, columns = draw.matrix_size(40), draw.matrix_size(40)
    rows = columns if name == "expm" else rows
    batch = draw.batch(rows * columns, (), (5,))
    dtype = draw.type(F32, F64)
    size = draw.one(0.01, 1.0, 6.0 if draw.only is None else 0.5) if name == "expm" else 1.0
    operand = draw.operand((*batch, rows, columns), dtype)
    share = 16 * max(8, rows, columns) * UNIT_ROUNDOFF[dtype]

    def call(m, a):
        if name == "expm":
            a = a * (size / math.sqrt(columns))
        else:
            a = a + 2 * math.sqrt(max(rows, columns)) * _identity(a)
        return a, getattr(m.linalg, name)(a)

    def errors(result, _):
        a, found = (np.asarray(x, np.float64) for x in result)
        if name == "expm":
            expected = _exponential(a)
            norm = np.linalg.norm(a, 2, axis=(-2, -1), keepdims=True)
            error = np.abs(found - expected).astype(np.float64)
            return [(error, share * (1 + norm) * np.exp(norm))]
        expected = np.linalg.pinv(a, rcond=1e-14)
        s = np.linalg.svdvals(a)
        condition = (s[..., 0] / s[..., -1])[..., None, None]
        # Beyond this, singular values count as zeros.
        condition = np.where(condition * share < 0.1, condition, np.inf)
        return [(np.abs(found - expected), share * condition / s[..., -1:, None])]

    return Call(
        f"linalg.{name}", f"size {size}", (operand,), call, errors, is_plain=False
    )  # fmt: skip


def newton_schulz(draw: Draw, name: str) -> Call:
    """Draw matrices whose singular values five polynomials move toward 1."""
    rows, columns = draw.matrix_size(70), draw.matrix_size(70)
    batch = draw.batch(rows * columns, (), (3,))
    operand = draw.operand((*batch, rows, columns), F32)
    # Each step multiplies errors by at most the polynomial's largest derivative.
    share = 3.4445**5 * 16 * max(8, rows, columns) * UNIT_ROUNDOFF[F32]

    def errors(result, x):
        with jax.enable_x64(True):
            expected = np.asarray(ORACLES.linalg.newton_schulz(jnp.asarray(x, F64)))
        return [(np.abs(np.asarray(result, np.float64) - expected), share * np.ones(x.shape))]

    return Call(
        name, "", (operand,), lambda m, x: m.linalg.newton_schulz(x, precision="highest"), errors,
        is_plain=False,
    )  # fmt: skip


DESCRIPTIONS = [
    *describe(
        linear_algebra, "linalg.inv", "linalg.det", "linalg.slogdet", "linalg.lu",
        "linalg.lu_factor", "linalg.cholesky", "linalg.solve", "linalg.solve_triangular",
        "linalg.triangular_solve",
    ),
    *describe(
        decompositions, "linalg.svd", "linalg.svdvals", "linalg.eigh", "linalg.eigvalsh",
        "linalg.qr", derivatives=1, tolerance=1e-2,
    ),
    *describe(matrix_functions, "linalg.expm", "linalg.pinv", tolerance=1e-3),
    *describe(newton_schulz, "linalg.newton_schulz", tolerance=1e-2),
]  # fmt: skip
