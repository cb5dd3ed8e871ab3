"""``jax_kernel``: functions with loops as one kernel, against ``vmap``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tilekern as jtk
from benchmarks import lane_libraries as libraries
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import KERNELS, Program, on_gpu, relative
from benchmarks.timing import short_times

_GROUP = "`kernel` against `vmap`"
_OF_LIBRARIES = "`kernel` of samplers and solvers against `vmap`"
_WITH_ARRAYS = "`kernel` of arrays against `vmap`"
_BY_COUNT = "`kernel` of few to many lanes against `vmap`"
_STEP = 0.001
_MAPS: dict[str, Callable[..., Any]] = {"ours": jtk.kernel, "XLA": jax.vmap}


def lorenz(steps: int, state: Any, parameters: Any, checkpoint: bool = False) -> Any:
    """Return where a fourth-order Runge-Kutta method ends."""

    def velocity(s: Any) -> Any:
        x, y, z = s
        sigma, rho, beta = parameters
        return jnp.array([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])

    def step(s: Any, _: None) -> tuple[Any, None]:
        k1 = velocity(s)
        k2 = velocity(s + _STEP / 2 * k1)
        k3 = velocity(s + _STEP / 2 * k2)
        k4 = velocity(s + _STEP * k3)
        return s + _STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return lax.scan(jax.checkpoint(step) if checkpoint else step, state, None, length=steps)[0]


def _collatz(n: Any) -> Any:
    def step(state: Any) -> Any:
        n, count = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    return lax.while_loop(lambda state: state[0] > 1, step, (n, 0))[1]


def _metropolis(steps: int, key: Any) -> Any:
    """Return the mean of a chain whose states have a normal distribution."""

    def step(state: Any, _: None) -> Any:
        key, x, total = state
        key, of_step, of_choice = jax.random.split(key, 3)
        proposed = x + jax.random.normal(of_step)
        accepted = jax.random.uniform(of_choice) < jnp.exp(0.5 * (x * x - proposed * proposed))
        x = jnp.where(accepted, proposed, x)
        return (key, x, total + x), None

    (_, _, total), _ = lax.scan(step, (key, 0.0, 0.0), None, length=steps)
    return total / steps


def _kalman(transition: Any, observed: Any) -> Any:
    """Filter observations of one of six states; return the last mean."""

    def step(state: Any, z: Any) -> Any:
        m, p = state
        m, p = transition @ m, transition @ p @ transition.T + 0.1 * jnp.eye(6)
        gain = p[:, 0] / (p[0, 0] + 0.5)
        return (m + gain * (z - m[0]), p - jnp.outer(gain, p[0])), None

    (mean, _), _ = lax.scan(step, (jnp.zeros(6), jnp.eye(6)), observed)
    return mean


def _hmc(steps: int, data: Any, signs: Any, key: Any) -> Any:
    """Return the states of Hamiltonian Monte Carlo of a logistic model, ten leapfrogs a step."""

    def energy(q: Any) -> Any:
        return jnp.sum(jax.nn.softplus(-signs * (data @ q))) + 0.5 * q @ q

    def step(q: Any, key: Any) -> tuple[Any, Any]:
        of_momentum, of_choice = jax.random.split(key)
        p = jax.random.normal(of_momentum, q.shape)

        def leapfrog(_: Any, state: Any) -> Any:
            x, v = state
            v -= 0.05 * jax.grad(energy)(x)
            x += 0.1 * v
            return x, v - 0.05 * jax.grad(energy)(x)

        x, v = lax.fori_loop(0, 10, leapfrog, (q, p))
        gain = energy(q) + 0.5 * p @ p - energy(x) - 0.5 * v @ v
        q = jnp.where(jnp.log(jax.random.uniform(of_choice)) < gain, x, q)
        return q, q

    start = jnp.zeros(data.shape[1])
    return lax.scan(step, start, jax.random.split(key, steps))[1]


def _sides(function: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[str, Any]:
    return {side: function(map_) for side, map_ in _MAPS.items()}


# The kernel that the default leaves to ``vmap``.
_ONE_KERNEL = {"kernel": KERNELS}


def _with_kernel(function: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[str, Any]:
    return {**_sides(function), "kernel": function(jtk.kernel)}


_THREADS = {f"{n} threads": n for n in (1, 32, 64, 128)}
# ``explain`` is recorded for the sides of contexts.
_WITH_THREADS = dict.fromkeys(_THREADS, nullcontext)


def _with_threads(
    function: Callable[[Callable[..., Any]], Callable[..., Any]], least: int = 1
) -> dict[str, Any]:
    # On a CPU a kernel is vmap, whatever its threads.
    by_threads = {
        name: function(functools.partial(jtk.kernel, threads=n))
        for name, n in _THREADS.items()
        if n >= least and (on_gpu() or n == 32)
    }
    return {**_sides(function), **by_threads}


def _differences_of_means(_: Any, results: Any) -> dict[str, float]:
    means = {side: np.asarray(x, np.float64).mean((0, 1)) for side, x in results.items()}
    return relative(means, means["XLA"])


def _starts(lanes: int) -> tuple[Any, Any]:
    start = jax.random.normal(jax.random.key(0), (lanes, 3)) + 1
    return start, jnp.array([10.0, 28.0, 8 / 3])


def _series(lanes: int, steps: int) -> tuple[Any, Any]:
    transition = jnp.eye(6) + 0.1 * jnp.eye(6, k=1)
    return transition, jax.random.normal(jax.random.key(2), (lanes, steps))


# XLA's loops have thousands of launches.
_program = functools.partial(Program, timing=short_times)


def _model(rows: int, chains: int) -> tuple[Any, ...]:
    data = jax.random.normal(jax.random.key(2), (rows, 8))
    signs = jnp.where(data[:, 0] > jax.random.normal(jax.random.key(3), (rows,)), 1.0, -1.0)
    return data, signs, jax.random.split(jax.random.key(4), chains)


def _chains(steps: int, map_: Callable[..., Any]) -> Callable[..., Any]:
    mapped: Callable[..., Any] = map_(functools.partial(_hmc, steps), in_axes=(None, None, 0))
    return mapped


def _keys(count: int) -> tuple[Any]:
    return (jax.random.split(jax.random.key(6), count),)


def _nuts(steps: int) -> Callable[[Any], Any]:
    """Return blackjax' sampler of a normal distribution of two numbers."""
    return functools.partial(libraries.blackjax_nuts, steps, lambda x: -0.5 * jnp.sum(x * x), 2)


