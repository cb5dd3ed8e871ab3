"""Many chains of NUTS in one kernel, with the diagnostics that compare them.

    python examples/samplers.py

The model is that of eight schools, whose effects have a common mean and spread. On a GPU each
thread runs a chain, and its trees end where they end; under ``vmap`` all wait for the deepest one.
"""

from __future__ import annotations

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern as jtk

CHAINS, WARM_UP, STEPS = 1024, 100, 200
EFFECTS = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def log_density(q: Array) -> Array:
    """Return that of the mean, the logarithm of the spread, and eight standardised effects."""
    mean, log_spread, effects = 5 * q[0], q[1], q[2:]
    residuals = (EFFECTS - mean - jnp.exp(log_spread) * effects) / ERRORS
    prior = q[0] ** 2 + jnp.sum(effects**2) + 2 * jnp.log1p(jnp.exp(2 * log_spread) / 25)
    return -0.5 * (prior + jnp.sum(residuals**2)) + log_spread


def chain(key: Array) -> Array:
    """Return a chain's mean, logarithm of spread, and first effect, of shape ``(STEPS, 3)``."""
    sampler = blackjax.nuts(log_density, step_size=0.4, inverse_mass_matrix=jnp.ones(10))

    def step(state: blackjax.mcmc.hmc.HMCState, key: Array) -> tuple[object, Array]:
        state, _ = sampler.step(key, state)
        return state, state.position[:3] * jnp.array([5.0, 1.0, 1.0])

    of_start, of_steps = jax.random.split(key)
    start = sampler.init(jax.random.normal(of_start, (10,)))
    return lax.scan(step, start, jax.random.split(of_steps, WARM_UP + STEPS))[1][WARM_UP:]


def diagnostics(draws: np.ndarray) -> tuple[float, float]:
    """Return R-hat of half chains and the effective sample size, for ``(chains, steps)`` draws."""
    halves = np.asarray(draws, np.float64).reshape(2 * len(draws), -1)
    n = halves.shape[1]
    within = halves.var(axis=1, ddof=1).mean()
    total = within * (n - 1) / n + halves.mean(axis=1).var(ddof=1)
    transformed = np.fft.rfft(halves - halves.mean(axis=1, keepdims=True), 2 * n)
    covariance = np.fft.irfft(np.abs(transformed) ** 2)[:, :n].mean(axis=0) / (n - 1)
    correlation = 1 - (within - covariance) / total
    # Sums of neighbours are positive and fall in a reversible chain, until noise hides them
    # (Geyer 1992).
    pairs = np.minimum.accumulate(correlation[: n - 1 : 2] + correlation[1::2])
    return float(np.sqrt(total / within)), halves.size / (2 * pairs[pairs > 0].sum() - 1)


def main() -> np.ndarray:
    """Sample; return the draws of shape ``(CHAINS, STEPS, 3)``."""
    keys = jax.random.split(jax.random.key(0), CHAINS)
    draws = np.asarray(jax.jit(jtk.kernel(chain))(keys))
    for i, name in enumerate(("mean", "log spread", "first effect")):
        r_hat, size = diagnostics(draws[..., i])
        mean = draws[..., i].mean()
        print(f"{name:12}: mean {mean:.2f}, R-hat {r_hat:.3f}, effective size {size:.0f}")
    return draws


if __name__ == "__main__":
    main()
