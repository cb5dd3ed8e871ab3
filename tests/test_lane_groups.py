"""Kernels in which a group of threads evaluates a lane, compiled as C++, against ``jax.vmap``."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_plans import COMPILER
from jax import lax
from jaxprs import parameters
from lane_functions import integers_of, normal
from lanes import Emulated
from nvrtc_mark import needs_nvrtc
from test_emulated_lanes import (
    GRADIENTS,
    TABLE,
    assert_close,
    gradient_by,
    mapped_by,
    raw,
)

import jax_tilekern as jtk
from benchmarks.jax_kernel import _hmc
from benchmarks.lane_libraries import recurrent
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.ops.kernel.kernel import write_kernel
from jax_tilekern.ops.kernel.translation import text
from jax_tilekern.ops.kernel.translation.groups import GroupWriter

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")

LANES = 3
# What a group may get wrong: updates, loops, orders of dimensions, products, sums, branches.
SAMPLE = ["broadcasts", "in_place", "mapped_loops", "mixed_products", "reducers", "updates"]


@pytest.fixture(autouse=True)
def short_arrays_are_long(monkeypatch, request):
    """Share out the arrays of the tables too."""
    if "table" in request.node.name:
        monkeypatch.setattr(text, "_UNROLLED_IN_GROUPS", (3, 0))


def traced_by(case, by):
    function, args = by(case, jtk.kernel)
    return jax.make_jaxpr(lambda *args: raw(function(*args)))(*args)


def assert_both_orders(emulated, name, args, wanted):
    """Threads in both orders give the same bits, and are close."""
    found = []
    for emulated.backwards in (False, True):
        found.append(emulated(name, *args))
    assert_close(found[0], wanted)
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.one_in(2)
def test_table(tmp_path, threads):
    names = SAMPLE[threads == 128 :: 2]
    emulated = Emulated(
        {name: traced_by(TABLE[name], mapped_by) for name in names}
        | {"gradient": traced_by(GRADIENTS["broadcasts"], gradient_by)},
        tmp_path / "lock",
        threads,
    )
    for name in names:
        function, args = mapped_by(TABLE[name], jax.vmap)
        assert_both_orders(emulated, name, args, raw(jax.jit(function)(*args)))
    function, args = gradient_by(GRADIENTS["broadcasts"], jax.vmap)
    assert_both_orders(emulated, "gradient", args, jax.tree.leaves(jax.jit(function)(*args)))


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("of_gradients", [False, True])
def test_whole_table(tmp_path, threads, of_gradients):
    table, by = (GRADIENTS, gradient_by) if of_gradients else (TABLE, mapped_by)
    traced = {name: traced_by(case, by) for name, case in table.items()}
    emulated = Emulated(traced, tmp_path / "lock", threads)
    for name, case in table.items():
        function, args = by(case, jax.vmap)
        assert_both_orders(emulated, name, args, raw(jax.jit(function)(*args)))


def ends_by_itself(x, count):
    """A loop that carries long arrays; lanes end at different steps."""

    def step(state):
        i, x, y = state
        moved = lax.dynamic_update_slice(x, y[:40], (i,)).at[i].add(y[i])
        return i + 1, jnp.sin(y[::-1]) + x[i], moved

    return lax.while_loop(lambda s: s[0] < count, step, (0, x, 2 * x))


def long_arrays(x):
    """Orders, sums and places of long arrays, and one beyond shared memory."""
    far = jnp.sin(x[0] * jnp.arange(20_000.0))
    rows = x.reshape(20, 5)
    return (
        jnp.sort(x), jnp.argsort(-x), x.argmax(), x.argmin(), jnp.cumsum(x), far[::-1][:3],
        (far[1:] - far[:-1]).sum(), far.max(), rows @ rows.T @ rows, rows.sum(0), rows.max(1),
        jnp.concatenate([x, x[:3]])[::-1], jnp.roll(rows, 3, 1), x[integers_of(30, low=0) % 100],
        jnp.pad(x, (2, 30)), x.at[jnp.arange(40) % 7].add(1.0), jax.nn.softmax(x), x > x.mean(),
        jnp.any(x > 2.2), x[:0].sum(), jnp.concatenate([x[:0], x])[5], x[:0].max(initial=3.0),
        x[:0].reshape(0, 20) @ x[:60].reshape(20, 3),
    )  # fmt: skip


def draws(key):
    bits = jax.random.bits(key, (70,))
    return bits, jax.random.normal(key, (70,)), jax.random.permutation(key, 40)


def of_steps(x):
    """A loop whose derivative has steps of its own."""

    def step(x, _):
        x = jnp.sin(x) + x[::-1].mean() * x[3]
        return x, x[:20] @ x[20:40]

    x, found = lax.scan(step, x, None, length=12)
    return jnp.sum(x**2) + jnp.sum(found)


def gradient_of_steps(map_, x):
    checkpoints = {} if map_ is jax.vmap else {"checkpoint": 3}
    return jax.grad(lambda x: jnp.sum(map_(of_steps, **checkpoints)(x)))(x)


def spectra(x):
    """Eigenvalues of matrices of odd and even sizes, of a batch, and of one with NaN."""
    found = []
    for a in (x[:7, :7], x, x.at[2, 3].set(jnp.nan), jnp.stack([x[:5, :5], jnp.eye(5)])):
        values, vectors = jnp.linalg.eigh(a)
        found += [values, vectors @ (values[..., None] * vectors.mT), vectors.mT @ vectors]
    return found


def of_weights(map_, weights, inputs):
    network = map_(recurrent, in_axes=(None, 0))
    return jax.grad(lambda weights: jnp.sum(jnp.square(network(weights, inputs))))(weights)


def cases(map_):
    """Functions of batches, and arguments."""
    data = normal(40, 8)
    sampler = map_(functools.partial(_hmc, 2), in_axes=(None, None, 0))
    keys = jax.random.split(jax.random.key(1), LANES)
    x = normal(LANES, 100)
    x[1, 40] = np.nan
    return {
        "a loop": (map_(ends_by_itself), (normal(LANES, 60), np.int32([3, 0, 7]))),
        "long arrays": (map_(long_arrays), (x,)),
        "draws": (map_(draws), (keys,)),
        "spectra": (map_(spectra), (0.2 * normal(LANES, 16, 16),)),
        "HMC": (sampler, (data, np.sign(data[:, 0]), keys)),
        **{
            f"network of {units}": (
                map_(recurrent, in_axes=(None, 0)),
                ((normal(units, 12), 0.2 * normal(units, units)), normal(LANES, 5, 12)),
            )
            for units in (33, 40)  # Rows of 40 numbers are loaded 16 bytes at a time.
        },
        "gradient of weights": (
            functools.partial(of_weights, map_),
            ((normal(40, 12), 0.2 * normal(40, 40)), normal(LANES, 5, 12)),
        ),
        "gradient": (functools.partial(gradient_of_steps, map_), (normal(LANES, 50),)),
    }


@pytest.mark.parametrize("threads", [32, 64])
@pytest.mark.one_in(2)
def test_is_vmap(tmp_path, threads):
    traced = {
        name: jax.make_jaxpr(lambda *args, f=f: raw(f(*args)))(*args)
        for name, (f, args) in cases(jtk.kernel).items()
    }
    emulated = Emulated(traced, tmp_path / "lock", threads)
    for name, (function, args) in cases(jax.vmap).items():
        assert_both_orders(emulated, name, args, raw(jax.jit(function)(*args)))


def test_loops_hold_matrices_in_registers():
    """Rows of 16-byte multiples are loaded as a whole; sums are stored after the loop."""
    kernels = {}
    for name, (function, args) in cases(jtk.kernel).items():
        calls = jax.make_jaxpr(lambda *args, f=function: raw(f(*args)))(*args).jaxpr.eqns
        for eqn in (x for x in calls if x.primitive.name == "tilekern_lanes"):
            avals = [x.aval for x in eqn.invars]
            kernels[name] = write_kernel(avals, group=True, **parameters(eqn)).text
    loads = {name: text.count("lax::load_row(h") for name, text in kernels.items()}
    # Rows of both matrices; in the sampler, rows of the data over all steps and over leapfrogs.
    assert loads["network of 40"] == 2
    assert loads["network of 33"] == 1
    assert loads["HMC"] == 2
    stores = re.findall(r"^ *\(b\d+ \? h\d+.*\) = v\d+;$", kernels["gradient of weights"], re.M)
    assert len(stores) == 2


@pytest.mark.parametrize("missing", ["none", "before", "after"])
def test_a_missing_barrier_is_found(tmp_path, monkeypatch, missing):
    """Without barriers, threads read what is not yet, or no longer, there."""

    def function(x):
        def step(_, x):
            # All threads read an element, one overwrites it, and all read what it has written.
            old = x[5]
            return x.at[5].set(2 * old)[::-1] * jnp.cos(old)

        return lax.fori_loop(0, 3, step, x)

    whole, written = GroupWriter._barrier, []

    def barrier(self):
        written.append("after" if len(written) % 2 else "before")
        if written[-1] != missing:
            whole(self)

    args = (normal(LANES, 100),)
    (wanted,) = jax.tree.leaves(jax.vmap(function)(*args))
    monkeypatch.setattr(GroupWriter, "_barrier", barrier)

    def numbered(*args, **kwargs):
        written.clear()
        return write(*args, **kwargs)

    write = text._written
    monkeypatch.setattr(text, "_written", numbered)
    emulated = Emulated(
        {"f": jax.make_jaxpr(jtk.kernel(function))(*args)}, tmp_path / "lock", threads=64
    )
    right = []
    for emulated.backwards in (False, True):
        right.append(np.allclose(emulated("f", *args)[0], wanted))
    assert all(right) == (missing == "none")


@pytest.mark.parametrize(
    ("threads", "error"),
    [(True, TypeError), (32.0, TypeError), ("32", TypeError), (0, ValueError), (16, ValueError),
     (96, ValueError), (2048, ValueError), (-32, ValueError)],
)  # fmt: skip
def test_threads_are_checked(threads, error):
    with pytest.raises(error, match="threads"):
        jtk.kernel(jnp.sin, threads=threads)


@needs_nvrtc
@pytest.mark.parametrize("threads", [1, 32, 256])
def test_threads_are_those_asked_for(threads):
    function = jtk.kernel(lambda x: jnp.sin(x).sum(), threads=threads)
    struct = jax.ShapeDtypeStruct((1024, 500), np.float32)
    with jtk.gpu_target("H100"):
        (choice,) = jtk.explain(function, struct)
        (without_lanes,) = jtk.explain(function, jax.ShapeDtypeStruct((0, 500), np.float32))
        derivatives = jtk.explain(jax.grad(lambda x: jnp.sum(function(x))), struct)
    assert without_lanes.kernel is None
    kind = "lanes" if threads == 1 else "groups"
    assert all(x.kernel.startswith(f"{kind}_") for x in (choice, *derivatives))
    if threads > 1:
        assert f"1024 elements, a group of {threads} threads each" in choice.reason


@needs_nvrtc
def test_shared_memory_needs_no_opt_in():
    def function(x):
        y = jnp.sort(x)
        return (y[::-1] * y).sum(), jnp.cumsum(y)[::7].max()

    (eqn,) = jax.make_jaxpr(jtk.kernel(function))(np.zeros((4, 11_000), np.float32)).jaxpr.eqns
    group = write_kernel([x.aval for x in eqn.invars], group=True, **parameters(eqn))
    kernel = group.kernel(1024)
    static = compile_kernels(kernel, arch="sm_90a").entry(kernel.name).shared_memory_bytes
    assert static > 0
    assert group.shared_bytes > 40_000
    assert group.workspace_bytes > 0
    assert static + group.shared_bytes <= 48 << 10
