"""Each operation under each of JAX's transformations, against plain JAX in float64.

The operations are those of ``benchmarks/catalog``: a new one is tested here once it is described.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P
from numerics import assert_close, on_gpu
from sharded import AUTO, EXPLICIT, devices, mesh_of, put

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS
from benchmarks.catalog.bounds import BF16, F32, F64, FP8, UNIT_ROUNDOFF
from benchmarks.catalog.draw import Draw
from benchmarks.catalog.oracles import ORACLES

C64 = np.dtype(np.complex64)


def like(tree):
    """Normal numbers, the same ones for equal shapes, in the types of the arrays."""

    def drawn(x):
        rng = np.random.default_rng(x.size)
        values = rng.standard_normal(x.shape) + (0.5j if jnp.iscomplexobj(x) else 0)
        return jnp.asarray(values.astype(x.dtype))

    return jax.tree.map(drawn, tree)


def stacked(x, axis=0):
    """The array and another one."""
    return jnp.stack([jnp.asarray(x), like(x)], axis)


# The transformations: of a function, of its operands, and of the positions of those that are
# differentiable.


def value(f, xs, _):
    return f(*xs)


def vmap(f, xs, _):
    """Each operand alone is mapped, at the last axis, and all are, at the first or the last."""
    axes = [x.ndim if i % 2 else 0 for i, x in enumerate(xs)]
    results = [jax.vmap(f, axes)(*map(stacked, xs, axes))]
    for i, x in enumerate(xs):
        axes = [None] * len(xs)
        axes[i] = x.ndim
        args = [*xs[:i], stacked(x, x.ndim), *xs[i + 1 :]]
        results.append(jax.vmap(f, axes, out_axes=-1)(*args))
    return results


def of_floats(f, xs, floats):
    """The function of its differentiable operands, of which it returns floats, and these."""

    def g(*own):
        full = list(xs)
        for i, x in zip(floats, own, strict=True):
            full[i] = x
        return [y for y in jax.tree.leaves(f(*full)) if jnp.issubdtype(y.dtype, jnp.inexact)]

    return g, tuple(xs[i] for i in floats)


def jvp(f, xs, floats):
    g, own = of_floats(f, xs, floats)
    return jax.jvp(g, own, like(own))


def pulled(g):
    def pull(*own):
        result, back = jax.vjp(g, *own)
        return back(like(result))

    return pull


def vjp(f, xs, floats):
    g, own = of_floats(f, xs, floats)
    return g(*own), pulled(g)(*own)


def vmap_of_vjp(f, xs, floats):
    g, own = of_floats(f, xs, floats)
    first = jax.vmap(pulled(g), (0, *[None] * (len(own) - 1)))(stacked(own[0]), *own[1:])
    return first, jax.vmap(pulled(g))(*map(stacked, own))


def second_order(f, xs, floats):
    """Forward over reverse, and reverse over forward."""
    g, own = of_floats(f, xs, floats)
    tangents = like(own)
    return jax.jvp(pulled(g), own, tangents), pulled(lambda *own: jax.jvp(g, own, tangents))(*own)


def transpose(f, xs, floats):
    g, own = of_floats(f, xs, floats)
    return jax.linear_transpose(lambda x: g(x, *own[1:]), own[0])(like(jax.eval_shape(g, *own)))


def remat(f, xs, floats):
    g, own = of_floats(f, xs, floats)
    return pulled(jax.checkpoint(g))(*own)


def scan(f, xs, floats):
    """Over the first operand; the others are the same in each step."""
    g, own = of_floats(f, xs, floats)

    def steps(x, *others):
        return lax.scan(lambda carry, x: (carry, g(x, *others)), None, x)[1]

    args = stacked(own[0]), *own[1:]
    return steps(*args), pulled(steps)(*args)


def scan_of_values(f, xs, _):
    return lax.scan(lambda carry, x: (carry, f(x, *xs[1:])), None, stacked(xs[0]))[1]


def vjp_in_x64(f, xs, floats):
    return in_x64(lambda *xs: vjp(f, xs, floats))(*xs)


# The same functions in other surroundings: ours and the oracle's transformation.


def in_x64(f):
    """The function computes in float64 where x64 is a context inside of it."""

    def scoped(*xs):
        with jax.enable_x64(True):
            results = f(*(x.astype(F64) if x.dtype == F32 else x for x in xs))
            narrow = {F64: F32, np.dtype(np.int64): np.dtype(np.int32)}
            return jax.tree.map(lambda y: y.astype(narrow.get(y.dtype, y.dtype)), results)

    return scoped


def first_mapped(f):
    return lambda x, *others: jax.vmap(f, (0, *[None] * len(others)))(x, *others)


def in_shard_map(axes):
    """Each device of an axis has another first operand; the others are the same."""

    def sharded(f):
        def mapped(x, *others):
            return jax.shard_map(
                lambda x, *others: jax.tree.map(lambda y: y[None], f(x[0], *others)),
                mesh=mesh_of((AUTO, AUTO)),
                in_specs=(P("d"), *[P()] * len(others)),
                out_specs=P("d"),
                axis_names=axes,
            )(x, *others)

        return mapped

    return sharded


def exported(f):
    def leaves(*xs):
        return jax.tree.leaves(f(*xs))

    def call(*xs):
        checks = jtk.export_checks()
        text = export.export(jax.jit(leaves), disabled_checks=checks)(*xs).serialize()
        return export.deserialize(text).call(*xs)

    return call


@dataclasses.dataclass(frozen=True)
class Case:
    """A transformation, and where ours runs.

    Attributes
    ----------
    ours, theirs
        What is made of the function first.
    with_first
        Whether the function takes a stack of the first operand.
    orders
        Derivatives that it takes.
    """

    transform: Callable
    orders: int = 0
    only: np.dtype = F32
    ours: Callable = lambda f: f
    theirs: Callable = lambda f: f
    with_first: bool = False
    context: Callable = contextlib.nullcontext
    jit: Callable = jax.jit


def strict_types():
    stack = contextlib.ExitStack()
    stack.enter_context(jax.numpy_dtype_promotion("strict"))
    stack.enter_context(jax.numpy_rank_promotion("raise"))
    return stack


def explicit_mesh():
    return jax.set_mesh(mesh_of((EXPLICIT, EXPLICIT)))


CASES = {
    "eager": Case(value, jit=lambda f: f),
    "donated": Case(value, jit=lambda f: jax.jit(f, donate_argnums=0)),
    "exported": Case(value, ours=exported, jit=lambda f: f),
    "vmap": Case(vmap),
    "scan of values": Case(scan_of_values),
    "jvp": Case(jvp, 1),
    "vjp": Case(vjp, 1),
    "vmap of vjp": Case(vmap_of_vjp, 1),
    "second order": Case(second_order, 2),
    "linear_transpose": Case(transpose, 1),
    "remat": Case(remat, 1),
    "scan": Case(scan, 1),
    "bfloat16": Case(vjp, 1, only=BF16),
    "complex": Case(vjp, 1, only=C64),
    "complex second order": Case(second_order, 2, only=C64),
    "float64": Case(vjp, 1, only=F64, context=lambda: jax.enable_x64(True)),
    "x64 inside": Case(vjp, 1, ours=in_x64),
    "x64 around a derivative": Case(vjp_in_x64, 1),
    "strict promotion": Case(vjp, 1, context=strict_types),
    "shard_map": Case(vjp, 1, ours=in_shard_map({"d", "m"}), theirs=first_mapped, with_first=True),
    "partly manual": Case(vjp, 1, ours=in_shard_map({"d"}), theirs=first_mapped, with_first=True),
    "explicit axes": Case(
        vjp, 1, ours=first_mapped, theirs=first_mapped, with_first=True, context=explicit_mesh
    ),
    "sharded": Case(vjp, 1),
}


# Where a call fails, as JAX's own does, or because a rule falls short of JAX's.
_SHARDING = "needs out_sharding, as JAX's own does"
_FALLS_SHORT = "JAX's own computes this"
_IN_SHARD_MAP = {
    "kernel, branch": "JAX's own cond fails",
    "all_gather_matmul": "an axis of a vmap inside of a shard_map",
    "matmul_reduce_scatter": "an axis of a vmap inside of a shard_map",
}
_IN_FLOAT32 = dict.fromkeys(
    ("cuda_kernel", "fp8_dot_general", "scaled_matmul", "scaled_ragged_dot"), "takes float32"
)
FAILS = {
    "jvp": {"fp8_dot_general": "has the derivatives of reverse mode alone"},
    "x64 inside": {
        **_IN_FLOAT32,
        **dict.fromkeys(
            (
                "linalg.det",
                "linalg.lu",
                "linalg.lu_factor",
                "linalg.svd",
                "linalg.eigh",
                "route",
                "top_k",
                "sort_by_key",
            ),
            "JAX's own rule of a gather requests float64",
        ),
    },
    "x64 around a derivative": _IN_FLOAT32,
    "shard_map": _IN_SHARD_MAP,
    "partly manual": {**_IN_SHARD_MAP, "linalg.expm": "JAX's own fails"},
    "explicit axes": {
        "ragged_dot": _SHARDING,
        "ragged_dot, epilogue": _SHARDING,
        "ragged_dot_general": _SHARDING,
        "linalg.lu": "JAX's own fails",
        "linalg.expm": "JAX's own fails",
        **dict.fromkeys(
            ("cuda_kernel", "linalg.det", "linear_cross_entropy", "matvec", "moe", "vecmat"),
            _FALLS_SHORT,
        ),
    },
}


def elements(call):
    return sum(math.prod(x.shape) for x in call.operands)


def squared(f):
    return lambda *xs: jax.tree.map(lambda y: y * y, f(*xs))


def at(mesh, x):
    """The array, of which both axes split the dimensions that they divide."""
    spec = [None] * x.ndim
    for axis, size in (("d", 2), ("m", 4)):
        free = [i for i in range(x.ndim) if spec[i] is None and x.shape[i] % size == 0]
        if free:
            spec[free[0]] = axis
    return put(mesh, x, P(*spec))


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(6)
@pytest.mark.usefixtures("highest_precision")
def test_derived(request, name, case):
    description, how = DESCRIPTIONS[name], CASES[case]
    if reason := FAILS.get(case, {}).get(name):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    draw = Draw(np.random.default_rng(zlib.crc32(name.encode())), how.only)
    # The largest of some calls has several dimensions, groups and experts.
    call = max((description.draw(draw) for _ in range(8)), key=elements)
    types = [x.dtype for x in call.operands]
    floats = [i for i, t in enumerate(types) if t.kind in "fcV" and t not in FP8]
    if description.on_host and case != "eager":
        pytest.skip("computes NumPy's arrays")
    if description.derivatives < how.orders or (how.orders and not floats):
        pytest.skip("has no such derivatives")
    if how.transform is transpose and not description.linear:
        pytest.skip("is not linear")
    if how.only not in (F32, *types):
        pytest.skip("does not take the type")
    if devices() is None and (how.with_first or case == "sharded"):
        pytest.skip("eight CPU devices")
    arrays = [draw.value(x, False) for x in call.operands]
    wide = [x.astype({"f": F64, "c": np.complex128, "V": F64}.get(x.dtype.kind, x.dtype))
            if x.dtype not in FP8 else x for x in arrays]  # fmt: skip

    def program(m, around):
        def f(*xs):
            return call.function(m, *xs)

        f = around(squared(f) if call.up_to_signs else f)
        return lambda *xs: how.transform(f, xs, floats)

    def of(arrays):
        return [stacked(arrays[0]), *arrays[1:]] if how.with_first else arrays

    with jax.enable_x64(True):
        theirs = program(ORACLES, how.theirs)
        wanted = (theirs if description.on_host else jax.jit(theirs))(*of(wide))
    with how.context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Not every donated array is used.
        if not description.on_host:
            arrays = list(map(jnp.asarray, of(arrays)))
        if case == "sharded":
            mesh = mesh_of((AUTO, AUTO))
            arrays = [at(mesh, x) for x in arrays]
        if case == "explicit axes":
            mesh = mesh_of((EXPLICIT, EXPLICIT))
            arrays[0] = put(mesh, arrays[0], P("d"))
        found = how.jit(program(jtk, how.ours))(*arrays)
    share = description.tolerance
    if how.only == F64:
        share *= 1e-6
    if how.only == BF16:
        share = max(share, 8 * UNIT_ROUNDOFF[BF16])
    if on_gpu():
        share = max(share, 1e-2)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(wanted), share)
