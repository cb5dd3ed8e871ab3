"""Expressions of one element, by what a translation may get wrong about them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from lane_functions import NUMBERS, N, integers_of, normal


def broadcasts(x, i):
    """Operands whose dimensions of size 1 are broadcast."""
    y = x[::-1] * 1.5
    column, row, one = x[:, :1], x[:1], x[1:2, 2:3]
    return (
        x - x.mean(1, keepdims=True), x - x.mean(0, keepdims=True), x[2, 1] * y[1, 3],
        x / jnp.linalg.norm(x, axis=1, keepdims=True), x.var(0), x.std(1, keepdims=True) + x,
        jnp.clip(x, column, column + 1), jnp.clip(x, row - 1, row), column + row, row - column,
        lax.mul(column, x), lax.max(x, row), lax.sub(one, x), lax.lt(x, column),
        lax.atan2(row, x), lax.select(x > row, x, y), jnp.where(x > column, x, row),
        x.sum(1, keepdims=True) * x.sum(0, keepdims=True), jax.nn.softmax(x, 0),
        jax.nn.standardize(x), x.T @ x - x.T @ column, x[None] * x[:, None], x[i, None] + column,
        jnp.broadcast_to(column, (3, 4)) * x, lax.shift_left(jnp.int32(x), jnp.int32(row) & 3),
        lax.pow(jnp.abs(column), jnp.abs(x)), (row + 0 * one).reshape(4), x.reshape(3, 2, 2) * one,
        lax.clamp(-0.5, x, jnp.float32(0.5)), jnp.cross(x[:, :3], column * row[:, :3]),
    )  # fmt: skip


def orders(x):
    """Reshapes in other orders than the row-major one."""
    return (
        x.reshape(4, 3, order="F"), x.ravel(order="F"), x.reshape(2, 6, order="F"),
        lax.reshape(x, (12,), dimensions=(1, 0)), lax.reshape(x, (4, 3), dimensions=(1, 0)),
        lax.reshape(x.reshape(3, 2, 2), (6, 2), dimensions=(2, 0, 1)), x.T.ravel(order="F"),
        x.reshape(3, 4, order="F"), x[:, :1].reshape(3, order="F"),
        lax.reshape(x[:, ::-1], (3, 4), dimensions=(1, 0)),
    )  # fmt: skip


def mapped_loops(x, n):
    """Loops and branches, mapped over elements with bounds of their own."""

    def trips(count):
        return lax.fori_loop(0, count, lambda i, c: c + 1, 0)

    def swapped(x, count):
        """Updates in place, and values that exchange places."""

        def step(state):
            i, a, b = state
            return i + 1, b.at[i % 4].add(x), a[::-1]

        return lax.while_loop(lambda s: s[0] < count, step, (0, jnp.arange(4.0), jnp.ones(4)))

    def until(limit):
        """A bound that is a constant of the condition."""
        return lax.while_loop(lambda c: c < limit, lambda c: 2 * c + 1, jnp.float32(0))

    def stacked(x, count):
        found, rows = lax.scan(lambda c, i: (c + i, c), x, jnp.arange(3.0))
        return lax.cond(count > 1, lambda: found, lambda: -found), rows

    def switched(x, count):
        return lax.switch(count, [lambda x: x, lambda x: x * 2, lambda x: lax.cos(x)], x)

    def both(x, count):
        return lax.fori_loop(0, count, lambda i, c: jnp.sin(c) + trips(i), x)

    counts, rows = jnp.abs(n) % 4, x.reshape(3, 4)
    return (
        jax.vmap(trips)(counts), jax.vmap(until)(8 * rows[0]), jax.vmap(swapped)(rows[1, :3], n),
        jax.vmap(stacked)(rows[1], n[:1].repeat(4)), jax.vmap(switched)(rows[1, :3], n),
        jax.vmap(jax.vmap(both, (0, None)))(rows, n),
        jax.vmap(jax.vmap(both, (None, 0)), (0, None))(x[:3], n),
        jax.vmap(swapped, (None, 0), (0, 1, 1))(x[0], counts), jax.vmap(trips)(counts[:1]),
        jax.vmap(lambda x: lax.while_loop(lambda c: jnp.bool(n[0] > 9), jnp.cos, x))(x),
        jax.vmap(lambda x, n: lax.while_loop(lambda s: s[0] < n,
                 lambda s: (s[0] + 1, rows[s[0] % 3] * s[1][0]), (0, x)))(rows, n),
    )  # fmt: skip


def updates(x, i, values):
    """Updates of elements in each mode, some of them of the same element."""
    modes, found = ("clip", "drop", "promise_in_bounds", "fill"), []
    j, k = i % 5, jnp.array([0, 3, 3])
    for mode in modes:
        at = jnp.clip(i, 0, 4) if mode == "promise_in_bounds" else i
        found += [
            x.at[at].apply(jnp.sin, mode=mode), x.at[at].subtract(values[0], mode=mode),
            x.at[at].multiply(values[0], mode=mode), x.at[at].divide(2.0, mode=mode),
            x.at[at].min(values[1], mode=mode), x.at[at].max(values[1], mode=mode),
            x.at[at].power(2, mode=mode), x.at[at].add(values[1], mode=mode),
            x.at[at].set(values[1], mode=mode), x.at[at].get(mode=mode),
        ]  # fmt: skip
    square = jnp.outer(x, x)
    return (
        *found, x.at[j].apply(lambda v: jnp.where(v > 0, v, 3 * v)), x.at[k].subtract(values),
        x.at[k].multiply(values), x.at[k].add(values), x.at[1:4].apply(lambda v: v + 1),
        square.at[j].apply(jnp.cos), square.at[:, j].subtract(x), square.at[j, 1:3].min(0.1),
        jax.vmap(lambda row, i: row.at[i % 5].apply(jnp.exp))(square, jnp.arange(5) + i),
        x.at[i].get(mode="fill", fill_value=7), jnp.int32(x).at[i].get(mode="fill"),
        jnp.uint8(jnp.abs(x)).at[i].get(mode="fill"), (x > 0).at[i].get(mode="fill"),
        jnp.int16(x).at[i].get(mode="fill", fill_value=-3),
        jnp.int32(x).at[k].apply(lambda v: v * v),
        x.astype(jnp.bfloat16).at[j].apply(lambda v: v * v), x.at[j].mul(x[0], unique_indices=True),
    )  # fmt: skip


def index_types(x, i):
    """Indices of every type, of which some are out of bounds."""
    found = []
    for dtype in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32):
        j = i.astype(dtype)
        found += [
            lax.dynamic_slice(x, (j,), (3,)), lax.dynamic_update_slice(x, x[:2] * 2, (j,)), x[j],
            x.at[j].set(9.0), x.at[j].get(mode="clip"), x.at[j].get(mode="fill"),
            lax.dynamic_index_in_dim(x, j, keepdims=False), x.at[j].add(1.0, mode="drop"),
        ]  # fmt: skip
    return tuple(found)


def long_index_types(x, i):
    """Arrays that are longer than a type of 8 bits counts."""
    return [
        (lax.dynamic_slice(x, (j,), (2,)), lax.dynamic_update_slice(x, x[:2], (j,))[::25])
        for j in (i.astype(jnp.int8), i.astype(jnp.uint8))
    ]


def wide_index_types(x, i):
    return [
        (lax.dynamic_slice(x, (j,), (3,)), x[j], x.at[j].set(9.0), x.at[j].get(mode="clip"))
        for j in (i, i.astype(jnp.uint64), i + 2**40, i - 2**40)
    ]


def narrow_ranges(i):
    found = [
        lax.iota(dtype, size)[size - 3 :].astype(jnp.float32)
        for dtype, size in ((jnp.bfloat16, 260), (jnp.float16, 2052), (jnp.int8, 130))
    ]
    grid = lax.broadcasted_iota(jnp.bfloat16, (300, 2), 0)
    return (
        *found, jnp.arange(258, dtype=jnp.bfloat16)[256 + i % 2], grid[255 + i % 40, 1],
        jnp.linspace(0, 300, 7, dtype=jnp.bfloat16), jnp.arange(3, dtype=jnp.float16) * i,
    )  # fmt: skip


def powers(x, n):
    whole = jnp.abs(n) % 5
    return (
        x**n, lax.pow(x, n), lax.pow(x, whole.astype(jnp.uint8)), jnp.power(x, 3), x**-2, x**0,
        n**whole, lax.integer_pow(n, 3), lax.integer_pow(x, -3), x ** jnp.float32(2), jnp.square(n),
        lax.pow(jnp.stack([x, -x]), jnp.stack([n, whole])), 2.0**n, jnp.float_power(jnp.abs(x), n),
        lax.pow(x.astype(jnp.bfloat16), whole), jnp.sinc(x), jnp.sinc(x * 0), jnp.ldexp(x, n),
    )  # fmt: skip


def reducers(x, n):
    """Reductions by functions of the user's."""

    def largest(a, b):
        value, index = a
        other, at = b
        is_first = (value > other) | ((value == other) & (index < at))
        return jnp.where(is_first, value, other), jnp.where(is_first, index, at)

    numbers = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    pair = (jnp.float32(-jnp.inf), jnp.int32(0))
    return (
        lax.reduce(x, jnp.float32(0), lambda a, b: a + b, (0,)),
        lax.reduce(x, jnp.float32(1), lambda a, b: a * b, (0, 1)),
        lax.reduce(x, jnp.float32(-1), lax.max, (1,)), lax.reduce(n, 0, lambda a, b: a ^ b, (0,)),
        lax.reduce(n > 0, False, lambda a, b: a != b, (0,)),
        lax.reduce((x, numbers), pair, largest, (1,)),
        lax.reduce((x, numbers), pair, largest, (0, 1)),
        lax.reduce((x, x * 2), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,)),
        lax.reduce(x, jnp.float32(0), lambda a, b: jnp.hypot(a, b), (1,)),
        lax.cumlogsumexp(x, 1), lax.cumlogsumexp(x, 0, reverse=True),
        lax.cumprod(x, 1, reverse=True),
        jnp.logaddexp.reduce(x, axis=1), lax.reduce(x[:, :0], jnp.float32(3), lax.add, (1,)),
        lax.cumsum(x, 1, reverse=True), lax.cummin(n, reverse=True), lax.argmin(x, 1, jnp.int8),
        lax.argmax(n, 0, jnp.uint8),
    )  # fmt: skip