def _predators(count: int) -> tuple[Any, Any]:
    start = jax.random.normal(jax.random.key(5), (count, 2))
    return 2 + jnp.abs(start), jnp.array([1.1, 0.4, 0.4, 0.1])


def _ends(map_: Callable[..., Any]) -> Callable[..., Any]:
    mapped: Callable[..., Any] = map_(libraries.diffrax_trajectory, in_axes=(0, None))
    return mapped


def _by_count() -> Iterator[Program]:
    """Yield programs of few to many lanes, for the figures of times."""
    tiny = not on_gpu()
    rows, draws, steps = (20, 3, 3) if tiny else (200, 200, 100)
    named = functools.partial(_program, group=_BY_COUNT)
    for count in (2,) if tiny else (64, 512, 4096, 32768):
        yield named(
            f"chains of HMC, {rows} x 8 data: {count}",
            functools.partial(_model, rows, count),
            _sides(functools.partial(_chains, draws)),
            errors=_differences_of_means,
        )
        if find_spec("diffrax"):
            arguments = functools.partial(_predators, count)
            yield named(f"trajectories of diffrax: {count}", arguments, _sides(_ends))
        if find_spec("blackjax"):
            yield named(
                f"chains of blackjax NUTS: {count}",
                functools.partial(_keys, count),
                _sides(lambda map_: map_(_nuts(steps))),
                errors=_differences_of_means,
            )


