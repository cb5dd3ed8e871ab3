"""Find the parameters of Lorenz' equations from where an ensemble of weathers went.

    python examples/lorenz.py

Every member of the ensemble starts elsewhere, and is integrated by a fourth-order Runge-Kutta
method. On a GPU the whole integration is one kernel, with one thread a member, and its gradient is
two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

import jax_tilekern as jtk

MEMBERS, STEPS = 1000, 60
TIME_STEP = 0.01
TRUTH = (10.0, 28.0, 8 / 3)


def velocity(state: Array, parameters: Array) -> Array:
    """Return the derivative of a state by time."""
    x, y, z = state
    sigma, rho, beta = parameters
    return jnp.array([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])


def integrate(state: Array, parameters: Array) -> Array:
    """Return where one member is after each step, of shape ``(STEPS, 3)``."""

    # Reverse mode saves the states alone, and computes each step again.
    @jax.checkpoint
    def step(s: Array, _: None) -> tuple[Array, Array]:
        k1 = velocity(s, parameters)
        k2 = velocity(s + TIME_STEP / 2 * k1, parameters)
        k3 = velocity(s + TIME_STEP / 2 * k2, parameters)
        k4 = velocity(s + TIME_STEP * k3, parameters)
        s = s + TIME_STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return s, s

    return lax.scan(step, state, None, length=STEPS)[1]


ensemble = jtk.kernel(integrate, in_axes=(0, None))


def loss(parameters: Array, start: Array, seen: Array) -> Array:
    """Return the mean squared distance to where the members were seen."""
    return jnp.mean((ensemble(start, parameters) - seen) ** 2)


@jax.jit
def update(
    parameters: Array, momentum: Array, start: Array, seen: Array, rate: Array
) -> tuple[Array, Array, Array]:
    """Return parameters and momentum after a normalised step, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(parameters, start, seen)
    momentum = 0.8 * momentum + gradient / (jnp.linalg.norm(gradient) + 1e-8)
    return parameters - rate * momentum, momentum, value


def main(updates: int = 150) -> tuple[Array, list[float]]:
    """Fit the parameters; return them and the losses."""
    start = jax.random.normal(jax.random.key(0), (MEMBERS, 3)) * 5 + jnp.array([0.0, 0.0, 25.0])
    seen = ensemble(start, jnp.array(TRUTH))
    parameters, momentum, losses = jnp.array([8.0, 24.0, 2.0]), jnp.zeros(3), []
    print(jtk.explain(jax.grad(loss), parameters, start, seen))
    for number in range(updates):
        rate = jnp.array(0.2 * (1 - number / updates))
        parameters, momentum, value = update(parameters, momentum, start, seen, rate)
        losses.append(float(value))
        if number % 25 == 0:
            print(f"update {number:3}: loss {value:9.5f}, parameters {parameters}")
    print(f"found {parameters}")
    return parameters, losses


if __name__ == "__main__":
    main()