def edges(x, n):
    """What C++ leaves undefined, or CUDA computes otherwise."""
    zero, one, two = (jnp.asarray(value, x.dtype) for value in range(3))
    lowest = jnp.asarray(jnp.iinfo(n.dtype).min, n.dtype)
    found = [x.astype(t) for t in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.uint32, bool)]
    return (
        *found, x.astype(jnp.int32), jnp.sign(x), lax.rem(x, two), lax.rem(n, n - n),
        lax.div(n, n - n), lax.div(lowest, n), lax.rem(lowest, n),
        lax.shift_left(n, n), lax.shift_right_logical(n, n), lax.shift_right_arithmetic(n, n),
        lax.shift_left(n.astype(jnp.int8), n.astype(jnp.int8)), lax.clamp(n, lowest + 3, n - 5),
        lax.max(x, -x), lax.min(x, zero), lax.clamp(zero, x, one),
        jnp.floor_divide(x, 2), jnp.remainder(n, -3), jnp.remainder(x, -3), jnp.abs(n),
        lax.abs(lowest + 0 * n), jnp.nextafter(x, x + 1), jnp.copysign(x, -x),
        jnp.signbit(lax.sign(x) * 0), n.astype(jnp.float16),
        (1000 * n).astype(jnp.int8), x.astype(jnp.float16).astype(jnp.int8), lax.round(x),
        lax.select_n(n % 2 == 0, x, -x), lax.select_n(x > 0, jnp.stack([n, n]), jnp.stack([n, -n])),
        lax.select_n(jnp.int32(jnp.abs(n) % 3), x, 2 * x, 3 * x),
        lax.select_n(jnp.int32(n > 0), x, -x),
        jnp.trunc(x), jnp.heaviside(x, 0.5), lax.convert_element_type(n, bool), jnp.logaddexp(x, x),
    )  # fmt: skip


