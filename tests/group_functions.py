"""Functions of long arrays, which groups of threads evaluate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from lane_functions import integers_of, normal

from benchmarks.jax_kernel import _hmc
from benchmarks.lane_libraries import recurrent

LANES = 3


def ends_by_itself(x, count):
    """A loop that carries long arrays; lanes end at different steps."""

    def step(state):
        i, x, y = state
        moved = lax.dynamic_update_slice(x, y[:40], (i,)).at[i].add(y[i])
        return i + 1, jnp.sin(y[::-1]) + x[i], moved

    return lax.while_loop(lambda s: s[0] < count, step, (0, x, 2 * x))


def long_arrays(x):
    """Orders, sums and places of long arrays, and one beyond shared memory."""
    far = jnp.sin(x[0] * jnp.arange(20_000.0))
    rows = x.reshape(20, 5)
    return (
        jnp.sort(x), jnp.argsort(-x), x.argmax(), x.argmin(), jnp.cumsum(x), far[::-1][:3],
        (far[1:] - far[:-1]).sum(), far.max(), rows @ rows.T @ rows, rows.sum(0), rows.max(1),
        jnp.concatenate([x, x[:3]])[::-1], jnp.roll(rows, 3, 1), x[integers_of(30, low=0) % 100],
        jnp.pad(x, (2, 30)), x.at[jnp.arange(40) % 7].add(1.0), jax.nn.softmax(x), x > x.mean(),
        jnp.any(x > 2.2), x[:0].sum(), jnp.concatenate([x[:0], x])[5], x[:0].max(initial=3.0),
        x[:0].reshape(0, 20) @ x[:60].reshape(20, 3),
    )  # fmt: skip


def draws(key):
    bits = jax.random.bits(key, (70,))
    return bits, jax.random.normal(key, (70,)), jax.random.permutation(key, 40)


def of_steps(x):
    """A loop whose derivative has steps of its own."""

    def step(x, _):
        x = jnp.sin(x) + x[::-1].mean() * x[3]
        return x, x[:20] @ x[20:40]

    x, found = lax.scan(step, x, None, length=12)
    return jnp.sum(x**2) + jnp.sum(found)


def gradient_of_steps(map_, x):
    checkpoints = {} if map_ is jax.vmap else {"checkpoint": 3}
    return jax.grad(lambda x: jnp.sum(map_(of_steps, **checkpoints)(x)))(x)


def spectra(x):
    """Eigenvalues of matrices of odd and even sizes, of a batch, and of one with NaN."""
    found = []
    for a in (x[:7, :7], x, x.at[2, 3].set(jnp.nan), jnp.stack([x[:5, :5], jnp.eye(5)])):
        values, vectors = jnp.linalg.eigh(a)
        found += [values, vectors @ (values[..., None] * vectors.mT), vectors.mT @ vectors]
    return found


def of_weights(map_, weights, inputs):
    network = map_(recurrent, in_axes=(None, 0))
    return jax.grad(lambda weights: jnp.sum(jnp.square(network(weights, inputs))))(weights)


def cases(map_):
    """Functions of batches, and arguments."""
    data = normal(40, 8)
    sampler = map_(functools.partial(_hmc, 2), in_axes=(None, None, 0))
    keys = jax.random.split(jax.random.key(1), LANES)
    x = normal(LANES, 100)
    x[1, 40] = np.nan
    return {
        "a loop": (map_(ends_by_itself), (normal(LANES, 60), np.int32([3, 0, 7]))),
        "long arrays": (map_(long_arrays), (x,)),
        "draws": (map_(draws), (keys,)),
        "spectra": (map_(spectra), (0.2 * normal(LANES, 16, 16),)),
        "tridiagonal": (
            map_(lax.linalg.tridiagonal_solve),
            (*(normal(3, LANES, 70) + np.float32([[[0]], [[6]], [[0]]])), normal(LANES, 70, 1)),
        ),
        "HMC": (sampler, (data, np.sign(data[:, 0]), keys)),
        **{
            f"network of {units}": (
                map_(recurrent, in_axes=(None, 0)),
                ((normal(units, 12), 0.2 * normal(units, units)), normal(LANES, 5, 12)),
            )
            for units in (33, 40)  # Rows of 40 numbers are loaded 16 bytes at a time.
        },
        "gradient of weights": (
            functools.partial(of_weights, map_),
            ((normal(40, 12), 0.2 * normal(40, 40)), normal(LANES, 5, 12)),
        ),
        "gradient": (functools.partial(gradient_of_steps, map_), (normal(LANES, 50),)),
    }
