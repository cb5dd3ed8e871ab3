"""``moe`` with a recipe of 8-bit floats, against the same recipe of dense experts."""

import functools

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from jax import lax
from jax.sharding import PartitionSpec as P
from numerics import F8E5, random
from sharded import MESH_TYPES, devices, mesh_of, put

import jax_tilekern as jtk
from jax_tilekern.ops import moe

T, D, H, E, K = 40, 144, 160, 3, 2
RECIPES = [jtk.Fp8Recipe(), jtk.Fp8Recipe(F8E5, power_of_two=True)]
dot = functools.partial(jnp.matmul, precision="highest")


def operands(rng, *, gate=True, biases=False, dtype=np.float32):
    shapes = {"x": (T, D), "w_up": (E, D, H), "w_down": (E, H, D)}
    if gate:
        shapes["w_gate"] = (E, D, H)
    if biases:
        shapes |= {"b_up": (E, H), "b_down": (E, D)} | ({"b_gate": (E, H)} if gate else {})
    arrays = {name: random(rng, shape, dtype) / 8 for name, shape in shapes.items()}
    # Rows and columns of different magnitudes, so that blocks matter.
    arrays["x"] *= jnp.asarray(np.exp(rng.normal(size=(T, 1))), dtype)
    return arrays, jtk.route(random(rng, (T, E), np.float32), K)


def rounded(x, block, recipe, dtype=jnp.float8_e4m3fn):
    values, scales = jtk.quantize(x, block, dtype, power_of_two=recipe.power_of_two)
    for axis in (-2, -1):
        if scales.shape[axis] not in (1, values.shape[axis]):
            whole = jnp.repeat(scales, 128, axis)
            scales = lax.slice_in_dim(whole, 0, values.shape[axis], axis=axis)
    return values.astype(np.float32) * scales


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x, w, recipe):
    """Rows times a matrix: what a layer of the recipe computes."""
    return dot(rounded(x, (1, 128), recipe), rounded(w.T, (128, 128), recipe).T)


def _backward(recipe, residuals, dy):
    x, w = residuals
    of_dy = rounded(dy, (1, 128), recipe, recipe.gradient_dtype)
    return dot(of_dy, rounded(w, (128, 128), recipe).T), dot(x.T, dy)


product.defvjp(lambda x, w, recipe: (product(x, w, recipe), (x, w)), _backward)


def dense(arrays, weights, indices, recipe):
    """Every expert computes every token."""
    total = 0
    for e in range(E):
        a = {name: x if name == "x" else x[e] for name, x in arrays.items()}
        chosen = jnp.where(indices == e, weights, 0).sum(1, keepdims=True)
        hidden = product(a["x"], a["w_up"], recipe) + a.get("b_up", 0)
        if "w_gate" in a:
            hidden *= jax.nn.silu(product(a["x"], a["w_gate"], recipe) + a.get("b_gate", 0))
        else:
            hidden = jax.nn.silu(hidden)
        total += product(hidden * chosen, a["w_down"], recipe) + chosen * a.get("b_down", 0)
    return total


def ours(arrays, weights, indices, recipe=RECIPES[0], **kwargs):
    arrays = dict(arrays)
    x, up, down = (arrays.pop(name) for name in ("x", "w_up", "w_down"))
    return jtk.moe(
        x, up, down, weights, indices, precision="highest", recipe=recipe, **arrays, **kwargs
    )


def with_gradients(layer, indices, recipe):
    def call(arrays, weights):
        y, pull = jax.vjp(lambda *args: layer(*args, indices, recipe), arrays, weights)
        return y, pull(jnp.cos(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype))

    return jax.jit(call)


def assert_close(found, wanted, tolerance=1e-2):
    # A value that another order of sums changes may be rounded to a neighbour.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("recipe", RECIPES, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(("gate", "biases"), [(True, False), (True, True), (False, True)])
@pytest.mark.one_in(3)
def test_values_and_gradients(rng, gate, biases, recipe):
    arrays, (weights, indices) = operands(rng, gate=gate, biases=biases)
    indices = (
        indices.at[0, 0].set(-1).at[1, 1].set(E).at[2:, 0].set(jnp.where(indices[2:, 1] == 1, 0, 1))
    )
    found, wanted = (with_gradients(f, indices, recipe)(arrays, weights) for f in (ours, dense))
    assert_close(found, wanted)
    # The layer without a recipe is another one, and close.
    exact = with_gradients(ours, indices, None)(arrays, weights)
    distances = [
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    ]
    assert 1e-2 < np.median(distances) < 0.1


def test_transformations(rng):
    arrays, (weights, indices) = operands(rng)
    recipe = RECIPES[0]
    gradient = with_gradients(ours, indices, recipe)
    wanted = gradient(arrays, weights)
    for other in (functools.partial(ours, save="inputs"), jax.checkpoint(ours, static_argnums=3)):
        assert_close(with_gradients(other, indices, recipe)(arrays, weights), wanted)
    stacked = {**arrays, "x": jnp.stack([arrays["x"], 2 * arrays["x"]])}
    axes = {name: 0 if name == "x" else None for name in arrays}
    mapped = jax.vmap(with_gradients(ours, indices, recipe), (axes, None))(stacked, weights)
    twice = gradient({**arrays, "x": 2 * arrays["x"]}, weights)
    for i, expected in enumerate((wanted, twice)):
        assert_close(jax.tree.map(lambda x, i=i: x[i], mapped), expected, 1e-2)