def mixed_products(a, b):
    """Products whose results have types of their own."""
    x, y = a.astype(jnp.int8), b.astype(jnp.int8)
    narrow = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return (
        lax.dot(x, y, preferred_element_type=jnp.int32), lax.dot(x, y), x @ y,
        lax.dot(*narrow, preferred_element_type=jnp.float32), lax.dot(*narrow),
        lax.dot(a.astype(jnp.float16), b.astype(jnp.float16), preferred_element_type=jnp.float32),
        lax.dot(a, b, precision=lax.Precision.HIGHEST), lax.dot(a, b, precision="default"),
        jnp.einsum("ij,ji->i", a, b), jax.vmap(jnp.dot, (0, 1))(a, b), jnp.vdot(a[0], b[:, 1]),
        lax.dot_general(a, b, (((0, 1), (1, 0)), ((), ()))), jnp.kron(a[:, :2], b[:2]),
    )  # fmt: skip


def tridiagonal(lower, diagonal, upper, b):
    """Systems with one or more right sides, batches of them, and a singular one."""

    def solve(*operands):
        return lax.linalg.tridiagonal_solve(*operands)

    batch = [jnp.stack([x, 2 * x]) for x in (lower, diagonal, upper)]
    return (
        solve(lower, diagonal, upper, b), solve(lower, diagonal, upper, b[:, :1]),
        solve(*batch, jnp.stack([b, b[::-1]])), solve(lower, 0 * diagonal, upper, b)[:, 0],
        solve(lower[:1], diagonal[:1], upper[:1], b[:1]),
        solve(lower[:2], b[:2, 0], upper[:2], b[:2]),
        solve(lower[:3], diagonal[:3], upper[:3], b[:3]),
        solve(lower[:5], diagonal[:5], upper[:5], b[:5]),
        solve(0 * lower, diagonal.at[2].set(0), 0 * upper, b),
    )  # fmt: skip


