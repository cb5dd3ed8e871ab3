"""Each operation under each of JAX's transformations and modes, against plain JAX in float64.

The operations are those of ``benchmarks/catalog``: a new one is tested here once it is described.
Types of results, weak ones among them, are those of plain JAX in the same mode. Sharded programs
of values and of first derivatives, whose operands' first dimensions are split, send no more bytes
than plain JAX's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import call_of, differentiable
from jax import export, lax
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P
from namesakes import swapped
from numerics import assert_close, on_gpu
from planted_faults import FAULTS
from sharded import AUTO, AXES, EXPLICIT, SLACK, bytes_sent, collectives, devices, mesh_of, put

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS, FAMILIES
from benchmarks.catalog.bounds import BF16, F32, F64, FP8, INT4, UNIT_ROUNDOFF
from benchmarks.catalog.oracles import ORACLES

C64 = np.dtype(np.complex64)


def split_like(x, values):
    """Split values over the explicit axes that split another array."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if not any(getattr(sharding, "spec", ())):
        return values
    return jax.sharding.reshard(values, sharding)


def like(tree):
    """Normal numbers, the same ones for equal shapes, or the same integers in another order."""

    def drawn(x):
        if x.ndim and jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.roll(jnp.asarray(x), 1, 0)
        rng = np.random.default_rng(x.size)
        values = rng.standard_normal(x.shape) + (0.5j if jnp.iscomplexobj(x) else 0)
        return split_like(x, jnp.asarray(values.astype(x.dtype)))

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


def nested_vmap(f, xs, _):
    """The first operand is mapped outside, and all are inside."""
    axes = [x.ndim for x in xs]
    inside = [stacked(x, axis) for x, axis in zip(xs, axes, strict=True)]
    mapped = jax.vmap(jax.vmap(f, axes), (0, *[None] * (len(xs) - 1)))
    return mapped(stacked(inside[0]), *inside[1:])


def restricted_to_floats(f, xs, floats):
    """The function of its differentiable operands, of which it returns floats, and these."""

    def g(*own):
        full = list(xs)
        for i, x in zip(floats, own, strict=True):
            full[i] = x
        return [y for y in jax.tree.leaves(f(*full)) if jnp.issubdtype(y.dtype, jnp.inexact)]

    return g, tuple(xs[i] for i in floats)


def jvp(f, xs, floats):
    """Along all operands, and along each alone."""
    g, own = restricted_to_floats(f, xs, floats)
    tangents, results = like(own), []
    for i, (x, tangent) in enumerate(zip(own, tangents, strict=True)):
        alone = functools.partial(lambda i, x: g(*own[:i], x, *own[i + 1 :]), i)
        results.append(jax.jvp(alone, (x,), (tangent,)))
    return jax.jvp(g, own, tangents), results


def pulled(g):
    def pull(*own):
        result, back = jax.vjp(g, *own)
        return back(like(result))

    return pull


def vjp(f, xs, floats):
    g, own = restricted_to_floats(f, xs, floats)
    return g(*own), pulled(g)(*own)


def vmap_of_vjp(f, xs, floats):
    g, own = restricted_to_floats(f, xs, floats)
    first = jax.vmap(pulled(g), (0, *[None] * (len(own) - 1)))(stacked(own[0]), *own[1:])
    return first, jax.vmap(pulled(g))(*map(stacked, own))


def second_order(f, xs, floats):
    """Forward over reverse, and reverse over forward."""
    g, own = restricted_to_floats(f, xs, floats)
    tangents = like(own)
    return jax.jvp(pulled(g), own, tangents), pulled(lambda *own: jax.jvp(g, own, tangents))(*own)


def transpose(f, xs, floats):
    g, own = restricted_to_floats(f, xs, floats)
    return jax.linear_transpose(lambda x: g(x, *own[1:]), own[0])(like(jax.eval_shape(g, *own)))


def remat(f, xs, floats):
    g, own = restricted_to_floats(f, xs, floats)
    return pulled(jax.checkpoint(g))(*own)


def scan(f, xs, floats):
    """Over the first operand; the others are the same in each step."""
    g, own = restricted_to_floats(f, xs, floats)

    def steps(x, *others):
        return lax.scan(lambda carry, x: (carry, g(x, *others)), None, x)[1]

    args = stacked(own[0]), *own[1:]
    return steps(*args), pulled(steps)(*args)


