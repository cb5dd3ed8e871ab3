"""Checkpoint policies treat the library's products as those of JAX's that they stand for."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxprs import equations, traced
from numerics import random

import jax_tilekern as jtk
from jax_tilekern.interop import compat

policies = jax.checkpoint_policies


def by_shape(primitive, *avals, **params):
    """A policy of a user's own, which looks at what JAX's own equations have."""
    return primitive is compat.dot_general_p and params["preferred_element_type"] is not None


POLICIES = {
    "none": None,
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "dots": policies.dots_saveable,
    "checkpoint_dots": policies.checkpoint_dots,
    "dots without batch": policies.dots_with_no_batch_dims_saveable,
    "dots without batch, offloaded": policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
    "names": policies.save_only_these_names("hidden"),
    "dots or names": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("scores")
    ),
    "a user's own": by_shape,
    "all but dots": lambda primitive, *_, **__: primitive is not compat.dot_general_p,
}


def block(einsum, w, x):
    """Products without and with batch dimensions, in which the former have a result type."""
    matmul = functools.partial(einsum, "bqd,de->bqe", preferred_element_type=x.dtype)
    q, k = jnp.sin(matmul(x, w)), jnp.cos(matmul(x, w.T))
    scores = checkpoint_name(jnp.tanh(einsum("bqd,bkd->bqk", q, k)), "scores")
    return jnp.sin(matmul(checkpoint_name(einsum("bqk,bkd->bqd", scores, q), "hidden"), w)).sum()


def gradient(einsum, policy):
    return jax.grad(jax.checkpoint(functools.partial(block, einsum), policy=policy))


def by_hook(*args, **kwargs):
    return jnp.einsum(*args, _dot_general=jtk.dot_general, **kwargs)


def count(jaxpr, name):
    return sum(eqn.primitive.name == name for eqn in equations(jaxpr))


@pytest.mark.parametrize("way", ["hook", "patch"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.one_in(8)
def test_as_many_products_and_copies_as_jaxs_own(rng, x64, policy, way):
    w, x = random(rng, (4, 4), np.float64), random(rng, (2, 3, 4), np.float64)
    theirs = gradient(jnp.einsum, policy)
    expected, copies = theirs(w, x), count(jax.make_jaxpr(theirs)(w, x).jaxpr, "device_put")
    total = traced(theirs, w, x)[1]
    ours = theirs if way == "patch" else gradient(by_hook, policy)
    with jtk.patch() if way == "patch" else contextlib.nullcontext():
        assert traced(ours, w, x) == (total, 0)
        assert count(jax.make_jaxpr(ours)(w, x).jaxpr, "device_put") == copies
        # A few products of 4 terms of about 1 in float64.
        np.testing.assert_allclose(ours(w, x), expected, rtol=1e-12, atol=1e-12)


def test_offloaded_products_are_kept_in_host_memory(rng):
    w, x = random(rng, (4, 4), np.float32), random(rng, (2, 3, 4), np.float32)
    policy = POLICIES["dots without batch, offloaded"]
    _, pullback = jax.vjp(jax.checkpoint(functools.partial(block, by_hook), policy=policy), w, x)
    spaces = [jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(pullback)]
    # The three products without batch dimensions, and the transposed weight's, are on the host.
    assert spaces.count(jax.memory.Space.Host) >= 3


def test_in_scan_of_a_checkpointed_layer(rng, x64):
    """As a deep model has it."""
    ws, x = random(rng, (3, 4, 4), np.float64), random(rng, (2, 4), np.float64)

    def loss(matmul, policy, ws, x):
        layer = jax.checkpoint(lambda x, w: (jnp.sin(matmul(x, w)), None), policy=policy)
        return jax.lax.scan(layer, x, ws)[0].sum()

    numbers = {}
    for policy in (policies.nothing_saveable, policies.dots_saveable):
        theirs, ours = (
            jax.grad(functools.partial(loss, matmul, policy)) for matmul in (jnp.matmul, jtk.matmul)
        )
        numbers[policy] = traced(ours, ws, x)[0]
        assert numbers[policy] == traced(theirs, ws, x)[1]
        np.testing.assert_allclose(ours(ws, x), theirs(ws, x), rtol=1e-12, atol=1e-12)
    assert numbers[policies.dots_saveable] < numbers[policies.nothing_saveable]


# -- Epilogues: a policy that saves products saves the pre-activation. -----------------------------


def named_gelu(y, bias):
    return jax.nn.gelu(checkpoint_name(y + bias, "pre"))


def by_epilogue(params, x):
    for w, b in params:
        x = jtk.matmul(x, w, epilogue=named_gelu, operands=(b,))
    return x.sum()


def by_jax(params, x):
    for w, b in params:
        x = named_gelu(jnp.matmul(x, w), b)
    return x.sum()


def products_in_all(function, *args):
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)]
    ours = ("tilekern_contract", "dot_general")
    return sum(map(names.count, ours))


@pytest.fixture
def perceptron(rng, x64):
    params = [(random(rng, (6, 6), np.float64), random(rng, (6,), np.float64)) for _ in range(3)]
    return params, random(rng, (5, 6), np.float64)


_EPILOGUE_POLICIES = [*set(POLICIES) - {"names", "dots or names"}, "pre", "pre, offloaded"]


@pytest.mark.parametrize("way", ["epilogue", "fuse"])
@pytest.mark.parametrize("name", sorted(_EPILOGUE_POLICIES))
@pytest.mark.one_in(4)
def test_products_with_epilogues(perceptron, name, way):
    """As many products as JAX's program has: the elementwise part alone is computed again."""
    policy = {
        **POLICIES,
        "pre": policies.save_only_these_names("pre"),
        "pre, offloaded": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["pre"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[name]
    function = by_epilogue if way == "epilogue" else jtk.fuse(by_jax)
    ours, theirs = (jax.grad(jax.checkpoint(f, policy=policy)) for f in (function, by_jax))
    assert products_in_all(ours, *perceptron) == products_in_all(theirs, *perceptron)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(close, ours(*perceptron), theirs(*perceptron))
    copies = (count(jax.make_jaxpr(f)(*perceptron).jaxpr, "device_put") for f in (ours, theirs))
    assert len(set(copies)) == 1
