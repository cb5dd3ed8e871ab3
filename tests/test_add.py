"""``add`` has the semantics of ``jnp.add``, its very bits, and all of JAX's transformations."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import BF16, F8E4, assert_close, check_derivatives, poison, random
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from jax_tilekern import _core
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.add import ADDED_DTYPES, AddedDims, add_kernel, plan_add
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel

# Equal shapes, a scalar, a row, a column, both, and broadcast dimensions between others.
SHAPES = [
    ((7,), (7,)),
    ((1000,), ()),
    ((), (33,)),
    ((37, 5), (5,)),
    ((64, 148), (1, 148)),
    ((37, 1), (1, 165)),
    ((64, 1), (64, 164)),
    ((4, 1, 160), (1, 30, 1)),
    ((2, 3, 1, 8), (3, 7, 1)),
    ((70001,), (70001,)),
    ((3, 1), (3, 70000)),
    ((2, 1, 2, 1, 2, 1), (1, 3, 1, 3, 1, 3)),
    # Short rows that are repeated, alone and below further dimensions.
    ((5000, 3), (3,)),
    ((3, 700, 5), (3, 1, 5)),
    ((16,), (3, 2000, 16)),
    ((2, 1, 90, 3), (2, 4, 1, 3)),
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.int8])
@pytest.mark.one_in(3)
def test_values_are_jaxs(rng, shapes, dtype):
    """One rounding of the exact sum: there is nothing to differ in."""
    x, y = (random(rng, shape, dtype) for shape in shapes)
    expected = jnp.add(x, y)
    poison(expected.shape, dtype)
    np.testing.assert_array_equal(jax.jit(jtk.add)(x, y), expected)


@pytest.mark.parametrize("dtype", [*ADDED_DTYPES, np.bool_, np.complex64, np.complex128, F8E4])
def test_every_type(rng, x64, dtype):
    """Against NumPy's sum, which is rounded once."""
    if dtype == np.bool_:
        x, y = (random(rng, shape, np.int8) > 0 for shape in ((33, 170), (170,)))
    else:
        x, y = (random(rng, shape, dtype) for shape in ((33, 170), (170,)))
    wide = np.float32 if dtype in (BF16, np.float16, F8E4) else dtype
    total = jtk.add(x, y)
    assert total.dtype == x.dtype
    expected = np.asarray(x).astype(wide) + np.asarray(y).astype(wide)
    np.testing.assert_array_equal(total, expected.astype(dtype))


def test_every_instruction_set(rng):
    before = _core.cpu_instruction_set()
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            for dtype in (np.float32, BF16, np.float16, np.int8):
                x, y = random(rng, (3, 331), dtype), random(rng, (3, 1), dtype)
                # The handler looks its kernel up when it runs.
                compiled = jax.jit(jtk.add).lower(x, y).compile()
                for level in _core.cpu_instruction_sets():
                    _core.set_cpu_instruction_set(level)
                    np.testing.assert_array_equal(compiled(x, y), jnp.add(x, y), level)
    finally:
        _core.set_cpu_instruction_set(before)


def test_nan_infinities_and_signed_zeros():
    special = jnp.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 3.4e38] * 5, jnp.float32)
    for dtype in (jnp.float32, BF16, jnp.float16):
        x = special.astype(dtype)
        got, expected = (np.asarray(f(x[:, None], x), np.float32) for f in (jtk.add, jnp.add))
        np.testing.assert_array_equal(got, expected)
        signed = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got)[signed], np.signbit(expected)[signed])


@pytest.mark.parametrize("shapes", [((0,), (0,)), ((0, 3), (3,)), ((2, 0), (2, 1)), ((0,), ())])
def test_empty(shapes):
    x, y = (jnp.zeros(shape) for shape in shapes)
    assert jtk.add(x, y).shape == jnp.add(x, y).shape


