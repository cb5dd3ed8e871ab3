"""Kernels in which a group of threads evaluates a lane, compiled as C++, against ``jax.vmap``."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_functions import LANES, cases
from jax import lax
from jaxprs import parameters
from lane_functions import normal
from lanes import Emulated
from nvrtc_mark import needs_emulator, needs_nvrtc
from test_emulated_lanes import (
    GRADIENTS,
    TABLE,
    assert_close,
    gradient_by,
    mapped_by,
    raw,
)

import jax_tilekern as jtk
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.ops.kernel.kernel import write_kernel
from jax_tilekern.ops.kernel.translation import groups, text
from jax_tilekern.ops.kernel.translation.groups import GroupWriter

pytestmark = needs_emulator

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


@pytest.mark.parametrize(("threads", "near"), [(32, groups.NEARBY_BYTES), (64, 0)])
@pytest.mark.one_in(2)
def test_is_vmap(tmp_path, monkeypatch, threads, near):
    monkeypatch.setattr(groups, "NEARBY_BYTES", near)
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
    # Rows of both matrices. The sampler computes much more for each row of its data.
    assert loads["network of 40"] == 2
    assert loads["network of 33"] == 1
    assert loads["HMC"] == 0
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