def spectra(a):
    """Eigenvalues and singular values, and products that signs of vectors do not change."""
    symmetric = a + a.T
    values, vectors = jnp.linalg.eigh(symmetric)
    low_rank = jnp.concatenate([a[:, :2], a[:, :1]], 1)
    found = []
    for x in (a, a[:3], a[:, :3], a[:1], low_rank):
        left, sizes, right = jnp.linalg.svd(x, full_matrices=False)
        found += [sizes, left * sizes @ right, left.T @ left, right @ right.T]
    left, _, right = jnp.linalg.svd(a[:, :2])
    return (
        *found, values, jnp.abs(vectors), vectors * jnp.exp(values) @ vectors.T,
        jnp.linalg.eigvalsh(jnp.stack([a, a.T]), UPLO="L"), jnp.linalg.eigvalsh(symmetric[:3, :3]),
        left.T @ left, right @ right.T, jnp.linalg.svd(a, compute_uv=False), jnp.linalg.pinv(a),
        jnp.linalg.cond(a), jnp.linalg.matrix_rank(low_rank), jnp.linalg.norm(a, 2),
        jnp.linalg.eigvalsh(symmetric.at[0, 0].set(jnp.nan)), jnp.linalg.eigvalsh(jnp.eye(3)),
        jnp.linalg.svd(0 * a, compute_uv=False), jnp.linalg.lstsq(a, a[:, 0])[0],
    )  # fmt: skip


