"""``kernel`` takes one kernel where that is predicted to be faster than ``vmap``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lane_functions import collatz, kalman, lorenz, metropolis
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk

pytestmark = [needs_nvrtc, pytest.mark.defaults]

KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1024))


def struct(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def with_data(data, key):
    """Steps of gradient descent of a logistic model, with noise."""

    def step(q, key):
        slope = jax.grad(lambda q: jnp.sum(jax.nn.softplus(data @ q)))(q)
        return q - 0.1 * slope + jax.random.normal(key, q.shape), None

    return lax.scan(step, jnp.zeros(8), jax.random.split(key, 100))[0]


def sampler(key):
    """Steps of noise on two numbers."""

    def step(q, key):
        return 0.9 * q + jax.random.normal(key, q.shape), None

    return lax.scan(step, jnp.zeros(2), jax.random.split(key, 200))[0]


def recurrent(weights, xs):
    return lax.scan(lambda h, x: (jnp.tanh(weights @ h + x), None), xs[0], xs)[0]


# Functions, axes, shapes, and what is predicted to be faster.
CALLS = {
    "Lorenz": (lorenz, (0, None), [struct(10_000, 3), struct(3)], "kernel"),
    "Collatz": (collatz, 0, [struct(10**6, dtype=np.uint32)], "kernel"),
    "Metropolis": (metropolis, 0, [KEYS, struct(1024)], "kernel"),
    # Its array of keys is long, and no other.
    "sampler": (
        sampler,
        0,
        [jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 32))],
        "group",
    ),
    "Kalman": (
        kalman,
        (None, None, None, 0),
        [struct(6), struct(6, 6), struct(6, 6), struct(100_000, 10, 2)],
        "kernel",
    ),
    "solve": (jnp.linalg.solve, 0, [struct(10_000, 4, 4), struct(10_000, 4)], "kernel"),
    "data": (with_data, (None, 0), [struct(200, 8), KEYS], "group"),
    # Threads hold their rows of the weights, if these are not too many.
    "recurrent": (recurrent, (None, 0), [struct(64, 64), struct(4096, 100, 64)], "group"),
    "long rows": (recurrent, (None, 0), [struct(256, 256), struct(4096, 100, 256)], "vmap"),
    "formula": (lambda x: jnp.tanh(x) * x + 1, 0, [struct(33_000_000)], "vmap"),
}


@pytest.mark.parametrize("name", CALLS)
def test_choice(name):
    function, axes, operands, wanted = CALLS[name]
    # A choice of vmap loses no kernel.
    with jtk.gpu_target("H100"), jtk.strict():
        (choice,) = jtk.explain(jtk.kernel(function, in_axes=axes), *operands)
    assert (choice.kernel is None) == (wanted == "vmap")
    if choice.kernel:
        assert choice.kernel.startswith("groups_" if wanted == "group" else "lanes_")
    if wanted == "vmap":
        assert choice.reason.startswith("vmap is predicted to be faster")
    ours, xla = choice.predicted_us
    if ours is not None:
        assert (xla < ours) == (wanted == "vmap")
    # A step of a loop that ends by a condition is no known time.
    assert (ours is None) == (name == "Collatz")


def test_a_group_is_no_larger_than_it_needs_to_be():
    """All threads compute short arrays alike, so that more of them take as long."""
    function, axes, operands, _ = CALLS["sampler"]
    with jtk.gpu_target("H100"):
        (choice,) = jtk.explain(jtk.kernel(function, in_axes=axes), *operands)
    assert choice.kernel == "groups_sampler<32>"


def test_policy_asks_for_the_kernel():
    function, axes, operands, _ = CALLS["formula"]
    with jtk.gpu_target("H100"), jtk.policy("kernels"):
        (choice,) = jtk.explain(jtk.kernel(function, in_axes=axes), *operands)
    assert choice.kernel
    ours, xla = choice.predicted_us
    assert xla < ours


def test_derivatives_are_chosen_one_by_one():
    """Each kernel of a gradient has its own prediction."""
    data, keys = struct(200, 8), struct(1024, 2, dtype=np.uint32)

    def loss(data, keys):
        mapped = jtk.kernel(
            lambda data, key: with_data(data, jax.random.wrap_key_data(key)), in_axes=(None, 0)
        )
        return jnp.sum(mapped(data, keys))

    with jtk.gpu_target("H100"):
        choices = jtk.explain(jax.grad(loss), data, keys)
    assert len(choices) == 2
    assert all(choice.predicted_us.ours for choice in choices)
