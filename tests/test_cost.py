"""``cost_analysis`` counts kernels as the operations that they take the place of."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_tilekern as jtk

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
W = jax.ShapeDtypeStruct((128, 32), jnp.float32)


def perceptron(matmul, x, w):
    return jnp.tanh(matmul(x, w)).sum()


def counts(function, *args):
    lowered = jax.jit(function).lower(*args)
    # On a GPU only compiled programs are counted.
    found = lowered.cost_analysis() or lowered.compile().cost_analysis()
    return {name: found[name] for name in ("flops", "bytes accessed", "transcendentals")}


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(f, (0, 1))])
@pytest.mark.parametrize("jitted", [False, True])
def test_counts_are_jaxs(transform, jitted):
    ours = transform(functools.partial(perceptron, jtk.matmul))
    theirs = counts(transform(functools.partial(perceptron, jnp.matmul)), X, W)
    found = jtk.cost_analysis(jax.jit(ours) if jitted else ours, X, W)
    assert found["flops"] >= 2 * 64 * 128 * 32
    for name, count in theirs.items():
        # A gradient's product may be a transpose and a product in JAX's own.
        assert found[name] == pytest.approx(count, rel=0.2), name
    assert found["flops"] == theirs["flops"]


def test_static_arguments():
    jitted = jax.jit(lambda x, power: jtk.matmul(x, x.T) ** power, static_argnums=1)
    assert jtk.cost_analysis(jitted, X, 2)["flops"] >= 2 * 64 * 64 * 128
