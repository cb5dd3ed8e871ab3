"""Samplers and solvers of other libraries, and decompositions, as functions of one lane."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_Function = Callable[..., Any]


def diffrax_trajectory(start: Any, rates: Any) -> Any:
    """Return where predators and prey are, by adaptive steps of Tsit5."""
    import diffrax

    def velocity(_: Any, y: Any, __: Any) -> Any:
        births, deaths, growth = rates[0] * y[0], rates[1] * y[0] * y[1], rates[3] * y[0] * y[1]
        return jnp.stack([births - deaths, growth - rates[2] * y[1]])

    found = diffrax.diffeqsolve(
        diffrax.ODETerm(velocity), diffrax.Tsit5(), 0.0, 20.0, None, start,
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
        max_steps=256, throw=False,
    )  # fmt: skip
    assert found.ys is not None
    return found.ys[0]


def blackjax_nuts(steps: int, log_density: _Function, size: int, key: Any) -> Any:
    """Return the states of blackjax' No-U-Turn sampler."""
    import blackjax

    sampler = blackjax.nuts(log_density, step_size=0.2, inverse_mass_matrix=jnp.ones(size))

    def step(state: Any, key: Any) -> tuple[Any, Any]:
        state, _ = sampler.step(key, state)
        return state, state.position

    start = sampler.init(jnp.zeros(size))
    return lax.scan(step, start, jax.random.split(key, steps))[1]


@functools.cache
def numpyro_eight_schools(warmup: int, steps: int) -> _Function:
    """Return a function of a key: the means of numpyro's No-U-Turn sampler of eight schools."""
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer.hmc import hmc
    from numpyro.infer.util import initialize_model

    effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def schools() -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        spread = numpyro.sample("spread", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            effect = numpyro.sample("effect", dist.Normal(0, 1))
            numpyro.sample("seen", dist.Normal(mean + spread * effect, errors), obs=effects)

    model = initialize_model(jax.random.key(0), schools)
    begin, proceed = hmc(model.potential_fn, algo="NUTS")

    def chain(key: Any) -> Any:
        def step(state: Any, _: None) -> tuple[Any, Any]:
            state = proceed(state)
            return state, state.z["mean"]

        start = begin(model.param_info, num_warmup=warmup, rng_key=key)
        return lax.scan(step, start, None, length=warmup + steps)[1][warmup:, None]

    return chain


def recurrent(weights: Any, inputs: Any) -> Any:
    """Return the last state of a recurrent network."""
    of_input, of_state = weights
    start = jnp.zeros(of_state.shape[0])

    def step(state: Any, x: Any) -> tuple[Any, None]:
        return jnp.tanh(of_input @ x + of_state @ state), None

    return lax.scan(step, start, inputs)[0]
