"""Loops that are one kernel: Markov chains, an epidemic, and a picture.

    python examples/lanes.py

Each function is of one chain, of one person, or of one ray, as one would write it for ``jax.vmap``.
On a GPU ``jax_tilekern.kernel`` runs each as one kernel: a thread has its own loop, takes its own
branches, and ends when it is done.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

import jax_tilekern as jtk

CHAINS, CHAIN_STEPS = 1000, 500
PERSONS, DAYS, INFECTIOUS_DAYS = 10_000, 80, 10
WIDTH, HEIGHT, MOST_STEPS = 64, 24, 80
_SHADES = " .:-=+*#%@"


def chain(key: Array, scale: Array) -> tuple[Array, Array]:
    """Sample a normal distribution by random-walk Metropolis; return mean and mean square."""

    def step(state: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], None]:
        key, x, total, squares = state
        key, of_step, of_choice = jax.random.split(key, 3)
        proposed = x + scale * jax.random.normal(of_step)
        likelihood = jnp.exp(0.5 * (x * x - proposed * proposed))
        x = jnp.where(jax.random.uniform(of_choice) < likelihood, proposed, x)
        return (key, x, total + x, squares + x * x), None

    start = (key, jnp.float32(0), jnp.float32(0), jnp.float32(0))
    (_, _, total, squares), _ = lax.scan(step, start, None, length=CHAIN_STEPS)
    return total / CHAIN_STEPS, squares / CHAIN_STEPS


def person(
    key: Array, day: Array, state: Array, sick_days: Array, risk: Array
) -> tuple[Array, ...]:
    """Return a person's state after a day: 0 susceptible, 1 infected, 2 recovered."""
    draw = jax.random.uniform(jax.random.fold_in(key, day))

    def susceptible() -> tuple[Array, Array]:
        return jnp.where(draw < risk, 1, 0), jnp.int32(0)

    def infected() -> tuple[Array, Array]:
        return jnp.where(sick_days >= INFECTIOUS_DAYS, 2, 1), sick_days + 1

    def recovered() -> tuple[Array, Array]:
        return jnp.int32(2), sick_days

    return lax.switch(state, [susceptible, infected, recovered])


def distance(p: Array) -> Array:
    """Return the distance of a point to a sphere on a floor."""
    sphere = jnp.sqrt(jnp.sum((p - jnp.array([0.0, 0.0, 3.0])) ** 2)) - 1
    return jnp.minimum(sphere, p[1] + 1)


def brightness(column: Array, row: Array) -> Array:
    """March along a ray; return how bright what it meets is."""
    direction = jnp.array([column, -row, 1.5])
    direction /= jnp.sqrt(jnp.sum(direction**2))

    def travels(state: tuple[Array, Array]) -> Array:
        travelled, steps = state
        is_close = distance(travelled * direction) < 1e-3
        return ~is_close & (travelled < 20) & (steps < MOST_STEPS)

    def march(state: tuple[Array, Array]) -> tuple[Array, Array]:
        travelled, steps = state
        return travelled + distance(travelled * direction), steps + 1

    travelled, _ = lax.while_loop(travels, march, (jnp.float32(0), jnp.int32(0)))
    point = travelled * direction
    normal = jax.grad(distance)(point)
    light = jnp.maximum(0, normal @ jnp.array([0.5, 0.7, -0.5]))
    return jnp.where(travelled < 20, 0.1 + 0.9 * light, 0.0)


def sample() -> tuple[Array, Array]:
    """Return mean and variance over all chains."""
    keys = jax.random.split(jax.random.key(0), CHAINS)
    means, squares = jtk.kernel(chain, in_axes=(0, None))(keys, jnp.float32(2))
    return means.mean(), squares.mean() - means.mean() ** 2


def epidemic() -> list[int]:
    """Return how many persons are infected on each day."""
    keys = jax.random.split(jax.random.key(1), PERSONS)
    state = (jnp.arange(PERSONS) < PERSONS // 200).astype(jnp.int32)
    sick_days = jnp.zeros(PERSONS, jnp.int32)

    @jax.jit
    def of_day(day: Array, state: Array, sick_days: Array) -> tuple[Array, Array]:
        risk = 0.3 * (state == 1).mean()
        of_persons = jtk.kernel(person, in_axes=(0, None, 0, 0, None))
        return of_persons(keys, day, state, sick_days, risk)

    infected = []
    for day in range(DAYS):
        state, sick_days = of_day(jnp.int32(day), state, sick_days)
        infected.append(int((state == 1).sum()))
    return infected


def picture() -> list[str]:
    """Return the lines of a picture."""
    columns, rows = jnp.meshgrid(jnp.linspace(-1.6, 1.6, WIDTH), jnp.linspace(-0.9, 0.9, HEIGHT))
    rays = jax.jit(jtk.kernel(brightness))(columns.ravel(), rows.ravel()).reshape(HEIGHT, WIDTH)
    last = len(_SHADES) - 1
    return ["".join(_SHADES[math.floor(float(x) * last)] for x in line) for line in rays.clip(0, 1)]


def main() -> None:
    """Run all three."""
    mean, variance = jax.jit(sample)()
    print(f"{CHAINS} chains: mean {mean:.3f}, variance {variance:.3f}")
    infected = epidemic()
    most = max(infected)
    print(f"most infected: {most} of {PERSONS}, on day {infected.index(most)}")
    print(*picture(), sep="\n")


if __name__ == "__main__":
    main()