def test_what_is_saved(rng):
    """Beside the operands: two hidden values, and matrices and their scales."""
    arrays, (weights, indices) = operands(rng)
    _, pull = jax.vjp(lambda a, w: ours(a, w, indices), arrays, weights)
    saved = jax.tree.leaves(pull)
    assert sum(x.shape == (T * K, H) for x in saved) == 2
    assert not any(x.shape == (T * K, D) for x in saved)
    assert sum(x.dtype == jnp.float8_e4m3fn for x in saved) == 3


def test_errors(rng):
    arrays, (weights, indices) = operands(rng)

    def loss(arrays):
        return ours(arrays, weights, indices).sum()

    gradients = jax.grad(lambda a: jax.tree.leaves(jax.grad(loss)(a))[0].sum())
    with pytest.raises(TypeError, match="no second derivative"):
        gradients(arrays)
    with pytest.raises(TypeError):
        jax.jvp(loss, (arrays,), (arrays,))
    with pytest.raises(TypeError, match=r"moe with a recipe takes .*, and w_up is int8"):
        ours({**arrays, "w_up": arrays["w_up"].astype(np.int8)}, weights, indices)
    with pytest.raises(TypeError, match=r"gradient_dtype .* not int8"):
        jtk.Fp8Recipe(np.int8)


SCHEMES = {
    "data": (P("d"), P(), P()),
    "experts": (P(), P("m"), P("m")),
    "data and columns": (P("d"), P(None, None, "m"), P(None, "m")),
}


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("axis_types", MESH_TYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(6)
def test_devices(rng, scheme, axis_types):
    # Each device has whole blocks.
    shapes = (64, 128), (8, 128, 512), (8, 512, 128)
    mesh = mesh_of(MESH_TYPES[axis_types])
    arrays = [random(rng, shape, np.float32) / 8 for shape in shapes]
    weights, indices = jtk.route(random(rng, (64, 8), np.float32), K)

    @jax.jit
    def step(x, up, down, weights, indices):
        def loss(*args):
            return (jtk.moe(*args, weights, indices, recipe=RECIPES[0]) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(x, up, down)

    specs = SCHEMES[scheme]
    rows = P(*specs[0][:1])
    # The tensor cores of a GPU have other sums.
    wanted = step(*jax.device_put((*arrays, weights, indices), devices()[0]))
    placed = [
        put(mesh, x, spec)
        for x, spec in zip((*arrays, weights, indices), (*specs, rows, rows), strict=True)
    ]
    with jax.set_mesh(mesh):
        assert_close(step(*placed), wanted)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("hidden", [512, 384, 96])
def test_devices_have_whole_blocks_on_automatic_axes(rng, hidden):
    """Where columns are split inside of a block of 128, they are gathered."""
    mesh = mesh_of(MESH_TYPES["auto"])
    arrays = [random(rng, x, np.float32) for x in ((64, 128), (8, 128, hidden), (8, hidden, 128))]
    weights, indices = jtk.route(random(rng, (64, 8), np.float32), K)

    def step(x, up, down):
        def loss(*args):
            return (jtk.moe(*args, weights, indices, recipe=RECIPES[0]) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(x, up, down)

    specs = P("d"), P(None, None, "m"), P(None, "m")
    placed = [put(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
    one = step(*jax.device_put(arrays, devices()[0]))
    # With other blocks the gradients differ by 0.1 to 0.2.
    assert_close(jax.jit(step)(*placed), one, 2e-2)
    with pytest.raises(TypeError, match="no jvp"):
        jax.jit(
            lambda *x: jax.jvp(lambda *x: jtk.moe(*x, weights, indices, recipe=RECIPES[0]), x, x)
        )(*placed)


@pytest.mark.skipif(emulated_plans.COMPILER is None, reason="there is no g++")
@pytest.mark.thorough
def test_emulated_kernels(rng, monkeypatch):
    # As a process with one device traces the layer.
    monkeypatch.setattr(moe, "is_one_call", lambda *_: False)
    arrays, (weights, indices) = operands(rng, dtype=jnp.bfloat16, biases=True)
    call = with_gradients(ours, indices, RECIPES[0])
    wanted = call(arrays, weights)
    with emulated_gpu(late=["writes"]) as ran:
        found = with_gradients(ours, indices, RECIPES[0])(arrays, weights)
        jax.block_until_ready(found)
    names = [plan.name for plan in ran]
    # Three products forward, and the gradients by their rows.
    assert names.count("scaled_ragged_wgmma_matmul fp8") == 6
    assert names.count("quantize bfloat16") == 2 + 3 + 3
    assert_close(found, wanted, 2e-2)
