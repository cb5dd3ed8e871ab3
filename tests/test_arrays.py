"""``add``, ``sum``, ``transpose`` and products with vectors: kernels, and what is XLA's."""

import functools
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numerics import (
    BF16,
    F8E4,
    UNIT_ROUNDOFF,
    assert_close,
    assert_product,
    exact,
    on_gpu,
    random,
    rounding,
)
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.add import ADDED_DTYPES, AddedDims, add_kernel, plan_add
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel


def test_nothing_is_materialised():
    """Neither a broadcast nor a copy: the call reads its operands where they lie."""
    x, y = jnp.ones((64, 128)), jnp.ones((128,))
    text = jax.jit(jtk.add).lower(x, y).compile().as_text()
    names = re.findall(r"= \S+ ([a-z-]+)\(", text)
    assert names.count("custom-call") == 1
    assert not {"broadcast", "copy", "transpose", "add"} & set(names), names


def test_explain_says_why():
    x = jnp.ones((4, 6))
    for y, reason in (
        (x, None),
        (x > 0, "no kernel adds bool"),
        (x * 1j, "no kernel adds complex64"),
        (x[:0], "an operand is empty, so there is nothing to compute"),
    ):
        for platform in ("cpu", "cuda"):
            with jtk.gpu_target("sm_90"):
                (choice,) = jtk.explain(jtk.add, y, y, platform=platform)
            assert choice.call == "add"
            assert (choice.kernel is None) == (reason is not None)
            assert reason is None or choice.reason == reason
    (short,) = jtk.explain(jtk.add, x, x[:, :1], platform="cpu")
    assert short.reason == "XLA adds rows of 6 elements"
    rows = jnp.ones((4, 600))
    (choice,) = jtk.explain(jtk.add, rows, rows[0], platform="cpu")
    assert choice.kernel == "cpu_add float32"
    assert choice.reason.startswith("sizes (4, 600), strides (600, 1) and (0, 1)")


# The plan.

sizes = st.sampled_from([1, 1, 2, 3, 4, 8, 16])
H100 = known_gpu("sm_90")


@given(st.lists(st.tuples(sizes, st.sampled_from("xyb")), max_size=7))
def test_dims_address_what_broadcasting_does(dims):
    """``b`` is a dimension of both operands, ``x`` and ``y`` one of theirs alone."""
    left = [size if who in "xb" else 1 for size, who in dims]
    right = [size if who in "yb" else 1 for size, who in dims]
    found = AddedDims.of(left, right)
    for shape, strides in ((left, found.lhs_strides), (right, found.rhs_strides)):
        numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        index = np.indices(found.sizes)
        addresses = sum(i * stride for i, stride in zip(index, strides, strict=True))
        expected = np.broadcast_to(numbers, np.broadcast_shapes(tuple(left), tuple(right)))
        np.testing.assert_array_equal(addresses.ravel(), expected.ravel())
        assert strides[-1] in (0, 1)


def test_plans_that_no_launch_has():
    rank_7 = AddedDims.of((2, 1, 2, 1, 2, 1, 2), (1, 2, 1, 2, 1, 2, 1))
    huge = AddedDims.of((2**35,), (1,))
    with jtk.policy("kernels"):
        for dims in (rank_7, huge):
            plan = plan_add(dims, np.dtype(np.float32), H100)
            assert isinstance(plan, NoKernel)
            assert "more than" in plan.reason


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.one_in(3)
def test_kernels_compile(arch):
    kernels = {add_kernel(dtype, n) for dtype in ADDED_DTYPES for n in (1, 16 // dtype.itemsize)}
    compiled = compile_kernels(*kernels, arch=arch)
    assert compiled.log == ""
    for kernel in kernels:
        entry = compiled.entry(kernel.name)
        assert entry.spill_bytes == entry.stack_bytes == 0


# The page that is made around it.

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "add-an-operation.md"
_HEADING_OR_BLOCK = re.compile(r"^## [^\n]*`(\S+)`$|^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_guide_quotes_the_code():
    named, blocks = None, 0
    for heading, block in _HEADING_OR_BLOCK.findall(GUIDE.read_text()):
        named = heading or named
        if block:
            blocks += 1
            assert block in (ROOT / named).read_text(), f"{named} does not have:\n{block}"
    assert blocks >= 4


_XLAS_INT2 = pytest.mark.xfail(on_gpu(), reason="XLA reads 2-bit integers wrongly on GPUs")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(jnp.int2, marks=_XLAS_INT2),
        pytest.param(jnp.uint2, marks=_XLAS_INT2),
        jnp.int4,
        jnp.uint4,
    ],
)
def test_integers_of_fewer_than_8_bits(rng, dtype):
    x = rng.integers(-8, 8, (33, 70)).astype(dtype)
    wanted = x.astype(np.int32).sum(0)
    for kwargs in ({"dtype": dtype}, {"dtype": np.int32}, {"promote_integers": False}):
        ours, theirs = (f.sum(jnp.asarray(x), 0, **kwargs) for f in (jtk, jnp))
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, wanted.astype(ours.dtype), str(kwargs))


