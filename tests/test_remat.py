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
@pytest.mark.one_in(4)
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


def test_policies_save_what_they_say(rng):
    """The cases above differ, so equal numbers mean that a policy was asked."""
    w, x = random(rng, (4, 4), np.float32), random(rng, (2, 3, 4), np.float32)
    numbers = {
        name: traced(gradient(by_hook, policy), w, x)[0] for name, policy in POLICIES.items()
    }
    # The backward pass has 2 products for each of the 5, but 1 for the two of x, which needs no
    # cotangent; and those that are not saved once more.
    assert numbers["everything"] == numbers["dots"] == 5 + 8
    assert numbers["nothing"] == numbers["none"] > numbers["dots without batch"] > numbers["dots"]


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


def test_the_names_are_jaxs_own():
    assert jtk.checkpoint_policies is jax.checkpoint_policies