def _libraries() -> Iterator[Program]:
    """Yield programs of other libraries that are installed, and of decompositions."""
    tiny = not on_gpu()
    lanes = 10 if tiny else 10_000
    named = functools.partial(_program, group=_OF_LIBRARIES, contexts=_ONE_KERNEL | _WITH_THREADS)
    sampled = functools.partial(named, errors=_differences_of_means)

    def normal(*shape: int) -> Any:
        return jax.random.normal(jax.random.key(5), shape)

    if find_spec("diffrax"):
        starts = functools.partial(_predators, lanes)

        def gradient(map_: Callable[..., Any]) -> Callable[..., Any]:
            return jax.grad(lambda start, rates: jnp.sum(_ends(map_)(start, rates) ** 2), 1)

        yield named(f"diffrax, {lanes} trajectories", starts, _with_kernel(_ends))
        yield named(f"gradient of {lanes} trajectories", starts, _with_kernel(gradient))
    chains, steps = (4, 3) if tiny else (1024, 100)
    if find_spec("blackjax"):
        sides = _with_kernel(lambda map_: map_(_nuts(steps)))
        yield sampled(f"blackjax NUTS of {chains}", functools.partial(_keys, chains), sides)
        data = normal(200, 8)
        logistic = functools.partial(
            libraries.blackjax_nuts,
            steps,
            lambda q: -jnp.sum(jax.nn.softplus(data @ q)) - 0.5 * q @ q,
            8,
        )
        sides = _with_threads(lambda map_: map_(logistic))
        name = f"blackjax NUTS of 200 x 8 data, {chains}"
        yield sampled(name, functools.partial(_keys, chains), sides)
    if find_spec("numpyro"):
        schools = libraries.numpyro_eight_schools(steps // 4, steps)
        sides = _with_threads(lambda map_: map_(schools))
        yield sampled(f"numpyro NUTS of {chains}", functools.partial(_keys, chains), sides)
    # Values alone: vectors have any sign.
    for name, values, size in (
        ("eigh", jnp.linalg.eigvalsh, 3), ("eigh", jnp.linalg.eigvalsh, 16),
        ("svd", jnp.linalg.svdvals, 4),
    ):  # fmt: skip
        matrices = functools.partial(lambda n: (normal(lanes, n, n),), size)
        sides = _with_kernel(functools.partial(lambda f, map_: map_(f), values))
        yield named(f"{name} of {lanes} {size}x{size}", matrices, sides)
    length = 10 if tiny else 100
    systems = functools.partial(
        lambda n: (normal(lanes, n), 10 + normal(lanes, n), normal(lanes, n), normal(lanes, n, 1)),
        length,
    )
    sides = _with_kernel(lambda map_: map_(lax.linalg.tridiagonal_solve))
    yield named(f"{lanes} tridiagonal systems of {length}", systems, sides)
    sequences, length, units = (4, 5, 8) if tiny else (4096, 128, 64)

    def network() -> Any:
        weights = normal(units, 16) / 4, normal(units, units) / units**0.5
        return weights, normal(sequences, length, 16)

    def last(map_: Callable[..., Any]) -> Callable[..., Any]:
        mapped: Callable[..., Any] = map_(libraries.recurrent, in_axes=(None, 0))
        return mapped

    def weights_gradient(map_: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda weights, inputs: jnp.sum(last(map_)(weights, inputs) ** 2))

    for name, function in (("", last), ("gradient of ", weights_gradient)):
        # One thread spills 40 kB, and its compilation takes minutes.
        sides = _with_threads(function, least=32)
        yield named(f"{name}RNN of {sequences} sequences", network, sides)


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    tiny = not on_gpu()
    steps = 10 if tiny else 1000
    of_lorenz = functools.partial(lorenz, steps)

    def forward(map_: Callable[..., Any]) -> Callable[..., Any]:
        mapped: Callable[..., Any] = map_(of_lorenz, in_axes=(0, None))
        return mapped

    def gradient(map_: Callable[..., Any], function: Any = of_lorenz) -> Callable[..., Any]:
        def loss(start: Any, parameters: Any) -> Any:
            return jnp.sum(map_(function, in_axes=(0, None))(start, parameters) ** 2)

        return jax.grad(loss, 1)

    for lanes in (20,) if tiny else (10_000, 1_000_000):
        starts = functools.partial(_starts, lanes)
        sides = _sides(forward)
        yield _program(f"Lorenz, {steps} steps of {lanes}", starts, sides, group=_GROUP)
        sides = _sides(gradient)
        # What the call saves: everything, states, or some states.
        for name, checkpoint in (("all saved", None), ("states", 1), ("chunks", 32)):
            sides[name] = gradient(functools.partial(jtk.kernel, checkpoint=checkpoint))
        sides["XLA states"] = gradient(jax.vmap, functools.partial(of_lorenz, checkpoint=True))
        yield _program(f"gradient of {lanes}", starts, sides, group=_GROUP)

    lanes = 50 if tiny else 1_000_000

    def numbers() -> tuple[Any, ...]:
        return (jnp.arange(1, lanes + 1, dtype=jnp.uint32),)

    sides = _sides(lambda map_: map_(_collatz))
    yield _program(f"Collatz of {lanes}", numbers, sides, group=_GROUP)

    chains = 20 if tiny else 10_000

    def keys() -> tuple[Any, ...]:
        return (jax.random.split(jax.random.key(1), chains),)

    sampler = functools.partial(_metropolis, steps)
    sides = _sides(lambda map_: map_(sampler))
    yield _program(f"Metropolis of {chains}", keys, sides, group=_GROUP)

    rows, chains, draws = (20, 4, 3) if tiny else (200, 1024, 200)
    yield _program(
        f"HMC of {rows} x 8 data, {draws} steps of {chains}",
        functools.partial(_model, rows, chains),
        _with_threads(functools.partial(_chains, draws)),
        contexts=_WITH_THREADS,
        # Chains that differ by roundings part; their means do not.
        errors=_differences_of_means,
        group=_WITH_ARRAYS,
    )

    numbers_of_line = 1000 if tiny else 33_000_000
    yield _program(
        f"a formula of {numbers_of_line}",
        lambda: (jnp.linspace(0, 1, numbers_of_line),),
        _with_kernel(lambda map_: map_(lambda x: jnp.tanh(x) * x + 1)),
        contexts=_ONE_KERNEL,
        group=_WITH_ARRAYS,
    )

    filters, length = (10, 5) if tiny else (100_000, 100)
    yield _program(
        f"Kalman filter of {filters}",
        functools.partial(_series, filters, length),
        _sides(lambda map_: map_(_kalman, in_axes=(None, 0))),
        group=_GROUP,
    )
    yield from _libraries()
    yield from _by_count()


COMMAND = ProgramsCommand("functions with loops as one kernel", _programs, 1.0)