def test_what_is_left_out_may_be_anything(rng):
    x = jnp.asarray([[1.0, np.nan, 2.0], [np.inf, 3.0, 4.0]])
    where = jnp.isfinite(x)
    np.testing.assert_array_equal(jtk.sum(x, 1, where=where), [3, 7])
    gradient = jax.grad(lambda x: jtk.sum(x, where=where, initial=5.0))(x)
    np.testing.assert_array_equal(gradient, where.astype(np.float32))
    np.testing.assert_array_equal(jax.grad(lambda i: jtk.sum(x, initial=i, where=where))(2.0), 1)
    each = jax.vmap(lambda x, where: jtk.sum(x, where=where))(x, where)
    np.testing.assert_array_equal(each, [3, 7])


def test_initial_is_added_before_rounding():
    """256 + 1 is no bfloat16, and the sum of 256 and 1.5 rounds to 258 only if not to 256 first."""
    x = jnp.asarray([256, 1], BF16)
    assert jtk.sum(x, initial=0.5) == jnp.sum(x, initial=0.5) == 258


def test_many_elements_err_no_more_than_jaxs(rng):
    """A plain loop would have an error of about a thousand roundings; blocks have a few."""
    x = jnp.asarray(rng.random(30_000_001, np.float32))
    reference = np.asarray(x).astype(np.float64).sum()
    ours, theirs = (abs(float(f(x)) - reference) / reference for f in (jtk.sum, jnp.sum))
    assert ours <= max(theirs, 8 * UNIT_ROUNDOFF[np.dtype(np.float32)])


# Transformations, of small integers and polynomials, which are exact.


@pytest.mark.parametrize("mapped", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.one_in(2)
def test_vmap_moves_nothing(mapped, axis):
    x = jax.ShapeDtypeStruct((20, 30, 80), np.float32)
    # Where the mapped axis is by itself: elsewhere the result would be transposed.
    out_axis = mapped - (axis < mapped)
    function = jax.vmap(functools.partial(jtk.sum, axis=axis), mapped, out_axis)
    (choice,) = jtk.explain(function, x)
    if choice.kernel is None:
        pytest.skip(f"XLA computes it: {choice.reason}")
    text = jax.jit(function).lower(x).compile().as_text()
    names = re.findall(r"= \S+ ([a-z-]+)\(", text)
    assert names.count("custom-call") == 1
    assert not {"transpose", "copy", "reduce", "broadcast"} & set(names)


# Which kernel.


def explained(function, *args, platform="cuda"):
    with jtk.gpu_target("sm_90a"):
        (choice,) = jtk.explain(function, *args, platform=platform)[-1:]
    return choice


@pytest.mark.parametrize("kind", [jnp.bfloat16, np.float16])
def test_narrow_floats_are_summed_to_float32_where_they_lie(rng, kind):
    x = jnp.asarray(rng.standard_normal((5, 33, 3, 7)), kind)
    for axes in ((0, 1, 2, 3), (0, 2), (1, 3), (3,), (0,)):
        total = jtk.sum(x, axes, dtype=jnp.float32)
        assert_close(total, np.sum(np.asarray(x, np.float64), axes))
    if not on_gpu():
        wide = functools.partial(jtk.sum, dtype=jnp.float32)
        assert explained(wide, x, platform="cpu").kernel == f"cpu_sum {jnp.dtype(kind)}"


@pytest.mark.parametrize("initial", [0, 2])
def test_sums_are_rounded_once(rng, initial):
    """JAX casts the elements to a narrow type, and adds up floats of 8 bits in it."""
    x = jnp.concatenate([jnp.full(500, 1 + 2.0**-12), jnp.full(500, -1.0)])
    assert exact(jtk.sum(x, dtype=np.float16, initial=initial)) == np.float16(
        500 * 2.0**-12 + initial
    )
    x = random(rng, (8, 1000), F8E4)
    error = np.abs(exact(jtk.sum(x, 1, initial=initial)) - exact(x).sum(1) - initial)
    assert (error <= 1.01 * rounding(exact(x).sum(1) + initial, F8E4) + 2.0**-10).all()


def assert_same_bits(out, expected):
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert np.asarray(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2, jnp.float4_e2m1fn])
def test_types_of_less_than_a_byte_are_left_to_xla(dtype):
    x = jax.ShapeDtypeStruct((67, 130), dtype)
    (choice,) = jtk.explain(jtk.transpose, x)
    assert choice.kernel is None
    assert str(np.dtype(dtype)) in choice.reason
    if dtype == jnp.int4:
        values = np.arange(12).reshape(3, 4) % 8
        out = jtk.transpose(jnp.asarray(values, dtype))
        np.testing.assert_array_equal(out.astype(jnp.int8), values.T)


