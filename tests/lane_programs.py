"""Random functions of one element, with loops, branches and arrays that are updated."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Values of a program and derivatives of them, and the modes that these need.
DERIVATIVES = {"values": None, "jvp": "forward", "gradient": "reverse", "hessian": "reverse"}
SHAPES = [(), (3,), (2, 3), (5,)]
KINDS = [(kind, shape) for kind in "fi" for shape in SHAPES]


class Generator(np.random.Generator):
    """Draws, and says which derivatives a program has: None, "forward" or "reverse" mode."""

    def __init__(self, seed, derivatives):
        super().__init__(np.random.PCG64(seed))
        self.derivatives = derivatives

    @property
    def reversible(self):
        """Whether loops have bounds that are known."""
        return self.derivatives == "reverse"


def random_program(seed, derivatives=None):
    """Return a function of a float[3], an int and a float[5], by the seed alone.

    JAX has its ``derivatives``: None, those of "forward" or of "reverse" mode too.
    """

    def program(x, n, y):
        rng = Generator(seed, derivatives)
        values = [x, n, y, jnp.float32(0.5), jnp.int32(3), jnp.outer(x[:2], x)]
        for _ in range(4):
            values.append(_grown(rng, values, depth=1))
        return tuple(values[3:])

    return program


def program(kind, seed, map_):
    """Return the function of batches that ``map_`` makes of a random program, or a derivative."""
    mapped = map_(random_program(seed, DERIVATIVES[kind]))

    def floats(x, n, y):
        return [v for v in mapped(x, n, y) if jnp.issubdtype(v.dtype, jnp.floating)]

    def derivative(x, n, y):
        def total(x, y):
            return sum(jnp.sum(v) for v in floats(x, n, y))

        along = (x, y), (jnp.cos(3 * x), jnp.sin(2 * y))
        if kind == "jvp":
            return jax.tree.leaves(jax.jvp(lambda x, y: floats(x, n, y), *along))
        if kind == "gradient":
            return jax.tree.leaves(jax.value_and_grad(total, (0, 1))(x, y))
        return jax.tree.leaves(jax.jvp(jax.grad(total, (0, 1)), *along))

    return mapped if kind == "values" else derivative


def _pick(rng, values, kind, shape):
    """Return a value of a kind and shape, made of some value."""
    of_shape = [v for v in values if v.shape == shape]
    same = [v for v in of_shape if v.dtype.kind == kind]
    if same and rng.random() < 0.8:
        return same[rng.integers(len(same))]
    found = of_shape[rng.integers(len(of_shape))] if of_shape else None
    if found is None or rng.random() < 0.3:
        source = values[rng.integers(len(values))].reshape(-1)
        found = jnp.resize(source[:: rng.choice([1, -1])], shape)
    if kind == "i":
        return found if found.dtype.kind == "i" else jnp.round(4 * jnp.sin(found)).astype(jnp.int32)
    return found if found.dtype.kind == "f" else jnp.sin(found.astype(jnp.float32))


def _index(rng, values):
    return _pick(rng, values, "i", ()) % 7 - 3


def _grown(rng, values, depth):
    """Return a new value made of others."""
    kind, shape = KINDS[rng.integers(len(KINDS))]
    makers = [
        _elementwise, _elementwise, _broadcast, _moved, _reduced, _updated, _sorted_or_multiplied,
        _narrow,
    ]  # fmt: skip
    if depth:
        makers += [_scan, _while, _cond, _switch, _mapped, _mapped]
    made = makers[rng.integers(len(makers))](rng, values, kind, shape, depth)
    if made.dtype.kind == "f":
        return jnp.sin(made) if rng.random() < 0.5 else jnp.clip(made, -2, 2)
    return made


def _elementwise(rng, values, kind, shape, _):
    x, y = _pick(rng, values, kind, shape), _pick(rng, values, kind, shape)
    chosen = _pick(rng, values, "i", shape) > 0
    if kind == "f":
        made = [x + y, x * y, x - y, jnp.maximum(x, y), jnp.cos(x), x / (2 + jnp.abs(y))]
    else:
        made = [x + y, x * y, x ^ y, x & y, x // (1 + jnp.abs(y) % 5), lax.clz(x), x << (y & 3)]
    return jnp.where(chosen, made[rng.integers(len(made))], y)


def _broadcast(rng, values, kind, shape, _):
    x, y = _pick(rng, values, kind, (2, 3)), _pick(rng, values, kind, (2, 3))
    row, column = x[rng.integers(2)][None], x[:, rng.integers(3)][:, None]
    made = [
        x - y.sum(1, keepdims=True), x + column, row - y, row * column, jnp.maximum(x, column),
        x * x[1, 2], jnp.clip(x, row - 1, column + 1), jnp.where(x > column, y, row),
        x.max(0, keepdims=True) - x, lax.add(column, x), x[:, None] * y[None],
    ]  # fmt: skip
    if kind == "f":
        made += [x - x.mean(1, keepdims=True), x.var(0), x / (1 + jnp.abs(column))]
    return jnp.resize(made[rng.integers(len(made))], shape)


def _narrow(rng, values, kind, shape, _):
    """Numbers of 16 and 8 bits, which are exact but for one rounding."""
    dtype = (jnp.bfloat16, jnp.float16, jnp.int16, jnp.uint8)[rng.integers(4)]
    x, y = ((_pick(rng, values, "i", shape) % 50).astype(dtype) for _ in range(2))
    counted = lax.iota(dtype, 260)[255 + _pick(rng, values, "i", shape) % 4]
    made = [x + y, x * y, jnp.maximum(x, y), counted, jnp.where(x > y, counted, x)]
    return made[rng.integers(len(made))].astype(jnp.float32 if kind == "f" else jnp.int32)


def _moved(rng, values, kind, shape, _):
    x = _pick(rng, values, kind, (2, 3))
    flat = _pick(rng, values, kind, (5,))
    made = [
        x.reshape(3, 2, order="F"), x.ravel(order="F"), lax.reshape(x, (6,), dimensions=(1, 0)),
        x.T.reshape(-1), x[::-1, 1:].reshape(-1), x[_index(rng, values)], flat[::-1][1:4],
        jnp.concatenate([flat, x[0]]), jnp.roll(flat, 2), jnp.stack([x[0], flat[:3]]).reshape(-1),
        lax.dynamic_slice(flat, (_index(rng, values),), (3,)), jnp.pad(flat, (1, 2)),
        flat[jnp.array([0, 3, 3, 1])], jnp.take(flat, _pick(rng, values, "i", (3,)), mode="clip"),
    ]  # fmt: skip
    return jnp.resize(made[rng.integers(len(made))], shape)


def _reduced(rng, values, kind, shape, _):
    x = _pick(rng, values, kind, (2, 3))
    made = [x.sum(0), x.max(1), x.min(), x.prod(1), jnp.cumsum(x, 1)[0], jnp.cumsum(x, 0)[1]]
    if kind == "i":
        made += [x.argmax(0), (x > 0).any(1).astype(jnp.int32)]
    return jnp.resize(made[rng.integers(len(made))], shape).astype(x.dtype)


def _updated(rng, values, kind, shape, _):
    x = _pick(rng, values, kind, (5,))
    i, j = _index(rng, values), _index(rng, values)
    value, mode = _pick(rng, values, kind, ()), ("drop", "clip")[rng.integers(2)]
    at, several = x.at[i], x.at[jnp.stack([i, j, i])]
    pair = _pick(rng, values, kind, (3,))
    made = [
        at.set(x[j]).at[j].add(value), at.max(value, mode=mode), x.at[1:4].set(x[:3]),
        at.min(value, mode=mode), at.multiply(value, mode=mode), at.power(2, mode=mode),
        at.subtract(value, mode=mode), several.add(pair, mode=mode), several.subtract(pair),
    ]  # fmt: skip
    if rng.derivatives is None:
        made += [at.apply(lambda v: v * v + 1, mode=mode), several.apply(lambda v: 2 - v)]
        made += [x.at[1:4].apply(jnp.abs), several.multiply(pair), several.max(pair)]
    return jnp.resize(made[rng.integers(len(made))], shape)


def _sorted_or_multiplied(rng, values, kind, shape, _):
    x = _pick(rng, values, kind, (5,))
    if kind == "i":
        return jnp.resize(jnp.sort(x), shape)
    matrix = _pick(rng, values, kind, (2, 3))
    made = [matrix @ _pick(rng, values, kind, (3,)), matrix.T @ matrix, jnp.outer(x[:2], x)]
    return jnp.resize(made[rng.integers(3)], shape)


def _state(rng, values):
    kinds = [KINDS[i] for i in rng.integers(len(KINDS), size=rng.integers(2, 4))]
    return kinds, tuple(_pick(rng, values, *kind) for kind in kinds)


def _next(rng, kinds, values, state, depth):
    """Return a state of the same types; its parts may be each other's."""
    values = [*values, *state]
    for _ in range(rng.integers(1, 3)):
        values.append(_grown(rng, values, depth - 1))
    return tuple(_pick(rng, [*values, *state], *kind) for kind in kinds)