@pytest.mark.parametrize("x64_enabled", [False, True])
@pytest.mark.one_in(2)
def test_types_are_promoted_as_jax_promotes(x64_enabled):
    with jax.enable_x64(x64_enabled):
        types = (np.float32, BF16, np.int8, np.uint8, np.int32, np.bool_, np.complex64)
        values = [jnp.ones((2,), dtype) for dtype in types]
        values += [1, 2.5, True, 1j, np.float64(2), np.ones((2,)), 1.5 * jnp.ones(()), 300]
        for x in values:
            for y in values:
                ours, theirs = (
                    jax.eval_shape(lambda f=f, x=x, y=y: f(x, y)) for f in (jtk.add, jnp.add)
                )
                assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type), (x, y)
    for dtype, y in ((np.int8, 300), (BF16, 2.5), (np.int32, True)):
        x = np.array([1, 100], dtype)
        np.testing.assert_array_equal(jtk.add(x, y), jnp.add(x, y))


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        ((0, 0), ((5, 3, 4), (5, 3, 4))),
        ((2, 0), ((3, 4, 5), (5, 4))),
        ((1, None), ((3, 5, 4), (4,))),
        ((None, 1), ((3,), (3, 5))),
        ((0, 1), ((5,), (2, 5, 3))),
    ],
)
def test_vmap(rng, axes, shapes):
    x, y = (random(rng, shape, np.float32) for shape in shapes)
    got = jax.jit(jax.vmap(jtk.add, axes))(x, y)
    np.testing.assert_array_equal(got, jax.vmap(jnp.add, axes)(x, y))
    # Another map around it, over an axis that both have.
    xs, ys = jnp.stack([x, 2 * x], -1), jnp.stack([y, -y], -1)
    twice = [jax.vmap(jax.vmap(f, axes), -1, 1) for f in (jtk.add, jnp.add)]
    np.testing.assert_array_equal(twice[0](xs, ys), twice[1](xs, ys))


@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 1), (1, 4)), ((), (3,))])
@pytest.mark.one_in(2)
def test_derivatives(rng, shapes):
    x, y = (random(rng, shape, np.float32) for shape in shapes)

    def squared(x, y):
        return jtk.add(x, y) ** 2

    check_derivatives(squared, (x, y))

    def gradients(f, x, y):
        return jax.grad(lambda x, y: jnp.sin(f(x, y)).sum(), (0, 1))(x, y)

    got, expected = (jax.jit(functools.partial(gradients, f))(x, y) for f in (jtk.add, jnp.add))
    assert_close(got, expected)


def test_the_cotangent_has_the_operands_type(rng):
    x, y = random(rng, (6, 8), BF16), random(rng, (8,), np.float32)
    gradients = jax.grad(lambda x, y: jtk.add(x, y).sum(), (0, 1))(x, y)
    assert [g.dtype for g in gradients] == [BF16, np.float32]
    np.testing.assert_array_equal(gradients[1], np.full(8, 6.0, np.float32))


@pytest.fixture
def devices():
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("takes four devices")
    return devices[:4]


def test_shard_map(rng, devices):
    """Operands that vary over other axes of the mesh: their gradients must be summed."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,), devices=devices)
    x, y = (np.asarray(random(rng, shape, np.float32)) for shape in ((8, 6), (6,)))

    def loss(f, x, y):
        return jnp.sin(f(x, y)).sum()

    def sharded(x, y):
        return jax.shard_map(
            lambda x, y: lax.psum(loss(jtk.add, x, y), "i"),
            mesh=mesh,
            in_specs=(P("i", None), P()),
            out_specs=P(),
        )(x, y)

    got = jax.jit(jax.grad(sharded, (0, 1)))(x, y)
    expected = jax.grad(lambda x, y: loss(jnp.add, x, y), (0, 1))(x, y)
    for ours, theirs in zip(got, expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("specs", [(P("i", "j"), P("j")), (P("i", None), P()), (P(), P("i"))])
def test_explicit_mesh(rng, devices, specs):
    mesh = jax.make_mesh((2, 2), ("i", "j"), devices=devices)
    operands = [random(rng, shape, np.float32) for shape in ((8, 6), (6,))]
    with jax.set_mesh(mesh):
        x, y = (jax.device_put(a, spec) for a, spec in zip(operands, specs, strict=True))

        def run(f):
            gradient = jax.grad(lambda x, y: jnp.sin(f(x, y)).sum(), (0, 1))
            return [jax.jit(f)(x, y), *jax.jit(gradient)(x, y)]

        for got, expected in zip(run(jtk.add), run(jnp.add), strict=True):
            assert got.sharding == expected.sharding
            assert_close(got, expected)


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
    assert short.reason == "XLA adds rows of 6 elements that lie apart"
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