def scan_of_values(f, xs, _):
    return lax.scan(lambda carry, x: (carry, f(x, *xs[1:])), None, stacked(xs[0]))[1]


def series_of(own):
    return [[share * like(x) for share in (1.0, 0.5, -1.0)] for x in own]


def taylor(f, xs, floats):
    """The coefficients of a curve to third order, by ``jax.experimental.jet``."""
    g, own = restricted_to_floats(f, xs, floats)
    return jet(lambda *own: g(*own), own, series_of(own))


def nested_jvps(f, xs, floats):
    """The same, which jet computes for fewer of JAX's own operations."""
    g, own = restricted_to_floats(f, xs, floats)
    curves = list(zip(own, series_of(own), strict=True))

    def at(time):
        weights = time, time**2 / 2, time**3 / 6
        return g(*(x + sum(w * y for w, y in zip(weights, ys, strict=True)) for x, ys in curves))

    derivatives = [at]
    for _ in range(3):
        previous = derivatives[-1]
        derivatives.append(lambda t, f=previous: jax.jvp(f, (t,), (jnp.ones_like(t),))[1])
    value, *others = (f(jnp.zeros(())) for f in derivatives)
    return value, [list(terms) for terms in zip(*others, strict=True)]


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
    orders
        Derivatives that it takes.
    only
        The type of the operands.
    of_oracle
        The transformation of the oracle, where that is another one.
    ours, theirs
        What is made of the function first.
    with_first
        Whether the function takes a stack of the first operand.
    made_in
        The context in which the operands become arrays of JAX's.
    special
        Whether NaN and infinities are among the operands.
    """

    transform: Callable
    orders: int = 0
    only: np.dtype = F32
    of_oracle: Callable | None = None
    ours: Callable = lambda f: f
    theirs: Callable = lambda f: f
    with_first: bool = False
    context: Callable = contextlib.nullcontext
    made_in: Callable = contextlib.nullcontext
    jit: Callable = jax.jit
    special: bool = False


def strict_types():
    stack = contextlib.ExitStack()
    stack.enter_context(jax.numpy_dtype_promotion("strict"))
    stack.enter_context(jax.numpy_rank_promotion("raise"))
    return stack


def x64():
    return jax.enable_x64(True)


def explicit_mesh():
    return jax.set_mesh(mesh_of((EXPLICIT, EXPLICIT)))


CASES = {
    "eager": Case(value, jit=lambda f: f),
    "donated": Case(value, jit=lambda f: jax.jit(f, donate_argnums=0)),
    "exported": Case(value, ours=exported, jit=lambda f: f),
    "special values": Case(value, special=True),
    "float64 arrays": Case(value, only=F64, made_in=x64),
    "vmap": Case(vmap),
    "nested vmap": Case(nested_vmap),
    "scan of values": Case(scan_of_values),
    "jvp": Case(jvp, 1),
    "vjp": Case(vjp, 1),
    "vmap of vjp": Case(vmap_of_vjp, 1),
    "second order": Case(second_order, 2),
    "linear_transpose": Case(transpose, 1),
    "taylor": Case(taylor, 2, of_oracle=nested_jvps),
    "remat": Case(remat, 1),
    "scan": Case(scan, 1),
    "bfloat16": Case(vjp, 1, only=BF16),
    "complex": Case(vjp, 1, only=C64),
    "complex second order": Case(second_order, 2, only=C64),
    "float64": Case(vjp, 1, only=F64, context=x64, made_in=x64),
    "float64 second order": Case(second_order, 2, only=F64, context=x64, made_in=x64),
    "x64 inside": Case(vjp, 1, ours=in_x64),
    "x64 around a derivative": Case(vjp_in_x64, 1),
    "strict promotion": Case(vjp, 1, context=strict_types),
    "strict promotion, second order": Case(second_order, 2, context=strict_types),
    "names of JAX": Case(vmap_of_vjp, 1, context=swapped),
    "without jit": Case(vjp, 1, context=jax.disable_jit, jit=lambda f: f),
    "checking leaks": Case(vjp, 1, context=jax.checking_leaks),
    "shard_map": Case(vjp, 1, ours=in_shard_map({"d", "m"}), theirs=first_mapped, with_first=True),
    "partly manual": Case(vjp, 1, ours=in_shard_map({"d"}), theirs=first_mapped, with_first=True),
    "explicit axes": Case(
        vjp, 1, ours=first_mapped, theirs=first_mapped, with_first=True, context=explicit_mesh
    ),
    "explicit rows": Case(vjp, 1, context=explicit_mesh),
    "sharded": Case(vjp, 1),
    "sharded values": Case(value),
    "sharded vmap": Case(vmap),
    "sharded vmap of vjp": Case(vmap_of_vjp, 1),
    "sharded second order": Case(second_order, 2),
}
# Calls that mesh axes split, with those of JAX's.
SHARDED = [name for name in CASES if name.startswith("sharded")]


# Where a call fails, as JAX's own does.
_SHARDING = "needs out_sharding, as JAX's own does"
_IN_SHARD_MAP = {
    "kernel, branch": "JAX's own cond fails",
    "all_gather_matmul": "an axis of a vmap inside of a shard_map",
    "matmul_reduce_scatter": "an axis of a vmap inside of a shard_map",
    "ring_attention": "an axis of a vmap inside of a shard_map",
}
_IN_FLOAT32 = dict.fromkeys(
    (
        "cuda_kernel",
        "fp8_dot_general",
        "scaled_matmul",
        "scaled_matmul, epilogue",
        "scaled_matmul, weights",
        "scaled_matmul, weights and epilogue",
        "scaled_ragged_dot",
        "scaled_ragged_dot, weights",
    ),
    "takes float32",
)
# jet has no rule of a primitive of JAX's: for these some calls fail, by these errors.
WITHOUT_JET = {
    "linalg.det", "linalg.expm", "linalg.pinv", "linalg.slogdet", "moe", "moe, biases",
    "moe, ungated", "ragged_dot, epilogue", "scaled_matmul", "scaled_matmul, epilogue",
    "scaled_matmul, weights", "scaled_matmul, weights and epilogue", "scaled_ragged_dot",
    "scaled_ragged_dot, weights", "segment_max", "segment_mean", "segment_min", "segment_reduce",
    "segment_sum", "symmetric_matmul, polynomial", "take",
}  # fmt: skip
ERRORS_OF_JET = (KeyError, TypeError, AttributeError)
FAILS = {
    "float64 arrays": {"linalg.triangular_solve": "JAX's own transpose makes it float32"},
    "jvp": {"fp8_dot_general": "has the derivatives of reverse mode alone"},
    "x64 inside": {
        **_IN_FLOAT32,
        "ring_attention": "JAX's own transpose of ppermute along the axis of a vmap",
        **dict.fromkeys(
            (
                "linalg.det",
                "linalg.lu",
                "linalg.lu_factor",
                "linalg.svd",
                "linalg.eigh",
                "route",
                "top_k",
                "sort",
                "median",
                "quantile",
                "percentile",
                "sort_by_key",
                "sort_operands",
            ),
            "JAX's own rule of a gather requests float64",
        ),
    },
    "x64 around a derivative": _IN_FLOAT32,
    "shard_map": _IN_SHARD_MAP,
    "partly manual": {**_IN_SHARD_MAP, "linalg.expm": "JAX's own fails"},
    "explicit rows": {"ragged_dot_general": _SHARDING},
    "explicit axes": {
        "causal_conv1d": "JAX's own concatenation with a state whose type has no mesh",
        "ragged_dot": _SHARDING,
        "ragged_dot, epilogue": _SHARDING,
        "ragged_dot_general": _SHARDING,
    },
}


def squared(f):
    return lambda *xs: jax.tree.map(lambda y: y * y, f(*xs))


def at(mesh, x, rng=None):
    """The array, of which both axes split the first dimensions that they divide, or any or none."""
    spec, parts = [()] * x.ndim, list(x.shape)
    for axis, size in AXES.items():
        free = [i for i in range(x.ndim) if parts[i] % size == 0 and (rng or not spec[i])]
        if free and (rng is None or rng.random() < 0.8):
            chosen = free[0] if rng is None else rng.choice(free)
            spec[chosen] += (axis,)
            parts[chosen] //= size
    return put(mesh, x, P(*(axes or None for axes in spec)))


def types_of(results, case):
    """Shapes, types, and which are weak: an exported program does not say."""
    leaves = [getattr(x, "aval", x) for x in jax.tree.leaves(results)]
    return [(x.shape, x.dtype, x.weak_type and case != "exported") for x in leaves]


def skip_what_has_no_such_program(name, how, arrays):
    description, types = DESCRIPTIONS[name], [x.dtype for x in arrays]
    if description.on_host and how is not CASES["eager"]:
        pytest.skip("computes NumPy's arrays")
    if description.derivatives < how.orders or (how.orders and not differentiable(arrays)):
        pytest.skip("has no such derivatives")
    if how.transform is transpose and not description.linear:
        pytest.skip("is not linear")
    if how.only not in (F32, *types):
        pytest.skip("does not take the type")
    if how.special and (name.startswith("linalg.") or name in WITHOUT_NAN):
        # Matrices have test_other_matrices_stay_finite.
        pytest.skip("plain JAX does not say what becomes of NaN")
    sharded = how.with_first or how in [CASES[x] for x in ("explicit rows", *SHARDED)]
    if how is CASES["explicit rows"] and (not arrays[0].ndim or len(arrays[0]) % 2):
        pytest.skip("two devices do not divide the rows")
    if devices() is None and sharded:
        pytest.skip("eight CPU devices")


# With float64 arrays where 64-bit types are off, JAX's own functions differ in the width of their
# results. The oracles of these are other functions; their results are of float64, as those of
# lax.ragged_dot.
OTHER_TYPES = (
    *(
        "attention",
        "ring_attention",
        "segment_reduce",
        "segment_plan",
        "row_",
        "linear_cross_entropy",
    ),
    "ragged_dot",
)
# JAX's own functions; the oracles of others are other algorithms.
OF_JAX = {x.name for family in ("arrays", "linalg", "products") for x in FAMILIES[family]}
# They quantise, sort scores that may be NaN, add blocks of an operand, or multiply rows of no group
# with 0 in plain JAX.
WITHOUT_NAN = {
    *("quantize", "row_quantize", "fp8_dot_general", "route"),
    *("strassen_matmul", "ragged_dot_general"),
}


def nan_unless_finite(x):
    x = np.asarray(x).astype(float)
    return np.where(np.isfinite(x), x, np.nan)


def widened(x):
    wide = {"f": F64, "c": np.complex128, "V": F64}
    return x if x.dtype in (*FP8, INT4) else x.astype(wide.get(x.dtype.kind, x.dtype))


def tolerance_of(name, how):
    share = DESCRIPTIONS[name].tolerance
    if how.only == F64 and how.context is x64:
        share *= 1e-6
    if how.only == BF16:
        share = max(share, 8 * UNIT_ROUNDOFF[BF16])
    if how.of_oracle is nested_jvps:
        share *= 10
    return max(share, 1e-2) if on_gpu() else share


DRAWS = [0, *(pytest.param(i, marks=pytest.mark.thorough) for i in (1, 2))]


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.one_in(12)
@pytest.mark.usefixtures("highest_precision")
def test_derived(request, name, case, draw):
    description, how = DESCRIPTIONS[name], CASES[case]
    if reason := FAILS.get(case, {}).get(name):
        # Some small calls pass.
        request.applymarker(pytest.mark.xfail(reason=reason, strict=draw == 0))
    if case == "taylor" and name in WITHOUT_JET:
        request.applymarker(pytest.mark.xfail(raises=ERRORS_OF_JET))
    # Operands of which devices send parts are larger.
    call, arrays = call_of(name, how.only, draw, how.special, 4 if case in SHARDED else 1)
    skip_what_has_no_such_program(name, how, arrays)
    floats = differentiable(arrays)

    def program(m, around, transform):
        def f(*xs):
            return call.function(m, *xs)

        f = around(squared(f) if call.up_to_signs else f)
        return lambda *xs: transform(f, xs, floats)

    def of(arrays):
        return [stacked(arrays[0]), *arrays[1:]] if how.with_first else arrays

    theirs = program(ORACLES, how.theirs, how.of_oracle or how.transform)
    with jax.enable_x64(True):
        wanted = (theirs if description.on_host else jax.jit(theirs))(
            *of(list(map(widened, arrays)))
        )
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Not every donated array is used; types are truncated.
        if not description.on_host:
            with how.made_in():
                arrays = list(map(jnp.asarray, of(arrays)))
        has_types = not (description.on_host or description.own_types or how.of_oracle)
        has_types &= not (case == "float64 arrays" and name.startswith(OTHER_TYPES))
        if has_types:
            with how.context() if how.context is x64 else contextlib.nullcontext():
                types = types_of(jax.eval_shape(theirs, *arrays), case)
        stack.enter_context(how.context())
        if case.startswith("explicit"):
            mesh = mesh_of((EXPLICIT, EXPLICIT))
            arrays[0] = put(mesh, arrays[0], P("d"))
        if case == "explicit rows":
            # The types of the others have no mesh.
            arrays[1:] = map(np.asarray, arrays[1:])
            try:
                jax.eval_shape(program(ORACLES, how.theirs, how.transform), *arrays)
            except Exception as error:
                pytest.skip(f"{type(error).__name__} of plain JAX")
        if case in ("partly manual", *SHARDED):
            mesh = mesh_of((AUTO, AUTO))
            rng = np.random.default_rng([draw, zlib.crc32(name.encode())]) if draw else None
            arrays = [at(mesh, x, rng) for x in arrays]
            # Before JAX 0.11 a compiled program takes no int4 array that is placed on devices.
            jitted = jax.jit(program(jtk, how.ours, how.transform))
            found = jitted(*arrays)
            if name in OF_JAX and not draw and how.orders < 2:
                jaxs = jax.jit(program(ORACLES, how.ours, how.transform)).lower(*arrays).compile()
                compiled = jitted.lower(*arrays).compile()
                sent, limit = bytes_sent(compiled), bytes_sent(jaxs)
                # Small programs send a few hundred bytes.
                assert sent <= max(SLACK * limit, limit + 256), (
                    collectives(compiled),
                    collectives(jaxs),
                )
        else:
            found = how.jit(program(jtk, how.ours, how.transform))(*arrays)
    seen = jax.tree.leaves(found), jax.tree.leaves(wanted)
    if how.special and name.startswith("scaled_"):
        # Infinite scales multiply sums here and elements there.
        seen = tuple(list(map(nan_unless_finite, x)) for x in seen)
    assert_close(*seen, tolerance_of(name, how))
    if has_types:
        assert types_of(found, case) == types


# These do not read all elements of a matrix.
OF_A_TRIANGLE = "linalg.solve_triangular", "linalg.triangular_solve"
MATRICES = [name for name in DESCRIPTIONS if name.startswith("linalg.")]


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("batch", [2, 9])
@pytest.mark.one_in(4)
def test_other_matrices_stay_finite(name, special, batch):
    """What is not finite stays in its matrix. Of few matrices LAPACK computes some functions."""
    call, arrays = call_of(name, F32)
    # Batches have a leading dimension.
    arrays = [x.reshape(-1, *x.shape[-2:])[:1] for x in arrays]
    arrays = [np.concatenate([x, *[like(x) for _ in range(batch - 1)]]) for x in arrays]

    def function(*xs):
        return jax.tree.leaves(call.function(jtk, *xs))

    finite = jax.jit(function)(*arrays)
    arrays[0][0, -1, 0] = special
    found = jax.jit(function)(*arrays)
    for x, y in zip(found, finite, strict=True):
        np.testing.assert_array_equal(x[1:], y[1:])
    results = found[1:] or found  # Most calls return their operand first.
    if name in ("linalg.svd", "linalg.svdvals", "linalg.eigh", "linalg.eigvalsh"):
        assert all(np.isnan(x[0]).all() for x in results)
    elif not (name in OF_A_TRIANGLE or np.isinf(special)):
        assert any(np.isnan(x[0]).any() for x in results)


def test_faults_to_plant_are_of_this_code():
    for file, old, _, case, name, *_ in FAULTS:
        assert old in (Path(jtk.__file__).parent / file).read_text(), (file, old)
        assert case in CASES
        assert name in DESCRIPTIONS