def _body(rng, values, kinds, depth):
    seed = int(rng.integers(1 << 30))
    # The outer values that a body reads are constants of the loop.
    return lambda state, *more: _next(
        Generator(seed, rng.derivatives), kinds, [*values[-4:], *more], state, depth
    )


def _result(rng, values, kind, shape):
    return _pick(rng, values, kind, shape)


def _scan(rng, values, kind, shape, depth):
    kinds, state = _state(rng, values)
    body = _body(rng, values, kinds, depth)
    xs = _pick(rng, values, "f", (5,)) if rng.random() < 0.5 else _pick(rng, values, "i", (2, 3))

    def step(state, x):
        new = body(state, x)
        return new, new[0]

    state, stacked = lax.scan(step, state, xs, reverse=bool(rng.integers(2)))
    return _result(rng, [*state, stacked.reshape(-1)[:3], stacked.reshape(-1)[-1]], kind, shape)


def _while(rng, values, kind, shape, depth):
    kinds, state = _state(rng, values)
    body, count = _body(rng, values, kinds, depth), _pick(rng, values, "i", ()) % 4
    if rng.reversible:
        state = lax.fori_loop(0, 3, lambda i, s: body(s, i), state)
        return _result(rng, list(state), kind, shape)
    _, state = lax.while_loop(
        lambda s: s[0] < count, lambda s: (s[0] + 1, body(s[1], s[0])), (jnp.int32(0), state)
    )
    return _result(rng, list(state), kind, shape)


