"""Functions of one element: ``(name, function, in_axes, arguments of a batch)``."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

LANES = 7


def lorenz(state, parameters, steps=20):
    """Fourth-order Runge-Kutta steps; every step is returned."""

    def velocity(s):
        x, y, z = s
        sigma, rho, beta = parameters
        return jnp.array([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])

    def step(s, _):
        k1 = velocity(s)
        k2 = velocity(s + 0.005 * k1)
        k3 = velocity(s + 0.005 * k2)
        k4 = velocity(s + 0.01 * k3)
        s = s + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return s, s[0]

    return lax.scan(step, state, None, length=steps)


def collatz(n):
    def step(state):
        n, count = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    return lax.while_loop(lambda state: state[0] > 1, step, (n, 0))


def metropolis(key, x):
    def step(state, _):
        key, x = state
        key, of_step, of_choice = jax.random.split(key, 3)
        proposed = x + jax.random.normal(of_step)
        accepted = jax.random.uniform(of_choice) < jnp.exp(0.5 * (x * x - proposed * proposed))
        x = jnp.where(accepted, proposed, x)
        return (key, x), x

    (key, x), chain = lax.scan(step, (key, x), None, length=12)
    return jax.random.key_data(key), chain


def kalman(mean, covariance, transition, observed):
    """Filter two observations at a time of six states."""
    noise, h = 0.1 * jnp.eye(6), jnp.eye(2, 6)

    def step(state, z):
        m, p = state
        m, p = transition @ m, transition @ p @ transition.T + noise
        s = h @ p @ h.T + 0.5 * jnp.eye(2)
        determinant = s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0]
        inverse = jnp.array([[s[1, 1], -s[0, 1]], [-s[1, 0], s[0, 0]]]) / determinant
        gain = p @ h.T @ inverse
        return (m + gain @ (z - h @ m), p - gain @ h @ p), m[0]

    return lax.scan(step, (mean, covariance), observed)


def bisection(a):
    """The root of x^3 + x = a."""

    def step(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        below = middle**3 + middle < a
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    return lax.fori_loop(0, 30, step, (jnp.float32(-10), jnp.float32(10)))


def ray_march(direction):
    direction = direction / jnp.sqrt(jnp.sum(direction**2))

    def distance(p):
        return jnp.sqrt(jnp.sum((p - jnp.array([0.0, 0.0, 3.0])) ** 2)) - 1

    def step(state):
        travelled, count = state
        return travelled + distance(travelled * direction), count + 1

    def far(state):
        travelled, count = state
        near = distance(travelled * direction) > 1e-2
        return near & (travelled < 20) & (count < 64)

    return lax.while_loop(far, step, (jnp.float32(0), 0))


def epidemic(key, state):
    """An agent is susceptible, infected or recovered."""

    def susceptible(draw, days):
        return jnp.where(draw < 0.3, 1, 0), days

    def infected(draw, days):
        return jnp.where(draw < 0.2, 2, 1), days + 1

    def recovered(_, days):
        return jnp.int32(2), days

    def step(carry, day):
        state, days = carry
        draw = jax.random.uniform(jax.random.fold_in(key, day))
        state, days = lax.switch(state, [susceptible, infected, recovered], draw, days)
        return (state, days), state

    return lax.scan(step, (state, jnp.int32(0)), jnp.arange(20))


def mandelbrot(c):
    def step(state):
        x, y, count = state
        return x * x - y * y + c[0], 2 * x * y + c[1], count + 1

    def inside(state):
        x, y, count = state
        return (x * x + y * y < 4) & (count < 50)

    return lax.while_loop(inside, step, (jnp.float32(0), jnp.float32(0), 0))[2]


def sorts(x, y):
    keys, values = lax.sort((x, y), num_keys=1)
    return (
        jnp.sort(x), jnp.argsort(x), keys, values, jnp.sort(y.reshape(5, 2), axis=0),
        lax.sort((jnp.sign(x), y), num_keys=2), jnp.median(x[:5]), jnp.sort(x[:4]),
    )  # fmt: skip


def products(a, b):
    return (
        a @ b, jnp.einsum("ij,kj->ki", a, a), jnp.einsum("ij,jk->", a, b), jnp.dot(a[0], b[:, 0]),
        jnp.tensordot(a, b, ((0, 1), (1, 0))), jnp.einsum("bi,bi->b", a, b.T),
        jnp.outer(a[0], a[1]),
    )  # fmt: skip


def reductions(x):
    return (
        x.sum(), x.max(0), x.min(1), x.prod((0, 1)), x.argmax(), x.argmin(1), jnp.cumsum(x, 0),
        lax.cummax(x, 1, reverse=True), (x > 0).any(0), (x > 0).all(), x.mean(), x.std(),
        jnp.linalg.norm(x), jax.nn.softmax(x), jax.nn.logsumexp(x),
    )  # fmt: skip


def shapes(x, i):
    row = lax.dynamic_slice(x, (i, 1), (2, 2))
    return (
        x.T, x[::-1], x[:, 1:], x[::2], x.reshape(4, 3), x.reshape(2, 6)[:, ::3], row, x[i],
        x[i, -1], jnp.concatenate([x, row[:, :1].repeat(4, 1)]), jnp.stack([x[0], x[1]], 1),
        jnp.roll(x, 1, 0), jnp.pad(x, ((1, 2), (0, 1)), constant_values=5),
        lax.pad(x, 0.0, ((0, 0, 1), (-1, -1, 0))), lax.dynamic_update_slice(x, row, (i, i)),
        jnp.tile(x[0], 2), jnp.split(x, 2, 1), x[None, :, 1], jnp.broadcast_to(x[:, :1], (3, 5)),
        jnp.eye(3), jnp.arange(5) * i, jnp.triu(x[:, :3]), jnp.flip(x.T.reshape(3, 4)),
        jnp.moveaxis(x.reshape(3, 2, 2), 0, 1)[i // 3],
    )  # fmt: skip


def indexing(x, indices, table):
    return (
        x[indices], table[indices[0]], table[indices], x.at[indices[0]].set(7.0),
        x.at[indices].add(1.0), x.at[indices].max(0.5), x.at[1:3].set(x[:2]),
        jnp.take(x, indices, mode="clip"), jnp.take(x, indices + 3, mode="fill"),
        table.at[indices[1], 2].mul(3.0)[:4], jnp.take_along_axis(x, indices, 0),
        x.at[indices[0]].add(x[indices[1]], mode="drop"), x.at[-1].set(x[0]).at[0].set(x[-1]),
        table[indices[0], indices[1]],
    )  # fmt: skip


def searching(x, table):
    chosen = jnp.select([x < -0.5, x < 0.5, x < 1], [x, 2 * x, -x], 0.0)
    return (
        jnp.interp(x, table, table**2), jnp.searchsorted(table, x), chosen,
        lax.select_n(jnp.int32(x[0] > 0) + (x[1:] > 0), x[1:], x[:-1], x[1:] * 2),
        jnp.histogram(x, bins=table)[0], jnp.digitize(x, table),
    )  # fmt: skip


def linear_algebra(a, b):
    positive = a.T @ a + jnp.eye(4)
    lower = jnp.linalg.cholesky(positive)
    return (
        jnp.linalg.solve(a, b), jnp.linalg.inv(a), jnp.linalg.det(a), jnp.linalg.slogdet(a),
        lower, jax.scipy.linalg.cho_solve((lower, True), b), jnp.linalg.qr(a[:, :3]),
        jnp.linalg.qr(a[:3]), jnp.linalg.qr(a[:, :2], mode="complete"), lax.linalg.lu(a[:3]),
        jax.scipy.linalg.solve_triangular(a, b), lax.linalg.lu(a[:, :2]),
        jax.scipy.linalg.solve_triangular(a, b, trans="T", unit_diagonal=True),
        lax.linalg.triangular_solve(a, b[None], lower=True, transpose_a=True),
        jnp.linalg.cholesky(jnp.stack([positive, -positive])), lax.top_k(jnp.floor(b), 3),
        jnp.linalg.solve(a.reshape(4, 2, 2), b[:2, None]), jax.scipy.linalg.expm(a / 4),
    )  # fmt: skip


def in_place(x, n):
    """An insertion sort, and a sieve whose array is too long for registers."""

    def insert(i, x):
        def swap(state):
            j, x = state
            return j - 1, x.at[j].set(x[j - 1]).at[j - 1].set(x[j])

        return lax.while_loop(lambda s: (s[0] > 0) & (s[1][s[0] - 1] > s[1][s[0]]), swap, (i, x))[1]

    def strike(p, sieve):
        stride = jnp.maximum(p, 2)
        first = jnp.where(sieve[stride], stride * stride, 400)

        def body(state):
            multiple, sieve = state
            return multiple + stride, sieve.at[multiple].set(False, mode="drop")

        return lax.while_loop(lambda s: s[0] < 400, body, (first, sieve))[1]

    primes = lax.fori_loop(2, 20, strike, jnp.ones(400, bool))
    return lax.fori_loop(1, 5, insert, x), primes.sum(), primes[n]


def swaps(x, y):
    """Values that a loop carries exchange places."""

    def step(_, state):
        a, b, c, d, e = state
        return b, a, d * 1.5, c[::-1], jnp.stack([a, b]) + e[::-1]

    return lax.fori_loop(0, 5, step, (x[0], y[0], x, y, x[:2]))


def branches(x, i):
    nan = lax.cond(x[0] > 0, lambda x: jnp.log(x), lambda x: x, x[0])
    array = lax.switch(i, [lambda x: x, lambda x: x[::-1] * 2, lambda x: x.at[1].set(0)], x)
    nested = lax.cond(i > 0, lambda: lax.cond(x[1] > 0, lambda: 1, lambda: 2), lambda: 3)
    untaken = jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)
    return nan, array, nested, untaken, lax.cond(True, lambda: x, lambda: x * 0)


def no_trips(x, n):
    empty, stacked = lax.scan(lambda c, a: (c + a, c), x, jnp.zeros((0,)))
    counted = lax.fori_loop(0, n, lambda i, c: c + i, x)
    return (
        empty,
        stacked,
        counted,
        lax.while_loop(lambda c: c < 0, lambda c: c + 1, x),
        x[None][:0].sum(),
    )


def integers(a, b, dtype):
    a, b = a.astype(dtype), b.astype(dtype)
    shift = jnp.abs(b) % 11
    signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return (
        a + b, a - b, a * b, lax.div(a, b), lax.rem(a, b), a & b, a | b, a ^ b, ~a, lax.neg(a),
        lax.shift_left(a, shift), lax.shift_right_logical(a, shift),
        lax.shift_right_arithmetic(a, shift), lax.population_count(a), lax.clz(a), lax.max(a, b),
        lax.min(a, b), a < b, a == b, jnp.sign(a), jnp.clip(a, dtype(3), dtype(50)), a.astype(bool),
        a.astype(jnp.float32), jnp.abs(a) if signed else a, a // jnp.maximum(b, 1),
        a % jnp.maximum(b, 1), jnp.sum(jnp.stack([a, b])), lax.reduce_xor(jnp.stack([a, b]), (0,)),
    )  # fmt: skip


def floats(x, y, dtype):
    x, y = x.astype(dtype), y.astype(dtype)
    return (
        x + y, x * y, x / y, jnp.sqrt(jnp.abs(x)), jnp.exp(-x * x), jnp.sin(x), jnp.tanh(x),
        jnp.maximum(x, y), x**3, jnp.where(x > y, x, y), x.astype(jnp.int32), jnp.floor(x),
        jnp.sum(jnp.stack([x, y, x])), lax.dot(jnp.stack([x, y]), jnp.stack([y, x])),
        jnp.sort(jnp.stack([x, y])), jax.nn.sigmoid(x), jax.nn.gelu(x), jnp.log1p(jnp.abs(x)),
        jnp.arctan2(x, y), jnp.round(x), -x, jnp.abs(y),
    )  # fmt: skip


def bits(x, n):
    return (
        lax.bitcast_convert_type(x, jnp.uint32), lax.bitcast_convert_type(n, jnp.float32) * 0,
        lax.bitcast_convert_type(jnp.nan_to_num(x).astype(jnp.bfloat16), jnp.uint16),
        lax.bitcast_convert_type(jnp.nan_to_num(x).astype(jnp.float16), jnp.int16), jnp.signbit(x),
        jnp.isnan(x), jnp.nextafter(x, jnp.float32(0)),
        lax.bitcast_convert_type(jnp.stack([x, -x]), jnp.int32)[1],
    )  # fmt: skip


def draws(key, raw):
    keys = jax.random.split(key, 4)
    return (
        jax.random.bits(keys[0], (5,)), jax.random.bits(keys[1], (3,), jnp.uint8),
        jax.random.randint(keys[2], (4,), -5, 9), jax.random.uniform(keys[3], (2, 3)),
        jax.random.permutation(key, 6), jax.random.bernoulli(key, 0.3, (4,)),
        jax.random.key_data(jax.random.fold_in(key, 3)), jax.random.bits(raw),
        jax.random.split(raw), jax.random.exponential(key),
        jax.random.categorical(key, jnp.arange(4.0)), jax.random.normal(key, (3,)),
        jax.random.key_data(jnp.where(jax.random.bits(key) % 2 == 0, keys[0], keys[1])), keys[2],
        jax.random.key_data(jax.random.key(5)), jax.random.bits(key, (), jnp.uint16),
    )  # fmt: skip


def custom(x):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (f(*p), 2 * t[0]))

    @jax.custom_vjp
    def g(x):
        return x**2

    g.defvjp(lambda x: (g(x), x), lambda x, ct: (3 * ct * x,))
    return f(x) + g(x) + jax.jit(jnp.cos)(x) + jax.checkpoint(jnp.exp)(x) + jax.nn.relu(x)


def pendulum(x, theta):
    """A scan whose body is a checkpoint, so that only its states are saved."""

    @jax.checkpoint
    def step(state, u):
        q, v = state
        v = v - 0.1 * theta * jnp.sin(q) + u
        return (q + 0.1 * v, v), q * v

    (q, _), products = lax.scan(step, (x[0], x[1]), jnp.linspace(0, 1, 9))
    return q * products.sum()


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def integers_of(*shape, low=-100, high=100, seed=0, dtype=np.int32):
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)


def _keys():
    return jax.random.split(jax.random.key(3), LANES)


N = LANES
NUMBERS = np.array([0, 1, -1, 100, 127, -128, 77], np.int32)
SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, 3.5], np.float32)


def table():
    """Return the cases by name: function, in_axes and arguments."""
    small = {
        "lorenz": (lorenz, (0, None), (normal(N, 3), np.array([10, 28, 8 / 3], np.float32))),
        "lorenz_last": (lorenz, (1, None), (normal(3, N), np.array([10, 28, 8 / 3], np.float32))),
        "collatz": (collatz, 0, (np.arange(1, N + 1, dtype=np.int32) * 3,)),
        "metropolis": (metropolis, 0, (_keys(), np.zeros(N, np.float32))),
        "kalman": (
            kalman,
            (0, None, None, 0),
            (
                normal(N, 6),
                np.eye(6, dtype=np.float32),
                np.eye(6, dtype=np.float32) + 0.1 * normal(6, 6),
                normal(N, 5, 2),
            ),
        ),
        "gamma": (
            lambda key, a: (jax.random.gamma(key, a), jax.random.beta(key, a, 2.0)),
            0,
            (_keys(), np.linspace(0.3, 3, N, dtype=np.float32)),
        ),
        "digamma": (lax.digamma, 0, (np.float32([-1, -2.5, 0.5, 17, np.inf, np.nan]),)),
        "bisection": (bisection, 0, (normal(N) * 5,)),
        "ray_march": (ray_march, 0, (normal(N, 3) * 0.3 + np.array([0, 0, 1], np.float32),)),
        "epidemic": (epidemic, (0, 0), (_keys(), np.arange(N, dtype=np.int32) % 3)),
        "mandelbrot": (mandelbrot, 0, (normal(N, 2) * 0.7,)),
        "sorts": (sorts, 0, (np.round(normal(N, 10)), integers_of(N, 10, low=0, high=4))),
        "sorts_special": (
            lambda x: (jnp.sort(x), jnp.argsort(x), x.argmax(), jnp.max(x), lax.cummin(x)),
            None,
            (SPECIAL,),
        ),
        "products": (products, 0, (normal(N, 3, 4), normal(N, 4, 3, seed=1))),
        "long_products": (
            lambda a, b: (a @ b).sum(1),
            (0, None),
            (normal(N, 12, 20), normal(20, 12)),
        ),
        "reductions": (reductions, 0, (normal(N, 3, 4),)),
        "shapes": (shapes, 0, (normal(N, 3, 4), np.arange(N, dtype=np.int32) - 2)),
        "long_shapes": (
            lambda x: (x.T.reshape(10, 30)[::3] + 1, x[:, ::-1].sum(1), x.reshape(-1).cumsum()),
            0,
            (normal(N, 15, 20),),
        ),
        "indexing": (
            indexing,
            (0, 0, None),
            (normal(N, 5), integers_of(N, 2, low=-7, high=7), normal(9, 5)),
        ),
        "linear_algebra": (linear_algebra, 0, (normal(N, 4, 4), normal(N, 4))),
        "searching": (searching, (0, None), (normal(N, 5), np.arange(-2, 3, dtype=np.float32))),
        "in_place": (in_place, 0, (normal(N, 5), np.arange(N, dtype=np.int32))),
        "swaps": (swaps, 0, (normal(N, 3), normal(N, 3, seed=1))),
        "branches": (branches, 0, (normal(N, 3), np.arange(N, dtype=np.int32) - 2)),
        "no_trips": (no_trips, 0, (np.abs(normal(N)), np.zeros(N, np.int32))),
        "bits": (bits, 0, (SPECIAL, NUMBERS)),
        "draws": (draws, 0, (_keys(), np.asarray(jax.random.key_data(_keys())))),
        "custom": (custom, 0, (normal(N),)),
        "pendulum": (pendulum, (0, None), (normal(N, 2), np.float32(0.7))),
        "out_axes": (lambda x: (x * 2, x[0]), 0, (normal(N, 3),)),
        "nothing": (lambda x: x, 0, (np.zeros((0, 3), np.float32),)),
        "tree": (
            lambda x: {"a": x["b"] + 1, "c": (x["b"], 2.0)},
            ({"b": 1},),
            ({"b": normal(3, N)},),
        ),
        "many": (
            lambda x: lax.scan(lambda c, _: (jnp.sin(c) + x, c), x, None, length=300)[1][::50],
            0,
            (normal(N),),
        ),
    }
    for dtype in (np.int8, np.uint8, np.int16, np.uint32, np.int32):
        small[np.dtype(dtype).name] = (
            functools.partial(integers, dtype=dtype),
            0,
            (NUMBERS, np.roll(NUMBERS, 3)),
        )
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        small[np.dtype(dtype).name] = (
            functools.partial(floats, dtype=dtype),
            0,
            (normal(N) * 3, normal(N, seed=1)),
        )
    return small


def wide_table():
    """Return the cases of 64-bit types."""
    return {
        "int64": (functools.partial(integers, dtype=np.int64), 0, (NUMBERS, np.roll(NUMBERS, 3))),
        "uint64": (functools.partial(integers, dtype=np.uint64), 0, (NUMBERS, np.roll(NUMBERS, 3))),
        "float64": (
            functools.partial(floats, dtype=np.float64),
            0,
            (normal(N, dtype=np.float64), normal(N, seed=1)),
        ),
        "lorenz64": (
            lorenz,
            (0, None),
            (normal(N, 3, dtype=np.float64), np.array([10, 28, 8 / 3])),
        ),
        "bits64": (
            lambda k: (
                jax.random.bits(k, (3,), jnp.uint64),
                jax.random.uniform(k, dtype=jnp.float64),
            ),
            0,
            (_keys(),),
        ),
    }


def gradients():
    """Return scalar functions of ``map``, which is ``kernel`` or ``vmap``, and their arguments."""
    start, parameters = normal(N, 3), np.array([10, 28, 8 / 3], np.float32)
    observed = normal(N, 5, 2)

    def of_lorenz(map_, start, parameters):
        return jnp.sum(map_(lorenz, in_axes=(0, None))(start, parameters)[1] ** 2)

    def of_checkpoints(every, map_, start, parameters):
        kernel = map_ if map_ is jax.vmap else functools.partial(map_, checkpoint=every)
        return of_lorenz(kernel, start, parameters)

    def of_gaussian(map_, a, b):
        def density(a, b):
            lower = jnp.linalg.cholesky(a @ a.T + jnp.eye(3))
            y = jax.scipy.linalg.solve_triangular(lower, b, lower=True)
            return -0.5 * y @ y - jnp.log(jnp.diag(lower)).sum() + jnp.linalg.solve(a, b)[0]

        return jnp.sum(map_(density)(a, b))

    def of_kalman(map_, transition, observed):
        filtered = map_(kalman, in_axes=(None, None, None, 0))
        return jnp.sum(filtered(jnp.zeros(6), jnp.eye(6), transition, observed)[1] ** 2)

    def of_pendulum(map_, x, theta):
        return jnp.sum(map_(pendulum, in_axes=(0, None))(x, theta))

    def of_branches(map_, x):
        return sum(jnp.sum(y) for y in map_(lambda x: branches(x, (x[0] > 0).astype(int)))(x)[:4:3])

    def of_closed_over(map_, weights):
        return jnp.sum(map_(lambda x: jnp.tanh(weights @ x).sum() * weights[0, 0])(start))

    def of_custom(map_, x):
        return jnp.sum(map_(custom)(x))

    def of_table(map_, table):
        return jnp.sum(map_(lambda i: table[i] ** 2)(np.array([0, 3, 3, 1])))

    return {
        "lorenz": (of_lorenz, (start, parameters)),
        "checkpoints": (functools.partial(of_checkpoints, 1), (start, parameters)),
        "chunks": (functools.partial(of_checkpoints, 6), (start, parameters)),
        "kalman": (of_kalman, (np.eye(6, dtype=np.float32), observed)),
        "pendulum": (of_pendulum, (normal(N, 2), np.float32(0.7))),
        "branches": (of_branches, (normal(N, 3),)),
        "closed_over": (of_closed_over, (normal(3, 3),)),
        "custom": (of_custom, (normal(N),)),
        "gaussian": (of_gaussian, (normal(N, 3, 3), normal(N, 3))),
        "table": (of_table, (normal(5),)),
    }
