"""Find the rates of predators and prey from an ensemble of trajectories, by diffrax.

    python examples/ode.py

Steps are adaptive. On a GPU each thread takes the steps of its own trajectory, in one kernel;
under ``vmap`` all take as many as the slowest one. The gradient is diffrax's own, in kernels again.
"""

from __future__ import annotations

import diffrax
import jax
import jax.numpy as jnp
from jax import Array

import jax_tilekern as jtk

MEMBERS = 1000
START, END = 0.0, 6.0
TIMES = jnp.linspace(START, END, 7)
TRUTH = jnp.array([1.1, 0.4, 0.4, 0.1])


def trajectory(start: Array, rates: Array) -> Array:
    """Return prey and predators at each time, of shape ``(7, 2)``."""

    def velocity(t: Array, y: Array, args: None) -> Array:
        birth, death, growth = rates[0] * y[0], rates[1] * y[0] * y[1], rates[3] * y[0] * y[1]
        return jnp.stack([birth - death, growth - rates[2] * y[1]])

    found = diffrax.diffeqsolve(
        diffrax.ODETerm(velocity),
        diffrax.Tsit5(),
        START,
        END,
        None,
        start,
        saveat=diffrax.SaveAt(ts=TIMES),
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
        max_steps=256,
        throw=False,
    )
    return found.ys


ensemble = jtk.kernel(trajectory, in_axes=(0, None))


def loss(log_rates: Array, starts: Array, seen: Array) -> Array:
    """Return the mean squared distance to where the members were seen."""
    return jnp.mean((ensemble(starts, jnp.exp(log_rates)) - seen) ** 2)


@jax.jit
def update(
    log_rates: Array, momentum: Array, starts: Array, seen: Array, rate: Array
) -> tuple[Array, Array, Array]:
    """Return rates and momentum after a normalised step, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(log_rates, starts, seen)
    momentum = 0.7 * momentum + gradient / (jnp.linalg.norm(gradient) + 1e-8)
    return log_rates - rate * momentum, momentum, value


def main(updates: int = 60) -> tuple[Array, list[float]]:
    """Fit the rates; return them and the losses."""
    starts = jax.random.uniform(jax.random.key(0), (MEMBERS, 2), minval=2.0, maxval=10.0)
    seen = ensemble(starts, TRUTH)
    log_rates, momentum, losses = jnp.log(0.8 * TRUTH), jnp.zeros(4), []
    for number in range(updates):
        rate = jnp.array(0.03 * (1 - number / updates))
        log_rates, momentum, value = update(log_rates, momentum, starts, seen, rate)
        losses.append(float(value))
        if number % 10 == 0:
            print(f"update {number:2}: loss {value:8.5f}, rates {jnp.exp(log_rates)}")
    print(f"found {jnp.exp(log_rates)}")
    return jnp.exp(log_rates), losses


if __name__ == "__main__":
    main()