def _branches(rng, values, depth, count):
    kinds, state = _state(rng, values)
    return state, [_body(rng, values, kinds, depth) for _ in range(count)]


def _cond(rng, values, kind, shape, depth):
    state, (one, other) = _branches(rng, values, depth, 2)
    found = lax.cond(_pick(rng, values, "i", ()) > 0, one, other, state)
    return _result(rng, list(found), kind, shape)


def _switch(rng, values, kind, shape, depth):
    state, branches = _branches(rng, values, depth, 3)
    found = lax.switch(_index(rng, values), [*branches, lambda state: state], state)
    return _result(rng, list(found), kind, shape)


def _mapped(rng, values, kind, shape, depth):
    """Map a loop or a branch over elements, each of which has its own bound or choice."""
    kinds, state = _state(rng, values)
    xs, counts = _pick(rng, values, "f", (5,)), _pick(rng, values, "i", (5,)) % 4
    one, other = (_body(rng, values, kinds, depth) for _ in range(2))

    def loop(x, count):
        if rng.reversible:
            return lax.fori_loop(0, 3, lambda i, s: one(s, x, i), state)
        return lax.fori_loop(0, count, lambda i, s: one(s, x, i), state)

    def until(x, count):
        if rng.reversible:
            return loop(x, count)

        def goes_on(s):
            return (s[0] * x < count) & (s[0] < 4)

        return lax.while_loop(goes_on, lambda s: (s[0] + 1, one(s[1], x)), (count - 1, state))[1]

    def branch(x, count):
        return lax.cond(count > 1, lambda s: one(s, x), lambda s: other(s, x), state)

    def switch(x, count):
        return lax.switch(count, [lambda s: s, lambda s: one(s, x), lambda s: other(s, x)], state)

    def scanned(x, _):
        return lax.scan(lambda s, t: (one(s, x, t), None), state, xs[:3])[0]

    made = [loop, until, branch, switch, scanned][rng.integers(5)]
    if rng.random() < 0.3:
        found = jax.vmap(jax.vmap(made, (0, None)), (None, 0))(xs[:2], counts[:3])
    else:
        found = jax.vmap(made)(xs, counts)
    return _result(rng, [x.reshape(-1) for x in found], kind, shape)