def test_random_keys():
    keys = jax.random.split(jax.random.key(3), 6).reshape(2, 3)
    out = jtk.transpose(keys)
    assert out.shape == (3, 2)
    np.testing.assert_array_equal(
        jax.random.key_data(out), jax.random.key_data(keys).transpose(1, 0, 2)
    )


@pytest.mark.parametrize(
    ("shape", "axes", "words"),
    [
        ((3, 0, 4), (2, 0, 1), "empty"),
        ((1, 5, 1, 7), (0, 1, 3, 2), "change of shape"),
        ((1, 5, 1, 7), (1, 0, 3, 2), "change of shape"),
        ((5, 7), (0, 1), "change of shape"),
        ((), (), "change of shape"),
    ],
)
def test_what_moves_nothing_is_left_to_xla(rng, shape, axes, words):
    x = rng.standard_normal(shape).astype(np.float32)
    (choice,) = jtk.explain(functools.partial(jtk.transpose, axes=axes), x)
    assert choice.kernel is None
    assert words in choice.reason
    assert_same_bits(jtk.transpose(jnp.asarray(x), axes), x.transpose(axes))


def test_jvp_and_vjp_are_transposes_themselves(rng):
    x, t = rng.standard_normal((2, 66, 40, 3)).astype(np.float32)
    axes = (2, 0, 1)
    out, tangent = jax.jvp(lambda x: jtk.transpose(x, axes), (x,), (t,))
    assert_same_bits(out, x.transpose(axes))
    assert_same_bits(tangent, t.transpose(axes))
    pullback = jax.jit(lambda x, c: jax.vjp(lambda x: jtk.transpose(x, axes), x)[1](c))
    (cotangent,) = pullback(x, t.transpose(axes))
    assert_same_bits(cotangent, t)
    text = str(jax.make_jaxpr(pullback)(x, t.transpose(axes)))
    assert "axes=(1, 2, 0)" in text
    assert "tilekern_transpose" in text


def test_accuracy_is_float32s_by_default(rng):
    """Products with a vector do not go through TF32, on a GPU neither."""
    a, x = random(rng, (40, 3000), np.float32), random(rng, (3000,), np.float32)
    assert_product(jtk.matvec(a, x), a, x, "mk,k->m")
    assert_product(jtk.vdot(a[0], x), a[0], x, "k,k->")


# What the compiled program holds, and which kernel it is.


def assert_only_products(function, *args, products=1):
    text = jax.jit(function).lower(*args).compile().as_text()
    names = re.findall(r"= \S+ ([a-z-]+)\(", text)
    assert names.count("custom-call") == products, names
    moved = {"transpose", "copy", "broadcast", "dot", "reshape", "concatenate", "pad", "reduce"}
    assert not moved & set(names), names


A = jax.ShapeDtypeStruct((96, 128), np.float32)
X = jax.ShapeDtypeStruct((128,), np.float32)


def test_each_is_one_product():
    y = jax.ShapeDtypeStruct((96,), np.float32)
    assert_only_products(jtk.matvec, A, X)
    assert_only_products(jtk.vecmat, y, A)
    assert_only_products(lambda a, y: jtk.matvec(a.T, y), A, y)
    if not on_gpu():  # There, short dot products are XLA's.
        assert_only_products(jtk.dot, X, X)
        assert_only_products(jtk.vdot, A, A)


@pytest.mark.defaults
def test_strided_dot_products_are_left_to_xla_on_cpus():
    columns = jax.ShapeDtypeStruct((64, 8), np.float32)
    mapped = jax.vmap(jtk.dot, (1, 1))
    (choice,) = jtk.explain(mapped, columns, columns, platform="cpu")
    assert choice.kernel is None
    assert "unless they are contiguous" in choice.reason
    rows = jax.ShapeDtypeStruct((8, 128), np.float32)
    with jtk.policy("kernels"):
        (choice,) = jtk.explain(jax.vmap(jtk.dot), rows, rows, platform="cpu")
    assert "dot" in choice.kernel


@pytest.mark.parametrize("subscripts", ["kb,kb->b", "bk,kb->b", "abk,abk->ba", "k,k->"])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_dot_products_in_any_order(rng, subscripts, dtype):
    sizes = {"a": 3, "b": 7, "k": 1000}
    inputs, _ = subscripts.split("->")
    operands = [random(rng, tuple(map(sizes.get, x)), dtype) for x in inputs.split(",")]
    found = jax.jit(partial(jtk.einsum, subscripts, preferred_element_type=np.float32))(*operands)
    expected = np.einsum(subscripts, *map(exact, operands))
    bound = 1000 * 2**-24 * np.einsum(subscripts, *(np.abs(exact(x)) for x in operands))
    assert np.all(np.abs(exact(found) - expected) <= bound)
