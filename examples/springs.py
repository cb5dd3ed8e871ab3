"""Bodies on springs: each implicit step solves one small system a body, and all of it is learned.

    python examples/springs.py

Backward Euler makes stiff springs stable: it solves ``(M + h D + h² K) v' = M v - h K x`` for every
body at every step. The stiffness of each body's springs is then found from where the body was seen,
by gradients through all steps and solves.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

import jax_tilekern as jtk

BODIES, SIZE, STEPS = 2000, 6, 20
TIME_STEP = 0.05


def stiffness(factors: Array) -> Array:
    """Return symmetric positive definite matrices from free parameters."""
    return factors @ factors.mT + jnp.eye(SIZE)


def simulate(factors: Array, position: Array, velocity: Array) -> Array:
    """Return where every body is at the end; shapes ``(bodies, 6)``."""
    k = stiffness(factors)
    system = (1 + 0.1 * TIME_STEP) * jnp.eye(SIZE) + TIME_STEP**2 * k

    def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        x, v = state
        force = (k @ x[..., None])[..., 0]
        v = jtk.linalg.solve(system, (v - TIME_STEP * force)[..., None])[..., 0]
        return (x + TIME_STEP * v, v), None

    (position, _), _ = lax.scan(step, (position, velocity), None, length=STEPS)
    return position


def loss(factors: Array, position: Array, velocity: Array, seen: Array) -> Array:
    """Return the mean squared distance to where bodies were seen."""
    return jnp.mean((simulate(factors, position, velocity) - seen) ** 2)


@functools.partial(jax.jit, static_argnames="rate")
def update(
    factors: Array, position: Array, velocity: Array, seen: Array, rate: float
) -> tuple[Array, Array]:
    """Return the parameters after a step of normalised gradient descent, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(factors, position, velocity, seen)
    norms = jnp.linalg.norm(gradient, axis=(-2, -1), keepdims=True)
    return factors - rate * gradient / (norms + 1e-8), value


def main(updates: int = 60) -> tuple[float, float]:
    """Fit the springs; return the first loss and the last."""
    keys = jax.random.split(jax.random.key(0), 4)
    truth, start, position, velocity = (
        jax.random.normal(key, (BODIES, SIZE, SIZE) if i < 2 else (BODIES, SIZE))
        for i, key in enumerate(keys)
    )
    seen = simulate(truth, position, velocity)
    print(jtk.explain(jax.grad(loss), start, position, velocity, seen))
    factors, losses = truth + 0.3 * start, []
    for number in range(updates):
        factors, value = update(factors, position, velocity, seen, rate=0.02)
        losses.append(float(value))
        if number % 10 == 0:
            print(f"update {number:3}: loss {value:.5f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
