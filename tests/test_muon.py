"""``muon`` against ``optax.contrib.muon``: updates, states, training, and several devices."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import AUTO, EXPLICIT, bytes_sent, collectives, devices, mesh_of, put

import jax_tilekern as jtk
from jax_tilekern.cli.digits import load_digits

optax = pytest.importorskip("optax")
if not hasattr(optax.contrib, "MuonDimensionNumbers"):
    pytest.skip("optax.contrib.muon has no dimension numbers", allow_module_level=True)
Numbers = optax.contrib.MuonDimensionNumbers

pytestmark = pytest.mark.usefixtures("highest_precision")

NUMBERS = {"a": Numbers(), "b": Numbers(), "c": [Numbers(), None], "d": Numbers(2, (0, 3))}
ONLY_HERE = ("ns", "mesh", "max_stack_bytes")


def parameters(rng, dtype=np.float32):
    shapes = {"a": (16, 40), "b": (16, 40), "c": [(40, 16), (7,)], "d": (3, 2, 16, 5)}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def largest_difference(x, y):
    scale = max(float(jnp.abs(y).max()), 1e-30)
    return float(jnp.abs(x.astype(np.float32) - y.astype(np.float32)).max()) / scale


def assert_same_steps(params, tolerance, **kwargs):
    """Compare three updates and states with those of optax."""
    ours = jtk.muon(0.1, **{"ns": "standard", **kwargs})
    theirs = optax.contrib.muon(0.1, **{k: x for k, x in kwargs.items() if k not in ONLY_HERE})
    state, wanted_state = ours.init(params), theirs.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(wanted_state)
    grads = params
    steps = jax.jit(ours.update), jax.jit(theirs.update)
    for i in range(3):
        grads = jax.tree.map(lambda x, i=i: x * 1.3 + i, grads)
        updates, state = steps[0](grads, state, params)
        wanted, wanted_state = steps[1](grads, wanted_state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(wanted)
        for x, y in zip(
            jax.tree.leaves((updates, state)), jax.tree.leaves((wanted, wanted_state)), strict=True
        ):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert largest_difference(x, y) < tolerance


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"nesterov": False, "beta": 0.9},
        {"adaptive": True},
        {"preconditioning": "aol"},
        {"preconditioning": "schatten"},
        {"preconditioning": "spectral"},
        {"consistent_rms": 0.2},
        {"ns_coeffs": "dion"},
        {"ns_steps": 3, "eps": 1e-3},
        {"mu_dtype": jnp.bfloat16},
        {"muon_weight_dimension_numbers": NUMBERS},
        {"muon_weight_dimension_numbers": NUMBERS, "max_stack_bytes": 1},
        {"muon_weight_dimension_numbers": NUMBERS, "max_stack_bytes": 6000},
        {"muon_weight_dimension_numbers": {"a": None, "b": Numbers(1, 0), "c": None, "d": None}},
        {"ns": "gram"},
        {"ns": "gram", "ns_steps": 0},
        {"ns": "auto"},
        {
            "weight_decay": 0.1,
            "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
            "adam_learning_rate": 0.01,
            "adam_weight_decay": 0.2,
        },
    ],
    ids=lambda kwargs: "-".join(kwargs) or "default",
)
@pytest.mark.one_in(20)
def test_steps_are_those_of_optax(rng, kwargs):
    tolerance = 1e-2 if "mu_dtype" in kwargs else 1e-4 if kwargs.get("ns") else 2e-5
    assert_same_steps(parameters(rng), tolerance, **kwargs)


@pytest.mark.parametrize("types", [None, (AUTO, AUTO), (EXPLICIT, EXPLICIT)], ids=str)
@pytest.mark.one_in(3)
def test_injected_hyperparameters(rng, types):
    """They are values of the program, ``ns_steps`` among them."""
    params, gradients = parameters(rng), parameters(rng)
    rate = optax.linear_schedule(0.1, 0.0, 10)
    optimizers = [optax.inject_hyperparams(f)(rate) for f in (optax.contrib.muon, jtk.muon)]
    wanted, state = jax.jit(optimizers[0].update)(gradients, optimizers[0].init(params), params)
    with contextlib.nullcontext() if types is None else jax.set_mesh(mesh_of(types)):
        own = optimizers[1].init(params)
        assert jax.tree.structure(own) == jax.tree.structure(state)
        found, _ = jax.jit(optimizers[1].update)(gradients, own, params)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * max(1, np.abs(y).max()))


def test_dimension_numbers_of_a_function(rng):
    def numbers(params):
        return jax.tree.map(lambda x: Numbers(-2, -1) if x.ndim > 1 else None, params)

    assert_same_steps(parameters(rng), 2e-5, muon_weight_dimension_numbers=numbers)


def test_parameters_of_16_bits(rng):
    # Optax multiplies and adds in bfloat16: the difference is its error.
    params = {"a": parameters(rng, jnp.bfloat16)["a"]}
    assert_same_steps(params, 0.3)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="XLA of jax 0.10 keeps the buffers of stacks apart on CPUs",
)
def test_max_stack_bytes_bounds_the_memory():
    params = [jax.ShapeDtypeStruct((64, 96), jnp.float32)] * 12

    def temporaries(matrices):
        optimizer = jtk.muon(0.1, ns="standard", max_stack_bytes=matrices * 64 * 96 * 4)
        args = params, jax.eval_shape(optimizer.init, params), params
        compiled = jax.jit(optimizer.update).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2) < temporaries(12) / 2


# Training.


def perceptron(rng):
    train, _ = load_digits()
    sizes = ((64, 48), (48, 48), (48, 10))
    params = [(rng.normal(size=(m, n)) / np.sqrt(m), np.zeros(n)) for m, n in sizes]

    def loss(params, x, y):
        for i, (w, b) in enumerate(params):
            x = x @ w + b
            x = jax.nn.relu(x) if i < 2 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    return params, functools.partial(loss, x=train.images[:512], y=train.labels[:512])


def transformer(rng):
    d, heads, words = 32, 4, 20
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    params = {
        "layers": [
            {name: rng.normal(size=shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
            for _ in range(2)
        ],
        "scale": np.ones(d),
        "words": rng.normal(size=(words, d)),
    }
    text = np.cumsum(rng.integers(0, 3, (8, 17)), 1) % words

    def loss(params):
        x = params["words"][text[:, :-1]]
        for layer in params["layers"]:
            q, k, v = (
                y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)
                for y in jnp.split(x @ layer["qkv"], 3, axis=-1)
            )
            scores = jnp.where(np.tri(16, dtype=bool), q @ k.mT / np.sqrt(d / heads), -1e9)
            mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
            x = x + mixed @ layer["out"]
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        logits = (x * params["scale"]) @ params["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    return params, loss


@pytest.mark.parametrize("model", [perceptron, transformer])
@pytest.mark.one_in(2)
def test_losses_are_those_of_optax(rng, model):
    params, loss = model(rng)
    params = jax.tree.map(lambda x: jnp.asarray(x, np.float32), params)

    def losses(optimizer):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.jit(lambda: jax.lax.scan(step, (params, optimizer.init(params)), None, 12)[1])()

    ours, theirs = losses(jtk.muon(0.02)), losses(optax.contrib.muon(0.02))
    np.testing.assert_allclose(ours, theirs, rtol=2e-2)
    np.testing.assert_allclose(ours[:3], theirs[:3], rtol=1e-4)
    assert ours[-1] < 0.9 * ours[0]


# Several devices.


def layers(count, size):
    shapes = {"q": (size, size), "up": (size, 3 * size)}
    return [
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        for _ in range(count)
    ]


def compiled_step(optimizer, mesh, params, spec):
    def sharded(x):
        own = spec if x.ndim == 2 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, own))

    def step(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(sharded, (params, jax.eval_shape(optimizer.init, params)))
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    return jax.jit(step, out_shardings=out).lower(params, state, params).compile()


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("spec", [P("d", "m"), P(("d", "m"))], ids=["two axes", "one axis"])
def test_a_stack_is_resharded_once_each_way(spec):
    mesh, params = mesh_of((AUTO, AUTO)), layers(2, 256)
    ours = compiled_step(jtk.muon(0.1, ns="standard", mesh=mesh), mesh, params, spec)
    shapes, axes = 2, 1 if spec == P(("d", "m")) else 2
    # None of them is inside the iteration.
    assert [x.kind for x in collectives(ours)] == ["all-to-all"] * 2 * shapes * axes
    theirs = compiled_step(optax.contrib.muon(0.1), mesh, params, spec)
    assert len(collectives(theirs)) > 5 * len(collectives(ours))
    assert bytes_sent(ours) < bytes_sent(theirs) / 4


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT)], ids=["auto", "explicit"])
def test_sharded_updates(rng, types):
    mesh = mesh_of(types)
    params = parameters(rng)
    specs = {"a": P("d", "m"), "b": P(None, "m"), "c": [P("m"), P()], "d": P(None, "d", "m")}
    optimizer = jtk.muon(0.1, muon_weight_dimension_numbers=NUMBERS, max_stack_bytes=5000)
    wanted, _ = optimizer.update(params, optimizer.init(params), params)
    with jax.set_mesh(mesh):
        sharded = jax.tree.map(lambda x, spec: put(mesh, x, spec), params, specs)
        got, _ = jax.jit(optimizer.update)(sharded, optimizer.init(sharded), sharded)
    for x, y, like in zip(*map(jax.tree.leaves, (got, wanted, sharded)), strict=True):
        assert largest_difference(np.asarray(x), y) < 1e-4
        if EXPLICIT in types:
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_inside_shard_map_a_device_has_its_own_matrices(rng):
    mesh = mesh_of((AUTO, AUTO))
    optimizer = jtk.muon(0.1)
    x = jnp.asarray(rng.normal(size=(8, 16, 24)), np.float32)

    def update(x):
        params = {"w": x[0]}
        return optimizer.update(params, optimizer.init(params), params)[0]["w"][None]

    divided = P(("d", "m"))
    got = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=divided, out_specs=divided))(x)
    np.testing.assert_allclose(got, jnp.concatenate([update(y[None]) for y in x]), atol=1e-5)


# Errors.


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"ns": "fast"}, "ns is 'fast'; it is 'auto', 'standard' or 'gram'"),
        ({"preconditioning": "l1"}, "preconditioning is 'l1'; it is 'frobenius'"),
        ({"ns_coeffs": "mine"}, "ns_coeffs is 'mine'; it is 'standard' or 'dion'"),
        ({"max_stack_bytes": 0}, "max_stack_bytes is positive, not 0"),
    ],
)
def test_unknown_names(kwargs, words):
    with pytest.raises(ValueError, match=words):
        jtk.muon(0.1, **kwargs)


def test_arguments_of_other_types():
    for kwargs in ({"mesh": "d"}, {"max_stack_bytes": 1e9}, {"max_stack_bytes": True}):
        with pytest.raises(TypeError, match=f"{next(iter(kwargs))} is a"):
            jtk.muon(0.1, **kwargs)


def test_dimension_numbers_that_do_not_fit():
    params = {"w": jnp.ones((3, 4))}
    optimizer = jtk.muon(0.1, muon_weight_dimension_numbers={"w": Numbers(0, (0, 1))})
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"shape \(3, 4\) has no matrices"):
        optimizer.update(params, state, params)


def test_optax_is_imported_when_it_is_needed(monkeypatch):
    imported = builtins.__import__

    def without_optax(name, *args, **kwargs):
        if name.partition(".")[0] == "optax":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_optax)
    monkeypatch.delitem(sys.modules, "optax")
    with pytest.raises(ImportError, match="pip install optax"):
        jtk.muon(0.1)
