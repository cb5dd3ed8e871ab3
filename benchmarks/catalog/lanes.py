"""Functions of an element, by ``kernel``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tilekern as jtk
from benchmarks.catalog.bounds import F32, F64, UNIT_ROUNDOFF, compared, wide
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw


def steps(draw: Draw, name: str) -> Call:
    """Draw a loop of which the number of steps depends on the element."""
    operand = draw.operand((draw.size(),), np.dtype("int32"))

    def length(n):
        def step(state):
            n, count = state
            return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

        start = jnp.abs(n) + 1, jnp.zeros_like(n)
        return lax.while_loop(lambda state: state[0] != 1, step, start)[1]

    mapped = jax.vmap(length), jtk.kernel(length)

    def exact(n):
        n, found = int(abs(n)) + 1, 0
        while n != 1:
            n, found = (n // 2 if n % 2 == 0 else 3 * n + 1), found + 1
        return found

    return Call(
        name, "", (operand,), lambda m, n: mapped[m is jtk](n),
        lambda result, n: [compared(result, np.array([exact(x) for x in n], np.int64), 0)],
        is_plain=False,
    )  # fmt: skip


def branch(draw: Draw, name: str) -> Call:
    """Draw a function with a branch."""
    dtype, count = draw.type(F32, F64), draw.size()
    u = UNIT_ROUNDOFF[dtype]
    operands = tuple(draw.operand((count,), dtype) for _ in range(2))

    def either(x, y):
        return lax.cond(x > y, lambda x, y: x * x + y, lambda x, y: x - y * y, x, y)

    mapped = jax.vmap(either), jtk.kernel(either)

    def errors(result, x, y):
        x, y = wide(x), wide(y)
        size = np.abs(x) + np.abs(y) + x * x + y * y
        return [compared(result, np.where(x > y, x * x + y, x - y * y), 2 * u * size)]

    def cotangent_errors(cotangents, ct, x, y):
        x, y, ct = wide(x), wide(y), wide(ct)
        slacks = 4 * u * np.abs(ct) * (1 + np.abs(x)), 4 * u * np.abs(ct) * (1 + np.abs(y))
        return [
            compared(cotangents[0], ct * np.where(x > y, 2 * x, 1), slacks[0]),
            compared(cotangents[1], ct * np.where(x > y, 1, -2 * y), slacks[1]),
        ]

    return Call(
        name, "", operands, lambda m, *xs: mapped[m is jtk](*xs), errors,
        cotangent_errors, is_plain=False,
    )  # fmt: skip


def polynomial(draw: Draw, name: str) -> Call:
    """Draw a function with a loop."""
    dtype, count, degree = draw.type(F32, F64), draw.size(), draw.one(0, 1, 3, 12)
    u = UNIT_ROUNDOFF[dtype]
    operands = draw.operand((count,), dtype), draw.operand((degree + 1,), dtype)

    def horner(x, c):
        def step(i, y):
            return y * x + c[degree - i]

        return lax.fori_loop(0, degree + 1, step, jnp.zeros_like(x))

    # The same functions in each call.
    mapped = jax.vmap(horner, (0, None)), jtk.kernel(horner, in_axes=(0, None))

    def powers(x):
        return wide(x)[:, None] ** np.arange(degree + 1)

    def errors(result, x, c):
        size = np.abs(powers(x)) @ np.abs(wide(c))
        return [compared(result, powers(x) @ wide(c), 2 * (degree + 2) * u * size)]

    def cotangent_errors(cotangents, ct, x, c):
        ct, p, i = wide(ct), powers(x), np.arange(1, degree + 1)
        slope, size = p[:, :-1] @ (i * wide(c)[1:]), np.abs(p[:, :-1]) @ (i * np.abs(wide(c)[1:]))
        share = 4 * (degree + 2) * u
        of_c = (share + (count + 1) * u) * (np.abs(ct) @ np.abs(p))
        return [
            compared(cotangents[0], ct * slope, share * np.abs(ct) * size),
            compared(cotangents[1], ct @ p, of_c),
        ]

    return Call(
        name, f"degree {degree}", operands,
        lambda m, x, c: mapped[m is jtk](x, c), errors, cotangent_errors,
        is_plain=False,
    )  # fmt: skip


DESCRIPTIONS = [
    *describe(polynomial, "kernel"),
    *describe(branch, "kernel, branch"),
    *describe(steps, "kernel, while", derivatives=0),
]