def special(a, x):
    f = jax.scipy.special
    return (
        f.gammainc(a, x), f.gammaincc(a, x), f.betainc(a, a + 1, x / 9), f.i0e(x),
        f.i1e(-x), f.i0(x), f.zeta(a + 1.1, x), f.polygamma(2, x), f.polygamma(0, a),
        lax.zeta(a + 1, -x / 2), lax.zeta(jnp.float32(4), jnp.floor(-x)), lax.lgamma(a),
        f.gammainc(a.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
        jax.scipy.stats.gamma.cdf(x, a), jax.scipy.stats.beta.cdf(x / 9, a, 2.0),
    )  # fmt: skip


def ciphers(n):
    """Keys of other ciphers than the usual one, and the arithmetic that they are made of."""
    narrow = n.astype(jnp.int8)
    found = [lax.mulhi(n, n[::-1]), lax.mulhi(narrow, 3 * narrow)]
    for name in ("philox4x32", "threefry2x32"):
        key = jax.random.fold_in(jax.random.key(3, impl=name), n[0])
        one, two = jax.random.split(key)
        found += [jax.random.bits(one, (5,)), jax.random.uniform(two, (3,)), jax.random.poisson(
            jax.random.key(n[1]), jnp.float32([0.5, 20]))]  # fmt: skip
    return found


def calls(x):
    """Functions with rules for transformations, which a lane evaluates as they are."""

    @jax.custom_batching.custom_vmap
    def doubled(x):
        return 2 * x

    doubled.def_vmap(lambda size, batched, x: (2 * x, batched[0]))
    return doubled(x), lax.eq_to_p.bind(x, jnp.abs(x))


def complex_numbers(x, y):
    """Functions of complex numbers, zeros and others."""
    return (
        x + y, x - y, x * y, x / y, 2 * x + 1j, -x, jnp.exp(x), jnp.log(y), jnp.sqrt(x),
        jnp.sin(x), jnp.cos(x), jnp.sinh(x), jnp.cosh(x), y**x, x**3, y**-2,
        y ** x.imag.astype(int), jnp.zeros_like(x) ** jnp.abs(x).astype(x.dtype),
        jnp.square(x), jnp.sign(x), jnp.abs(x), jnp.angle(x),
        x.conj(), x.real, x.imag, x == y, x != y, jnp.where(x.real > 0, x, y),
        lax.complex(x.real, y.imag), y.real.astype(x.dtype), x.astype(bool),
    )  # fmt: skip


def complex_loops(x, y):
    """A quantum state in a scan, and a Mandelbrot sequence."""
    hamiltonian = jnp.outer(x, x.conj())

    def step(psi, _):
        psi = psi - 0.1j * hamiltonian @ psi
        psi = psi / jnp.sqrt(jnp.sum(jnp.abs(psi) ** 2))
        return psi, (psi, psi.real)

    _, count = lax.while_loop(
        lambda state: (jnp.abs(state[0]) < 2) & (state[1] < 9),
        lambda state: (state[0] ** 2 + x[0], state[1] + 1),
        (jnp.zeros_like(x[0]), 0),
    )
    return lax.scan(step, y, None, length=5), count


def complex_arrays(x, i):
    return (
        x[i], x.at[i].set(1j), x.at[i].add(x[0]), x.sum(), x.cumsum(), x.reshape(2, 3).T,
        jnp.concatenate([x, x.conj()]), jnp.pad(x, 1), jnp.vdot(x, x), x.mean(), x[::-1],
        lax.cond(i > 2, lambda x: x * 1j, lambda x: x + 1, x), jnp.where(x.real > 0, x, 1j),
        x.real.reshape(2, 3) @ x.reshape(3, 2), x.reshape(2, 3) @ x.imag.reshape(3, 2),
        jax.vmap(lambda x: lax.while_loop(lambda x: abs(x) < 2, lambda x: 2 * x + 1j, x))(x),
    )  # fmt: skip


def complex_rows(x):
    """Rows that a CTA copies together, as parts of complex results."""
    return lax.complex(x, x[::-1]), x.at[0].set(0), jnp.conj(lax.complex(x, x))


def fourier(x):
    """Transforms of prime, even and odd numbers of points."""
    z, pairs = lax.complex(x, x[::-1]), x.reshape(2, 6)
    return (
        jnp.fft.fft(z), jnp.fft.ifft(z[:9]), jnp.fft.rfft(x), jnp.fft.irfft(z), jnp.fft.rfft(x[:7]),
        jnp.fft.irfft(z[:6], 11), jnp.fft.rfft2(pairs), jnp.fft.irfft2(lax.complex(pairs, pairs)),
        jnp.fft.fft(z[:1]),
    )  # fmt: skip


def table():
    """Return the cases by name: function, in_axes and arguments."""
    numbers = np.arange(N, dtype=np.int32)
    counts = np.array([[3, 0, 1], [0, 0, 0], [-1, 5, 2]] * 3, np.int32)[:N]
    special_numbers = np.float32([0, -0.0, np.nan, np.inf, -np.inf, -3.7, 2.5e9])
    arguments = {
        broadcasts: (normal(N, 3, 4), numbers % 3),
        orders: (normal(N, 3, 4),),
        mapped_loops: (normal(N, 12), counts),
        updates: (normal(N, 5), 2 * numbers - 7, normal(N, 3)),
        index_types: (normal(N, 5), NUMBERS // 25),
        long_index_types: (normal(N, 300), NUMBERS),
        narrow_ranges: (numbers,),
        powers: (np.float32([0.7, -1.3, 2, 0, 1, -0.5, 3]), NUMBERS // 25),
        reducers: (normal(N, 3, 4), integers_of(N, 5)),
        edges: (special_numbers, NUMBERS),
        mixed_products: (normal(N, 3, 4) * 9, normal(N, 4, 3) * 9),
        tridiagonal: (*diagonals(6), normal(N, 6, 2)),
        spectra: (normal(N, 4, 4),),
        special: (np.linspace(0.3, 6, N, dtype=np.float32), np.abs(normal(N)) * 5),
        ciphers: (integers_of(N, 4, low=0),),
        calls: (normal(N, 3),),
        complex_numbers: (
            np.complex64([0, 1j, -2, 3 + 4j, 1 - 1j, -0.3 + 2j, 1]), complex_normal(N),
        ),
        complex_loops: (complex_normal(N, 3), complex_normal(N, 3)[::-1]),
        complex_arrays: (complex_normal(N, 6), numbers % 6),
        complex_rows: (normal(N, 70),),
        fourier: (normal(N, 12),),
    }  # fmt: skip
    return {function.__name__: (function, 0, args) for function, args in arguments.items()}


def complex_normal(*shape, dtype=np.complex64):
    return (normal(*shape) + 1j * normal(*shape, seed=1)).astype(dtype)


def diagonals(size, scale=0.3):
    """Return systems whose own diagonals are small, so that rows are exchanged."""
    lower, diagonal, upper = normal(3, N, size)
    return lower, np.float32(scale) * diagonal, upper


def wide_table():
    """Return the cases of 64-bit types."""
    special_numbers = np.array([0, -0.0, np.nan, np.inf, -np.inf, -3.7, 2.5e9])
    numbers = NUMBERS.astype(np.int64)
    return {
        "edges64": (edges, 0, (special_numbers, numbers)),
        "complex128": (complex_loops, 0, (complex_normal(N, 3, dtype=np.complex128),) * 2),
        "index_types64": (wide_index_types, 0, (normal(N, 5), numbers // 25)),
    }


def gradients():
    """Return scalar functions of ``map``, which is ``kernel`` or ``vmap``, and their arguments."""

    def of(function, map_, x, *others):
        found = map_(function)(x, *others)
        return sum(jnp.sum(y) for y in found if y.dtype.kind == "f")

    def of_spectra(map_, a):
        def invariants(a):
            values, vectors = jnp.linalg.eigh(a + a.T)
            left, sizes, right = jnp.linalg.svd(a[:3], full_matrices=False)
            root = vectors * jnp.cos(values) @ vectors.T
            return sizes, (left @ right)[0], root[0], values**2

        return of(invariants, map_, a)

    def of_special(map_, a, x):
        def with_derivatives(a, x):
            functions = jax.scipy.special
            return (
                functions.gammainc(a, x), functions.gammaincc(a, x), functions.i0e(x),
                functions.betainc(2.0, 1.5, x / 19), functions.i1e(-x), lax.digamma(a),
            )  # fmt: skip

        return of(with_derivatives, map_, a, x)

    def of_complex(map_, x, y):
        (psi, (states, parts)), _ = map_(complex_loops)(x, y)
        spectra = map_(lambda x: jnp.fft.irfft(jnp.fft.rfft(jnp.abs(x)) ** 2, 3))(y)
        of_states = jnp.sum(states.imag**2 + parts**2)
        return jnp.sum(jnp.abs(psi - 1) ** 3) + of_states + jnp.sum(spectra**2)

    numbers = np.arange(N, dtype=np.int32) % 3
    return {
        "complex": (of_complex, (complex_normal(N, 3), complex_normal(N, 3)[::-1])),
        "tridiagonal": (
            lambda map_, *operands: of(lambda *x: tridiagonal(*x)[:3], map_, *operands),
            (*diagonals(6), normal(N, 6, 2)),
        ),
        "spectra": (of_spectra, (normal(N, 4, 4),)),
        "special": (of_special, (np.linspace(0.3, 6, N, dtype=np.float32), np.abs(normal(N)) * 5)),
        "broadcasts": (lambda map_, x: of(broadcasts, map_, x, numbers), (normal(N, 3, 4),)),
        "orders": (functools.partial(of, orders), (normal(N, 3, 4),)),
    }
