"""``cuda_kernel``: transformations, static parameters, plans, and what is refused.

Results are exact: operands are small integers in float32. Without a GPU a kernel's ``reference``
computes them, and plans are made for GPUs that are named.
"""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.jet import jet
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from numerics import BF16, F8E5, assert_equal, on_gpu, whole
from nvrtc_mark import require_nvrtc

import jax_tilekern as jtk
from jax_tilekern.compilation import headers
from jax_tilekern.compilation.nvrtc import NvrtcNotFound
from jax_tilekern.interop import outcomes
from jax_tilekern.ops.cuda_kernel.settings import Parameters, Use
from jax_tilekern.plans.cuda_kernel import Array, Batch, plan_kernel
from jax_tilekern.plans.gpu import NoGpu, known_gpu

require_nvrtc()


def struct(shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def blocks(size):
    return -(-size // 128)


# -- The kernels of these tests, with their meaning in JAX

ELEMENTWISE = r"""
template <typename T>
__global__ void multiply_add(const T* x, const T* y, T* out, T a, long long size) {
  const long long i = blockIdx.x * 128ll + threadIdx.x;
  if (i < size) out[i] = a * x[i] + y[i];
}
"""

COLUMNS = r"""
__global__ void scale_columns(const float* x, const float* y, float* out, int rows, int columns) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i < rows * columns) out[i] = x[i] * y[i % columns];
}
"""

# The same, and the batch lies along y.
BATCHED_COLUMNS = r"""
__global__ void scale_columns(const float* x, const float* y, float* out, int rows, int columns,
                              long long x_stride, long long y_stride, long long out_stride) {
  x += blockIdx.y * x_stride;
  y += blockIdx.y * y_stride;
  out += blockIdx.y * out_stride;
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i < rows * columns) out[i] = x[i] * y[i % columns];
}
"""

TWICE = r"""
__global__ void twice(const float* x, float* out, long long size) {
  const long long i = blockIdx.x * 128ll + threadIdx.x;
  if (i < size) out[i] = 2 * x[i];
}
"""

DIFFERENCE = r"""
__global__ void difference(const float* x, const float* y, float* out, long long size) {
  const long long i = blockIdx.x * 128ll + threadIdx.x;
  if (i < size) out[i] = 2 * x[i] - y[i];
}
"""

SQUARES = r"""
// Squares, and which of them are of negative numbers.
__global__ void squares(const float* x, float* out, int* negative, long long size) {
  const long long i = blockIdx.x * 128ll + threadIdx.x;
  if (i < size) {
    out[i] = x[i] * x[i];
    negative[i] = x[i] < 0;
  }
}
"""

COUNT_UP = r"""
__global__ void count_up(int* values, int* same_values, long long size) {
  const long long i = blockIdx.x * 128ll + threadIdx.x;
  if (i < size) same_values[i] += 1;
}
"""


def size_of_first(x, *_, **__):
    return np.int64(x.size)


def blocks_of_first(x, *_, **__):
    return blocks(x.size)


def maker(source, **settings):
    """Return a function that makes the kernel of a source, of settings and of changes of them.

    Without others a block has 128 elements of the first input, and the output is like that input.
    """
    plain = {
        "out": lambda x, *_, **__: x,
        "grid": blocks_of_first,
        "block": 128,
        "scalars": size_of_first,
    }
    return lambda **changes: jtk.cuda_kernel(source, **{**plain, **settings, **changes})


multiply_add = maker(
    ELEMENTWISE,
    name=lambda x, y, a: f"multiply_add<{jtk.cxx_type(x.dtype)}>",
    scalars=lambda x, y, a: (x.dtype.type(a), np.int64(x.size)),
    reference=lambda x, y, a: x * x.dtype.type(a) + y,
)
twice = maker(TWICE, reference=lambda x: 2 * x)
difference = maker(DIFFERENCE, reference=lambda x, y: 2 * x - y)
squares = maker(
    SQUARES,
    out=lambda x: (x, struct(x.shape, np.int32)),
    reference=lambda x: (x * x, (x < 0).astype(np.int32)),
)
count_up = maker(COUNT_UP, aliases={0: 0}, reference=lambda x: x + 1)


def scale_columns(batch_axis=None, **changes):
    make = maker(
        BATCHED_COLUMNS if batch_axis else COLUMNS,
        scalars=lambda x, y: (np.int32(x.shape[0]), np.int32(x.shape[1])),
        reference=lambda x, y: x * y,
        batch_axis=batch_axis,
    )
    return make(**changes)


def product():
    """Columns' scaling as an operation that is linear in each of its inputs."""
    kernel = scale_columns()
    kernel.deflinear(0, lambda g, x, y: kernel(g, y))
    kernel.deflinear(1, lambda g, x, y: (g * x).sum(0))
    return kernel


def lowered(function, *args, arch="sm_90a"):
    """The program for a GPU that need not be there."""
    with jtk.gpu_target(arch):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def numbers(text, name):
    """An attribute of the only call in a program, or of each parameter of it that has one."""
    found = re.findall(rf"{name} = dense<\[?([-\d, ]+)\]?> : tensor<(\d+)xi64>", text)
    return [[int(x) for x in values.split(",")] * (int(size) if "," not in values else 1)
            for values, size in found]  # fmt: skip


def operations(text):
    return set(re.findall(r"stablehlo\.(\w+)", text))


# -- Calls


def test_eager_and_jit(rng):
    kernel = multiply_add()
    for shape in ((), (1,), (3, 5), (129,)):
        x, y = whole(rng, *shape), whole(rng, *shape)
        for function in (kernel, jax.jit(kernel, static_argnames="a")):
            np.testing.assert_array_equal(function(x, y, a=3.0), 3 * np.asarray(x) + y)
    np.testing.assert_array_equal(kernel(2.0, 3.0, a=2.0), np.float32(7))


def test_several_outputs(rng):
    x = whole(rng, 200)
    got = jax.jit(squares())(x)
    assert isinstance(got, tuple)
    np.testing.assert_array_equal(got[0], np.asarray(x) ** 2)
    np.testing.assert_array_equal(got[1], np.asarray(x) < 0)
    assert got[1].dtype == np.int32
    # An output that nobody reads.
    np.testing.assert_array_equal(jax.jit(lambda x: squares()(x)[0])(x), np.asarray(x) ** 2)


def test_no_inputs():
    source = "__global__ void ones(float* out, int n) { out[threadIdx.x] = 1; }"
    ones = jtk.cuda_kernel(
        source,
        out=lambda n: struct((n,)),
        grid=1,
        block=lambda n: n,
        scalars=lambda n: np.int32(n),
        reference=lambda n: jnp.ones(n),
    )
    np.testing.assert_array_equal(jax.jit(lambda: ones(n=5))(), np.ones(5, np.float32))


def test_donation(rng):
    values = rng.integers(0, 100, 1000, np.int32)
    run = jax.jit(count_up(), donate_argnums=0)
    for _ in range(3):
        given = jnp.asarray(values) + 0
        np.testing.assert_array_equal(run(given), values + 1)
        assert given.is_deleted()


def test_sources_from_files_with_headers(rng, tmp_path):
    file = tmp_path / "doubled.cu"
    file.write_text('#include "factor.h"\n' + TWICE.replace("2 *", "FACTOR *"))
    kernel = twice()
    settings = {
        "out": lambda x: x, "grid": blocks_of_first, "block": 128, "scalars": size_of_first,
        "headers": {"factor.h": "#define FACTOR 2\n"}, "reference": lambda x: 2 * x,
    }  # fmt: skip
    kernel = jtk.cuda_kernel(file, **settings)
    x = whole(rng, 40)
    np.testing.assert_array_equal(kernel(x), 2 * np.asarray(x))
    assert kernel.report(x, gpu="sm_80").registers > 0
    file.write_text(TWICE + "\n\nbroken")
    broken = jtk.cuda_kernel(file, **settings)
    with pytest.raises(jtk.CompileError, match=re.escape(f"{file}(8): error")):
        broken.report(x, gpu="sm_80")


@pytest.mark.parametrize("name", ["types.cuh", "tilekern/view.cuh"])
def test_headers_that_the_library_has(name):
    with pytest.raises(ValueError, match=f"header {name} would take the place of"):
        twice(headers={name: ""})


# -- shard_map, on four devices of the CPU


@pytest.fixture
def mesh():
    devices = jax.devices("cpu")[:4]
    with jax.default_device(devices[0]):
        yield jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,), devices=devices)


def test_shard_map_gradients(rng, mesh):
    """An operand that does not vary over the axis has the sum of the devices' cotangents."""
    x, y, g = whole(rng, 8, 12), whole(rng, 12), whole(rng, 8, 12)
    kernel = product()

    def loss(x, y, g):
        one = jax.shard_map(
            lambda x, y, g: lax.psum((kernel(x, y) * g).sum(), "i"),
            mesh=mesh, in_specs=(P("i", None), P(), P("i", None)), out_specs=P(),
        )  # fmt: skip
        return one(x, y, g)

    for transform in (jax.grad, jax.jacfwd):
        for_x, for_y = jax.jit(transform(loss, (0, 1)))(x, y, g)
        np.testing.assert_array_equal(for_x, np.asarray(g) * y)
        np.testing.assert_array_equal(for_y, (np.asarray(g) * x).sum(0))


# -- vmap

AXES = [(0, None), (1, None), (2, None), (None, 0), (None, 1), (0, 0), (2, 1), (-1, 0)]


def with_axis(rng, shape, axis, size):
    if axis is None:
        return whole(rng, *shape)
    at = axis % (len(shape) + 1)
    return whole(rng, *shape[:at], size, *shape[at:])


@pytest.mark.parametrize("batch_axis", [None, "y"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.one_in(3)
def test_vmap_over_each_input_and_axis(rng, axes, batch_axis):
    kernel = scale_columns(batch_axis)
    for size in (1, 5):
        x, y = with_axis(rng, (3, 4), axes[0], size), with_axis(rng, (4,), axes[1], size)
        expected = jax.vmap(jnp.multiply, axes, 1)(x, y)
        np.testing.assert_array_equal(jax.jit(jax.vmap(kernel, axes, 1))(x, y), expected)


def test_unbatched_operands_are_not_copied():
    kernel = scale_columns()
    for axes, args in (
        ((0, None), (struct((5, 3, 4)), struct((4,)))),
        ((None, 0), (struct((3, 4)), struct((5, 4)))),
    ):
        text = lowered(jax.vmap(kernel, axes), *args)
        assert operations(text) == {"custom_call"}, text
        assert numbers(text, "repeats") == [[5]]
    # Only the operand whose axis is not the first is moved.
    text = lowered(jax.vmap(kernel, (2, None)), struct((3, 4, 5)), struct((4,)))
    assert operations(text) == {"custom_call", "transpose"}
    assert text.count("stablehlo.transpose") == 1


def test_batch_axis_is_one_launch():
    kernel = scale_columns("y")
    text = lowered(jax.vmap(kernel, (0, None)), struct((5, 3, 4)), struct((4,)))
    assert operations(text) == {"custom_call"}
    assert numbers(text, "grid") == [[1, 5, 1]]
    assert not numbers(text, "repeats")
    # Two batches that lie one in the other in every array are one.
    both = jax.vmap(jax.vmap(kernel, (0, None)), (0, None))
    text = lowered(both, struct((2, 5, 3, 4)), struct((4,)))
    assert numbers(text, "grid") == [[1, 10, 1]]
    assert not numbers(text, "repeats")
    # An array that has one of two keeps them apart.
    both = jax.vmap(jax.vmap(kernel, (0, None)), (None, 0))
    text = lowered(both, struct((5, 3, 4)), struct((2, 4)))
    assert numbers(text, "grid") == [[1, 5, 1]]
    assert numbers(text, "repeats") == [[2]]
    assert numbers(text, "steps_bytes") == [[0], [16], [240]]


def test_a_batch_too_large_for_the_grid_is_repeated():
    text = lowered(jax.vmap(scale_columns("y")), struct((65_536, 3, 4)), struct((65_536, 4)))
    assert numbers(text, "grid") == [[1, 1, 1]]
    assert numbers(text, "repeats") == [[65_536]]


def plan(kernel, *inputs, batches=(), arch="sm_90a", **parameters):
    types = tuple(Array(x.shape, np.dtype(x.dtype)) for x in inputs)
    use = Use(tuple(types), Parameters("test", parameters), tuple(batches))
    return plan_kernel(kernel._settings.call(use), known_gpu(arch))


@pytest.mark.parametrize("batch_axis", [None, "y"])
def test_launches_are_those_of_the_batches(rng, batch_axis):
    """Whatever is merged, put in the grid or repeated, each element meets its own operands."""
    shapes = [(3, 4), (4,), (3, 4)]
    for _ in range(30):
        batches = [
            Batch(int(rng.integers(1, 4)), tuple(bool(b) for b in rng.integers(0, 2, 2)))
            for _ in range(rng.integers(1, 5))
        ]
        planned = plan(scale_columns(batch_axis), *map(struct, shapes[:2]), batches=batches)
        expected = []
        for index in itertools.product(*(range(batch.size) for batch in batches)):
            offsets = []
            for i, shape in enumerate(shapes):
                offset = 0
                for batch, at in zip(batches, index, strict=True):
                    if i == 2 or batch.mapped[i]:
                        offset = offset * batch.size + at
                offsets.append(4 * offset * int(np.prod(shape)))
            expected.append(tuple(offsets))
        assert sorted(offsets_of(planned.launch, batch_axis)) == sorted(expected), batches


def offsets_of(launch, batch_axis):
    """By how many bytes each run of a single call's blocks is shifted, in each buffer."""
    pointers = launch.parameters[:3]
    strides = [np.frombuffer(p.data, np.int64)[0] for p in launch.parameters[5:]] or [0, 0, 0]
    for at in itertools.product(*map(range, launch.repeats)):
        for block in range(launch.grid[1] if batch_axis else 1):
            yield tuple(
                int(sum(i * step for i, step in zip(at, pointer.steps_bytes, strict=False)))
                + 4 * int(stride) * block
                for pointer, stride in zip(pointers, strides, strict=True)
            )


def test_misaligned_shifts_of_vmap():
    kernel = twice(alignment=16)
    assert plan(kernel, struct((3,))).alignments == (16, 16)
    assert plan(kernel, struct((4,)), batches=[Batch(5, (True,))]).launch.repeats == (5,)
    message = (
        r"kernel twice relies on pointers aligned to 16 bytes, but vmap shifts input 0 of "
        r"float32\[3\] by 12 bytes"
    )
    with pytest.raises(ValueError, match=message):
        lowered(jax.vmap(kernel), struct((5, 3)))
    # In the grid, the strides are the kernel's own to read.
    text = lowered(jax.vmap(scale_columns("y", alignment=16)), struct((5, 3, 3)), struct((5, 3)))
    assert numbers(text, "alignments") == [[16, 16, 16]]


# -- Derivatives


def test_derivatives_without_a_rule_are_the_references(rng):
    kernel, x, t = scale_columns(), whole(rng, 3, 4), whole(rng, 4)

    def loss(function):
        return lambda x, y: (jnp.sin(function(x, y)) ** 2).sum()

    for transform in (
        lambda f: jax.jvp(f, (x, t), (2 * x, t)),
        lambda f: jax.grad(loss(f), (0, 1))(x, t),
        lambda f: jax.hessian(loss(f))(x, t),
        lambda f: jax.jit(jax.vmap(jax.grad(loss(f)), (0, None)))(jnp.stack([x, 2 * x]), t),
        lambda f: jax.linearize(f, x, t)[1](x, t),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5),
            transform(kernel),
            transform(lambda x, y: x * y),
        )
    (_, signs), (tangent, zero) = jax.jvp(squares(), (t,), (t,))
    np.testing.assert_array_equal(tangent, 2 * t * t)
    assert (signs.dtype, zero.dtype) == (np.int32, jax.dtypes.float0)
    # Where a rule says how it is linear in one input, it is used for that input alone.
    calls = []
    kernel.deflinear(1, lambda g, x, y: calls.append(1) or (g * x).sum(0))
    jax.grad(lambda y: kernel(x, y).sum())(t)
    assert calls
    np.testing.assert_array_equal(jax.grad(lambda x: kernel(x, t).sum())(x), jnp.ones((3, 1)) * t)


def test_no_rule_is_an_error(rng):
    x = whole(rng, 3)
    message = (
        r"kernel twice has no derivative with respect to input 0; attach one .*\.defjvp\(rule\), "
        r"\.defvjp\(forward, backward\), .*\.deflinear\(input, transpose\)"
    )
    for transform in (
        lambda: jax.jvp(twice(reference=None), (x,), (x,)),
        lambda: jax.grad(lambda x: twice(reference=None)(x).sum())(x),
        lambda: jax.jit(jax.vmap(jax.grad(lambda x: twice(reference=None)(x).sum())))(x),
    ):
        with pytest.raises(NotImplementedError, match=message):
            transform()
    # Linear in one, and asked for the other.
    kernel = scale_columns(reference=None)
    kernel.deflinear(1, lambda g, x, y: (g * x).sum(0))
    x, y = whole(rng, 3, 4), whole(rng, 4)
    with pytest.raises(NotImplementedError, match=r"kernel scale_columns .* input 0"):
        jax.grad(lambda x: kernel(x, y).sum())(x)


def test_integer_inputs_need_no_rule(rng):
    kernel = multiply_add()
    x = whole(rng, 3, dtype=np.int32)
    got = jax.grad(lambda t: t * kernel(x, x, a=2).sum())(2.0)
    assert got == 3 * np.asarray(x).sum()


def linear_twice():
    kernel = twice()
    kernel.deflinear(0, lambda g, x: kernel(g))
    return kernel


def linear_difference():
    kernel = difference()
    kernel.deflinear((0, 1), lambda g, x, y: (2 * g, -g))
    return kernel


# Steps and tolerances of finite differences in float32. Linear functions allow any step; products,
# which are cubic at second order, need short ones.
LINEAR = {"eps": 1.0, "atol": 1e-2, "rtol": 1e-2}
CUBIC = {"eps": 1 / 64, "atol": 0.1, "rtol": 0.1}


def test_jointly_linear(rng):
    kernel = linear_difference()
    x, y, t, s = (whole(rng, 30) for _ in range(4))
    assert_equal(jax.jvp(kernel, (x, y), (t, s)), (2 * x - y, 2 * t - s))
    assert_equal(jax.jvp(lambda y: kernel(x, y), (y,), (s,)), (2 * x - y, -s))
    assert_equal(jax.vjp(kernel, x, y)[1](t), (2 * t, -t))
    assert_equal(jax.grad(lambda y: kernel(x, y).sum())(y), jnp.full(30, -1.0))
    check_grads(kernel, (x, y), 2, **LINEAR)


def test_multilinear(rng):
    kernel = product()
    x, y, t, s = whole(rng, 3, 4), whole(rng, 4), whole(rng, 3, 4), whole(rng, 4)
    assert_equal(jax.jvp(kernel, (x, y), (t, s)), (x * y, t * y + x * s))
    assert_equal(jax.vjp(kernel, x, y)[1](t), (t * y, (t * x).sum(0)))
    check_grads(kernel, (x, y), 2, **CUBIC)


def test_jvp_in_terms_of_another_kernel(rng):
    """Forward is the rule; reverse follows from the product that the tangent is."""
    derivative = product()
    kernel = squares()

    @kernel.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        twice_x = 2 * x[0]
        zero = np.zeros(x.shape, jax.dtypes.float0)
        return kernel(x), (derivative(t, twice_x), zero)

    x, t = whole(rng, 1, 200), whole(rng, 1, 200)
    (values, _), (tangent, _) = jax.jit(lambda x, t: jax.jvp(kernel, (x,), (t,)))(x, t)
    assert_equal((values, tangent), (x * x, 2 * x * t))
    gradient = jax.grad(lambda x: kernel(x)[0].sum())
    assert_equal(jax.jit(gradient)(x), 2 * x)
    assert_equal(jax.grad(lambda x: (gradient(x) ** 2).sum())(x), 8 * x)
    xs = whole(rng, 5, 1, 20)
    assert_equal(jax.vmap(gradient)(xs), 2 * xs)
    check_grads(lambda x: kernel(x)[0], (x,), 2, **CUBIC)


def test_vjp(rng):
    kernel = multiply_add()
    kernel.defvjp(lambda x, y, a: (kernel(x, y, a=a), None), lambda residuals, g, a: (a * g, g))
    x, y, g = whole(rng, 30), whole(rng, 30), whole(rng, 30)
    value, pullback = jax.vjp(lambda x, y: kernel(x, y, a=3.0), x, y)
    assert_equal(value, 3 * x + y)
    assert_equal(pullback(g), (3 * g, g))
    xs = whole(rng, 4, 30)
    gradients = jax.vmap(jax.grad(lambda x: kernel(x, y, a=3.0).sum()))(xs)
    assert_equal(gradients, jnp.full((4, 30), 3.0))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: kernel(x, y, a=3.0), (x,), (g,))


def test_a_kernel_has_the_polynomial_of_its_reference():
    kernel = jtk.cuda_kernel(
        "__global__ void sine(const float* x, float* out) {"
        " out[threadIdx.x] = sinf(x[threadIdx.x]); }",
        out=lambda x: x, grid=1, block=3, reference=jnp.sin,
    )  # fmt: skip
    x, series = jnp.ones(3), [jnp.ones(3), jnp.zeros(3), jnp.ones(3)]
    found, wanted = (jet(lambda x, f=f: f(x), (x,), (series,)) for f in (kernel, jnp.sin))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, wanted)


def test_a_kernel_without_derivatives_says_so():
    kernel = jtk.cuda_kernel(
        "__global__ void copy(const float* x, float* out) {}",
        out=lambda x: x, grid=1, block=1,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="deflinear"):
        jet(kernel, (np.ones(3, np.float32),), ([np.ones(3, np.float32)],))


def test_rules_that_cannot_be_attached():
    kernel = linear_twice()
    with pytest.raises(ValueError, match=r"<cuda_kernel twice> has a derivative .*; defjvp would"):
        kernel.defjvp(lambda primals, tangents: None)
    with pytest.raises(ValueError, match=r"deflinear\(0\).* there are rules for \[0\]"):
        kernel.deflinear(0, lambda g, x: g)
    for inputs in (-1, (), (0, -1), (1, 1)):
        with pytest.raises(ValueError, match=r"each is in one rule|numbered from 0"):
            difference().deflinear(inputs, lambda g, x: g)
    kernel = difference()
    kernel.defvjp(lambda x, y: None, lambda r, g: None)
    with pytest.raises(ValueError, match="has a derivative already; deflinear would be another"):
        kernel.deflinear(0, lambda g, x, y: g)


def test_rules_and_references_are_functions():
    for attach, argument in (
        (lambda: twice(reference=3), "reference"),
        (lambda: twice().defjvp(3), "defjvp: rule"),
        (lambda: twice().defvjp(3, max), "defvjp: forward"),
        (lambda: twice().defvjp(max, 3), "defvjp: backward"),
        (lambda: twice().deflinear(0, 3), "deflinear: transpose"),
    ):
        with pytest.raises(TypeError, match=f"kernel twice: {argument} is 3; it is a function"):
            attach()


def test_wrong_rules(rng):
    x = whole(rng, 3, 4)
    kernel = twice()
    kernel.deflinear(0, lambda g, x: g.sum(0))
    message = (
        r"the transpose rule of kernel twice for inputs \[0\] returned float32\[4\], not "
        r"float32\[3, 4\]"
    )
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda x: kernel(x).sum())(x)
    kernel = twice()
    kernel.deflinear(1, lambda g, x: g)
    with pytest.raises(ValueError, match=r"deflinear\(\[1\]\), but there are 1 inputs"):
        kernel(x)


# -- Buffers that are shared, and workspaces


def test_aliases_in_the_program():
    args = struct((6,), np.int32)
    text = lowered(count_up(), args)
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 0" in text
    assert "output_operand_alias" not in lowered(twice(), struct((6,)))


def test_aliases_keep_what_is_still_read(rng):
    x = whole(rng, 30, dtype=np.int32)
    kernel = count_up()
    got = jax.jit(lambda x: (kernel(x), x, kernel(x)))(x)
    assert_equal(got, (x + 1, x, x + 1))


def test_aliases_under_vmap(rng):
    x = whole(rng, 4, 30, dtype=np.int32)
    assert_equal(jax.jit(jax.vmap(count_up()))(x), x + 1)
    # Each element of the batch is written to a buffer of its own.
    y = whole(rng, 3)
    kernel = difference(aliases={1: 0})
    xs = whole(rng, 5, 3)
    assert_equal(jax.jit(jax.vmap(kernel, (0, None)))(xs, y), 2 * xs - y)
    text = lowered(jax.vmap(kernel, (0, None)), xs, y)
    assert numbers(text, "steps_bytes") == [[12], [12], [12]]


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({0: 1}, r"aliases=\{0: 1\}, but there are 2 inputs and 1 outputs"),
        ({-1: 0}, r"aliases=\{-1: 0\}, but there are 2 inputs and 1 outputs"),
        ({1: 0}, r"input 1 of float32\[4\] cannot share the buffer of output 0 of float32\[3,4\]"),
    ],
)
def test_aliases_that_cannot_be(aliases, message):
    kernel = scale_columns(aliases=aliases)
    with pytest.raises(ValueError, match=f"kernel scale_columns: {message}"):
        jax.eval_shape(kernel, struct((3, 4)), struct((4,)))


def test_one_output_takes_one_buffer():
    with pytest.raises(ValueError, match="give one output's buffer to several inputs"):
        difference(aliases={0: 0, 1: 0})


WITH_WORKSPACE = r"""
// Doubles through the workspace.
__global__ void detour(const float* x, float* out, float* workspace, int size
#ifdef BATCHED
                       , long long x_stride, long long out_stride
#endif
) {
#ifdef BATCHED
  x += blockIdx.z * x_stride, out += blockIdx.z * out_stride, workspace += blockIdx.z * size;
#endif
  for (int i = threadIdx.x; i < size; i += blockDim.x) workspace[i] = 2 * x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[i] = workspace[size - 1 - i];
}
"""


def detour(batch_axis=None, debug=False):
    return jtk.cuda_kernel(
        WITH_WORKSPACE,
        out=lambda x: x,
        grid=1,
        block=64,
        workspaces=lambda x: 4 * x.size,
        scalars=lambda x: np.int32(x.size),
        batch_axis=batch_axis,
        options="-DBATCHED" if batch_axis else (),
        debug=debug,
        reference=lambda x: 2 * x[::-1],
    )


@pytest.mark.parametrize("batch_axis", [None, "z"])
def test_workspaces(rng, batch_axis):
    x = whole(rng, 5, 100)
    kernel = detour(batch_axis)
    assert_equal(jax.jit(kernel)(x[0]), 2 * x[0, ::-1])
    assert_equal(jax.jit(jax.vmap(kernel))(x), 2 * x[:, ::-1])
    assert "tensor<400xui8>" in lowered(kernel, x[0])
    # Launches that follow each other share it; elements of the batch in one launch do not.
    bytes_ = 5 * 400 if batch_axis else 400
    assert f"tensor<{bytes_}xui8>" in lowered(jax.vmap(kernel), x)


# -- Static parameters


def test_programs_are_kept_for_each_parameter():
    """Python's own equality would give all of these the program of the first."""
    describe = jtk.cuda_kernel(
        "__global__ void describe(float* out) { *out = 0; }",
        out=struct(()),
        grid=1,
        block=1,
        scalars=(),
        options=lambda a: f"-DA={a!r}",
        reference=lambda a: jnp.float32({int: 1, float: 2, bool: 3}[type(a)] * np.copysign(1, a)),
    )
    if on_gpu():
        pytest.skip("looks at what the reference returns")
    values = [float(describe(a=a)) for a in (1, 1.0, True, 0.0, -0.0)]
    assert values == [1, 2, 3, 2, -2]


def test_parameters_that_are_refused(rng):
    kernel = multiply_add()
    x = whole(rng, 3)
    with pytest.raises(TypeError, match=r"parameter a of kernel multiply_add is an array.*static"):
        kernel(x, x, a=jnp.float32(2))
    with pytest.raises(
        TypeError, match=r"parameter a .* is an array, ~?float32\[\].*static_argnames"
    ):
        jax.jit(lambda x, a: kernel(x, x, a=a))(x, 2.0)
    for value, kind in ((np.zeros(3), "ndarray"), ([1, 2], "list"), ({}, "dict")):
        with pytest.raises(TypeError, match=f"parameter a .* is a {kind}, which is not hashable"):
            kernel(x, x, a=value)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        kernel(x, x)


# -- Outputs of no size, and batches of none


def test_empty_outputs_are_not_launched(rng):
    kernel = twice()
    empty = jnp.zeros((0, 3))
    assert jax.jit(kernel)(empty).shape == (0, 3)
    text = lowered(kernel, struct((0, 3)))
    assert "custom_call" not in text
    assert jax.vmap(kernel)(jnp.zeros((0, 3))).shape == (0, 3)
    assert "custom_call" not in lowered(jax.vmap(kernel), struct((0, 3)))
    linear = linear_twice()
    assert jax.grad(lambda x: linear(x).sum())(empty).shape == (0, 3)


def test_empty_inputs_are_launched(rng):
    """A sum of nothing is 0, and somebody has to write it."""
    source = r"""
    __global__ void total(const float* x, float* out, int size) {
      float sum = 0;
      for (int i = 0; i < size; ++i) sum += x[i];
      *out = sum;
    }
    """
    total = jtk.cuda_kernel(
        source,
        out=struct(()),
        grid=1,
        block=1,
        scalars=lambda x: np.int32(x.size),
        reference=lambda x: x.sum(),
    )
    assert jax.jit(total)(jnp.zeros(0)) == 0
    x = whole(rng, 5)
    assert jax.jit(total)(x) == x.sum()
    assert_equal(jax.vmap(total)(jnp.zeros((3, 0))), jnp.zeros(3))
    assert "custom_call" in lowered(total, struct((0,)))


# -- Bad input: what is wrong, in numbers, when the call is traced or lowered


def test_compile_errors_have_log_line_and_options():
    kernel = twice(options=("-DTILE=32",))
    broken = jtk.cuda_kernel(
        "\n".join(["", "__global__ void broken(float* out) {", "  *out = oops;", "}"]),
        out=struct(()), grid=1, block=1, options=lambda: ("-DTILE=32",),
    )  # fmt: skip
    with pytest.raises(jtk.CompileError) as caught:
        lowered(broken)
    message = str(caught.value)
    assert 'broken.cu(3): error: identifier "oops" is undefined' in message
    assert "-DTILE=32" in message
    assert "--gpu-architecture=sm_90a" in message
    assert "oops" in caught.value.log
    assert kernel.report(struct((3,)), gpu="sm_80").registers > 0
    with pytest.raises(jtk.CompileError, match="unrecognized option -nonsense"):
        lowered(twice(options="-nonsense"), struct((3,)))


def test_strict_compiles_a_kernel_whose_reference_runs(monkeypatch):
    settings = {"out": lambda x: x, "grid": 1, "block": 128, "scalars": size_of_first}
    make = functools.partial(jtk.cuda_kernel, **settings, reference=lambda x: 2 * x)
    broken = make(TWICE.replace("2 * x[i];", "2 * x[i]"))
    template = "template <class T>" + TWICE.replace("float", "T")
    of_another_type = make(template, name="twice<double>")

    def on_cpu(kernel):
        return jtk.explain(kernel, struct((3,)), platform="cpu")[0].reason

    with outcomes.entered("DEFAULT"):
        assert on_cpu(broken) == on_cpu(of_another_type) == "its reference: no CUDA here"
    monkeypatch.setattr("jax_tilekern.plans.gpu._visible_gpu", lambda: "no driver")
    for strict in (jtk.strict(), jtk.strict(allow_fallbacks=True)):
        with strict:
            with pytest.raises(jtk.CompileError, match=r'sm_90a(?s:.)*expected a ";"'):
                on_cpu(broken)
            with jtk.policy("xla"):
                assert on_cpu(broken) == "its reference: no CUDA here"
            with jtk.gpu_target("sm_80"), pytest.raises(jtk.CompileError, match="sm_80 "):
                on_cpu(broken)
            with pytest.raises(TypeError, match=r"parameter 0 is const double\*"):
                on_cpu(of_another_type)
            assert on_cpu(make(TWICE)).endswith("; checked for sm_90a")

    def compile_kernels(*_, **__):
        raise NvrtcNotFound("no NVRTC here")

    monkeypatch.setattr("jax_tilekern.plans.cuda_kernel.compile_kernels", compile_kernels)
    with jtk.strict():
        assert on_cpu(broken).endswith("; not checked: no NVRTC here")


@pytest.mark.parametrize("name", ["absent", "helper", "multiply_add", "multiply_add<float, 3>"])
def test_wrong_entry_name(name):
    source = ELEMENTWISE + "__device__ void helper() {}\n"
    scalars = np.float32(1), np.int64(3)
    kernel = jtk.cuda_kernel(source, name=name, out=struct((3,)), grid=1, block=1, scalars=scalars)
    with pytest.raises(jtk.CompileError, match=re.escape(f"has no kernel {name};")) as caught:
        lowered(kernel, struct((3,)), struct((3,)))
    assert str(caught.value).count("multiply_add<float, 3>") == (name == "multiply_add<float, 3>")


def test_which_kernel():
    settings = {"out": struct(()), "grid": 1, "block": 1}
    with pytest.raises(ValueError, match=r"this one has none: pass name="):
        jtk.cuda_kernel("__device__ void f() {}", **settings)
    with pytest.raises(ValueError, match=r"this one has multiply_add<...>: pass name="):
        jtk.cuda_kernel(ELEMENTWISE, **settings)
    with pytest.raises(ValueError, match=r"this one has twice, count_up: pass name="):
        jtk.cuda_kernel(TWICE + COUNT_UP, **settings)
    named = jtk.cuda_kernel(TWICE + COUNT_UP, name="count_up", **settings)
    assert repr(named) == "<cuda_kernel count_up>"
    # Neither comments, declarations, launch bounds nor what only looks like a kernel count.
    source = """
    // __global__ void old(float* x) {}
    /* __global__ void older() { } */
    __global__ void first(float*);
    __global__ void __launch_bounds__(1) first(float* x) { *x = 1; }
    """
    assert repr(jtk.cuda_kernel(source, **settings)) == "<cuda_kernel first>"
    bounded = 'extern "C" __global__ __launch_bounds__(64, 2) void f(int (*x)[3]) { **x = 0; }'
    assert repr(jtk.cuda_kernel(bounded, **settings)) == "<cuda_kernel f>"


def test_sources_that_are_no_text():
    settings = {"out": struct(()), "grid": 1, "block": 1}
    with pytest.raises(ValueError, match=r"has none: pass name=, and the path .* pathlib\.Path"):
        jtk.cuda_kernel("kernels/scale.cu", **settings)
    with pytest.raises(
        ValueError, match=r"begins with b'__global', unlike .* CUDA C\+\+ is a strin"
    ):
        jtk.cuda_kernel(b"__global__ void f() {}", **settings)


def test_dynamic_shared_memory_has_a_size():
    source = "__global__ void f(float* out) { extern __shared__ float s[]; *out = s[0]; }"
    settings = {"out": struct(()), "grid": 1, "block": 1}
    with pytest.raises(ValueError, match="kernel f declares extern __shared__ memory: give its"):
        jtk.cuda_kernel(source, **settings)
    jtk.cuda_kernel(source, **settings, shared_memory_bytes=lambda: 0)
    jtk.cuda_kernel(source.replace("extern", "// extern"), **settings)


def test_typed_keys_are_no_input():
    with pytest.raises(
        TypeError, match=r"input 0 of a kernel is key<fry>\[\]; pass jax.random.key_d"
    ):
        twice()(jax.random.key(0))


GREEDY = r"""
__global__ void greedy(float* out) {
  __shared__ float tile[1024];
  tile[threadIdx.x] = 0;
  *out = tile[0];
}
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 1025}, r"block \(1025, 1, 1\) exceeds \(1024, 1024, 64\)"),
        ({"block": (32, 33)}, r"block \(32, 33, 1\) has 1056 threads, more than 1024"),
        ({"grid": 0}, r"grid \(0, 1, 1\) has a dimension below 1"),
        ({"grid": (1, 65_536)}, r"grid \(1, 65536, 1\) exceeds \(2147483647, 65535, 65535\)"),
        ({"grid": 3, "cluster": 2}, r"grid \(3, 1, 1\) is not a multiple of cluster \(2, 1, 1\)"),
        ({"grid": 16, "cluster": 16}, r"cluster \(16, 1, 1\) has 16 blocks, more than 8"),
        ({"shared_memory_bytes": -1}, r"shared memory of -1 bytes is negative"),
        (
            {"shared_memory_bytes": 224 << 10},
            r"233472 bytes of shared memory \(4096 static, 229376 dynamic\), more than the 232448",
        ),
        (
            {"workspaces": 9},
            r"takes 1 parameters \(float\*\), but the call passes 2: output 0 of float32\[\], "
            r"workspace 0 of 9 bytes\. A kernel takes pointers to inputs, outputs and workspaces",
        ),
        ({"scalars": np.float64(1)}, r"passes 2: output 0 of float32\[\], scalar 0 of float64"),
        ({"batch_axis": "x", "grid": 2}, r"more than one block along x, which batch_axis gives"),
    ],
)
def test_launches_that_cannot_work(change, message):
    settings = {"out": struct(()), "grid": 1, "block": 1}
    kernel = jtk.cuda_kernel(GREEDY, **{**settings, **change})
    with pytest.raises(ValueError, match=f"greedy.*{message}"):
        lowered(kernel)


def test_launch_bounds_and_registers():
    bounded = GREEDY.replace("void greedy", "void __launch_bounds__(128) greedy")
    kernel = jtk.cuda_kernel(bounded, out=struct(()), grid=1, block=256)
    with pytest.raises(ValueError, match=r"block \(256, 1, 1\) has 256 threads, more than 128"):
        lowered(kernel)
    # 128 sums at a time in registers.
    many = r"""
    __global__ void BOUNDS many(const float* x, float* out) {
      float sums[128];
    #pragma unroll
      for (int i = 0; i < 128; ++i) sums[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
    #pragma unroll
      for (int i = 0; i < 128; ++i) out[i * 1024 + threadIdx.x] = sums[127 - i];
    }
    """
    x = struct((128, 1024))
    settings = {"out": lambda x: x, "grid": 1, "name": "many"}
    greedy = jtk.cuda_kernel(many, **settings, block=1024, options="-DBOUNDS=")
    with pytest.raises(
        ValueError,
        match=r"block \(1024, 1, 1\) has 1024 threads of \d+ registers, more than an "
        r"SM has; __launch_bounds__\(1024\)",
    ):
        lowered(greedy, x)
    report = jtk.cuda_kernel(
        many, **settings, block=1024, options="-DBOUNDS=__launch_bounds__(1024)"
    ).report(x, gpu="sm_90")
    assert report.registers <= 64
    assert report.spill_bytes > 0


def test_clusters_take_hopper():
    kernel = jtk.cuda_kernel(GREEDY, out=struct(()), grid=4, block=1, cluster=(2, 1))
    assert numbers(lowered(kernel), "cluster") == [[2, 1, 1]]
    with pytest.raises(ValueError, match=r"cluster \(2, 1, 1\), which sm_80 lacks"):
        lowered(kernel, arch="sm_80")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": 1.0}, "grid is 1.0, a float and not an integer"),
        ({"grid": lambda: "4"}, "grid is '4', a str and not an integer"),
        ({"scalars": 3}, r"scalar 3 has Python's type int, .* np.int32\(...\) for"),
        ({"tensor_maps": (1,)}, "1 is no jax_tilekern.TensorMap"),
        ({"options": [3]}, "option 3 is not a string"),
        ({"name": lambda: None}, "name is None, not a string"),
        ({"out": lambda: None}, "out gives None for output 0, which has no shape and dtype"),
    ],
)
def test_settings_of_the_wrong_type(change, message):
    settings = {"out": struct(()), "grid": 1, "block": 1}
    kernel = jtk.cuda_kernel(GREEDY, **{**settings, **change})
    with pytest.raises(TypeError, match=f"kernel greedy: {message}"):
        lowered(kernel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_axis": "w"}, "batch_axis is 'w', not 'x', 'y', 'z' or None"),
        ({"alignment": 12}, "alignment 12 is not a power of two"),
        ({"out": ()}, "out gives no outputs"),
    ],
)
def test_settings_of_the_wrong_value(change, message):
    settings = {"out": struct(()), "grid": 1, "block": 1}
    with pytest.raises(ValueError, match=f"kernel greedy: {message}"):
        jtk.cuda_kernel(GREEDY, **{**settings, **change})()


def test_float64_outputs_take_x64(rng):
    kernel = twice(out=lambda x: struct(x.shape, np.float64))
    message = r"output 0 is float64\[3\], which JAX would make float32; set jax_enable_x64"
    with pytest.raises(TypeError, match=message):
        kernel(whole(rng, 3))


def test_packed_types_are_refused():
    message = r"kernel twice: {} 0 is {}, of which a byte holds several"
    for dtype in (jnp.int4, jnp.uint4, jnp.int2):
        with pytest.raises(TypeError, match=message.format("input", np.dtype(dtype))):
            twice()(jnp.zeros(4, dtype))
    with pytest.raises(TypeError, match=message.format("output", "int4")):
        twice(out=struct((3,), jnp.int4))(jnp.zeros(3))
    # A byte each.
    for dtype in (F8E5, np.int8, np.bool_):
        assert jax.eval_shape(twice(), struct((3,), dtype)).dtype == dtype


def test_wrong_references(rng):
    if on_gpu():
        pytest.skip("the reference is not used")
    x = whole(rng, 3)
    for reference, given in (
        (lambda x: x[:2], r"float32\[2\]"),
        (lambda x: x.astype(np.int32), r"int32\[3\]"),
        (lambda x: (x, x), r"float32\[3\], float32\[3\]"),
    ):
        message = rf"the reference of kernel twice returned {given}, but its out says float32\[3\]"
        with pytest.raises(TypeError, match=message):
            twice(reference=reference)(x)
        with pytest.raises(TypeError, match=message):
            jax.vmap(twice(reference=reference))(x[None])


def test_no_reference_is_an_error():
    if on_gpu():
        pytest.skip("the kernel runs")
    message = "kernel twice is CUDA, and this program is lowered for cpu; give .* a reference="
    with pytest.raises(NotImplementedError, match=message):
        twice(reference=None)(jnp.zeros(3))
    with pytest.raises(NoGpu):
        jax.jit(twice(reference=None)).trace(struct((3,))).lower(lowering_platforms=("cuda",))
    with pytest.raises(NoGpu):
        twice().report(struct((3,)))


def test_exported_for_both_platforms(rng):
    x = whole(rng, 30)
    with jtk.gpu_target("sm_90a"):
        exported = jax.export.export(
            jax.jit(twice()), platforms=("cpu", "cuda"), disabled_checks=jtk.export_checks()
        )(x)
    assert "jax_tilekern_cuda_launch" in str(exported.mlir_module())
    if not on_gpu():
        assert_equal(exported.call(x), 2 * x)


# -- Types of the kernel's parameters


def kernel_of(parameters, inputs, **settings):
    """A kernel with an empty body and its inputs; on a CPU its output is zeros."""
    given = {"out": struct((4,)), "grid": 1, "block": 1, "reference": lambda *_: jnp.zeros(4)}
    text = f"#include <tilekern/types.cuh>\n{settings.pop('before', '')}\n"
    source = f"{text}__global__ void f({parameters}) {{}}"
    return functools.partial(jtk.cuda_kernel(source, **{**given, **settings}), *inputs)


X, HALF, ODD = np.zeros(4, np.float32), np.zeros(4, BF16), np.zeros(3, np.float32)
I32, I64 = np.int32(7), np.int64(7)


@pytest.mark.parametrize(
    ("parameters", "inputs", "settings", "message"),
    [
        (
            "const float* x, float* out", [HALF], {},
            "parameter 0 is const float*, but the call passes input 0 of bfloat16[4] there. "
            "Declare it const tilekern::bfloat16*, or const void* for any array, or give it an "
            "array of float32",
        ),
        ("float* out, const float* x", [X], {}, "A kernel writes to its outputs"),
        ("float* x, int n, float* out", [X], {"scalars": I32}, "parameter 1 is int, but the call "
         "passes output 0 of float32[4] there. A kernel takes pointers to inputs, outputs and"),
        (
            "float* x, float* out, int n", [X], {"scalars": I64},
            "parameter 2 is int, but the call passes scalar 0 of int64 there. Declare it long "
            "long, or pass np.int32(...)",
        ),
        ("float* x, float* out, float a", [X], {"scalars": I32}, "or pass np.float32(...)"),
        ("float* x, float* out, unsigned n", [X], {"scalars": np.int32(-1)}, "np.uint32(...)"),
        ("const float4* x, float4* out", [ODD], {}, "Its 12 bytes are no multiple of the 16 of "
         "float4: pad it, or declare const float*"),
        ("const float** x, float* out", [X], {}, "An array is one pointer: declare it const"),
        ("float* x, float* o, int x_stride, int o_stride", [X], {"batch_axis": "x"},
         "passes the stride of input 0 there"),
    ],
)  # fmt: skip
def test_types_that_do_not_go_together(parameters, inputs, settings, message):
    """The text of the source tells on every platform, with a compiler or without."""
    call = kernel_of(parameters, inputs, **settings)
    message = re.escape(message)
    with pytest.raises(TypeError, match=f"kernel f: .*{message}"):
        call()
    with pytest.raises(TypeError, match=f"kernel f: .*{message}"):
        lowered(call)


@pytest.mark.parametrize(
    ("parameters", "inputs", "settings"),
    [
        ("const void* x, unsigned char* out", [HALF], {}),
        ("const tilekern::bfloat16* x, float* out", [HALF], {}),
        ("const float4* __restrict__ x, float2* out", [X], {}),
        ("const float2* x, const float* y, float* out", [X + np.complex64(1j)] * 2, {}),
        ("struct Own* x, float* out", [X], {"before": "struct Own { float x, y; };"}),
        ("float* x, float* out, long n, unsigned m", [X], {"scalars": (I64, I32)}),
        ("float* x, float* out, char* workspace, const tilekern::bfloat16 a", [X],
         {"scalars": BF16(2), "workspaces": 8}),
        ("float* x, const float* out", [X], {"aliases": {0: 0}}),
    ],
)  # fmt: skip
def test_types_that_go_together(parameters, inputs, settings):
    call = kernel_of(parameters, inputs, **settings)
    call()
    lowered(call)


def test_vectors_set_the_alignment():
    """``vmap`` shifts by three elements, which float2 does not allow."""
    x = jnp.zeros((5, 6))
    pairs = kernel_of("const float2* x, float* out", [])
    assert plan(pairs.func, x[0]).alignments == (8, 4)
    odd = jtk.cuda_kernel(
        "__global__ void f(const float4* x, float4* out) {}", out=lambda x: x, grid=1, block=1
    )
    assert plan(odd, struct((4,))).alignments == (16, 16)
    lowered(jax.vmap(odd), struct((5, 4)))


# -- Functions of settings


@pytest.mark.parametrize("setting", ["grid", "block", "scalars", "shared_memory_bytes", "name"])
def test_functions_of_settings_are_called_on_every_platform(setting):
    kernel = twice(**{setting: lambda x: x.nonsense})
    message = (
        rf"kernel twice: the function {setting}\(float32\[3\]\) raises AttributeError: .*nonsense"
    )
    with pytest.raises(ValueError, match=message) as caught:
        kernel(jnp.zeros(3))
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(ValueError, match=message):
        lowered(kernel, struct((3,)))
    # What is not launched has no grid.
    assert kernel(jnp.zeros(0)).shape == (0,)


# -- Headers


STANDARD = r"""
#include <assert.h>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
static_assert(FLT_MAX == 3.402823466e38f && DBL_MIN == 2.2250738585072014e-308);
static_assert(INT_MIN + INT_MAX == -1 && LLONG_MIN + LLONG_MAX == -1 && UINT64_MAX + 1 == 0);
static_assert(sizeof(int64_t) == 8 && sizeof(std::uint16_t) == 2 && sizeof(size_t) == 8);
constexpr float kInfinity = INFINITY;
static_assert(kInfinity > FLT_MAX && NAN != NAN && -HUGE_VAL < -DBL_MAX);
__global__ void f(const float* x, float* out, uint32_t size) {
  assert(threadIdx.x < size);
  if (std::isnan(*x)) printf("not a number\n");
  *out = std::sqrt(*x) + static_cast<float>(M_PI);
}
"""


def test_standard_headers():
    kernel = jtk.cuda_kernel(STANDARD, out=struct(()), grid=1, block=1, scalars=np.uint32(1))
    assert kernel.report(struct(()), gpu="sm_80").registers > 0


@pytest.mark.parametrize(
    ("body", "include", "message"),
    [
        ("__half h;", "", "__half is declared in a header: #include <cuda_fp16.h>"),
        ("uint32_t n;", "", "uint32_t is declared in a header: #include <stdint.h>"),
        ("float x = FLT_MAX;", "", "#include <float.h>"),
        ("", "curand_kernel.h", "<curand_kernel.h> is part of cuRAND: `pip install nvidia-curand`"),
        ("", "limits", "<cuda/std/limits> of libcu++ takes the place of <limits>"),
        ("", "mine.h", "mine.h is no header that is known here: pass the folder of it, include="),
        ("", "iostream", "or put it and the rest of the host code inside #ifndef __CUDACC_RTC__"),
        ("f<<<1, 1>>>(out);", "", "A launch is host code, which NVRTC does not compile: put it"),
        ("__shared__ float s[60000]; out[0] = s[int(out[1])];", "", "declare it extern __shared__"),
    ],
)
def test_missing_headers_have_advice(body, include, message, monkeypatch):
    monkeypatch.setattr(headers, "toolkit_folders", list)
    source = f"#include <{include}>\n" * bool(include) + f"__global__ void f(float* out) {{{body}}}"
    kernel = jtk.cuda_kernel(source, out=struct((4,)), grid=1, block=1)
    with pytest.raises(jtk.CompileError, match=re.escape(message)):
        lowered(kernel)


def test_headers_of_the_toolkit(monkeypatch, tmp_path):
    """They are found as NVRTC finds files, and another version of them is compiled anew."""
    inner = tmp_path / "details" / "inner.h"
    inner.parent.mkdir()
    inner.write_text("struct __half { unsigned short bits; };\n")
    (tmp_path / "cuda_fp16.h").write_text('#pragma once\n#include "details/inner.h"\n')
    monkeypatch.setattr(headers, "toolkit_folders", lambda: [str(tmp_path)])
    source = "#include <cuda_fp16.h>\n__global__ void f(const __half* x, float* out) {}"
    kernel = jtk.cuda_kernel(source, out=struct((4,)), grid=1, block=1)
    kernel.report(struct((4,), np.float16), gpu="sm_90")
    assert ".entry" in kernel.report(struct((4,), np.float16), gpu="sm_90").ptx()
    with pytest.raises(TypeError, match=r"const __half\*, but the call passes input 0 of float32"):
        kernel.report(struct((4,)), gpu="sm_90")
    before = headers.headers_of(source, {}).versions
    (tmp_path / "cuda_bf16.h").touch()
    assert headers.headers_of(source, {}).versions != before


# -- Tensor maps

COPY_BOX = r"""
#include <tilekern/mbarrier.cuh>
#include <tilekern/ptx.cuh>
#include <tilekern/tma.cuh>

// A block copies a box of 8 rows of 32 columns.
__global__ void copy_boxes(const float* x, float* out,
                           const __grid_constant__ tilekern::TensorMap from,
                           const __grid_constant__ tilekern::TensorMap to) {
  __shared__ alignas(128) float box[8][32];
  __shared__ alignas(8) long long storage;
  const auto address = tilekern::shared_address(box), full = tilekern::shared_address(&storage);
  const tilekern::TmaCoordinates origin = {{int(blockIdx.x) * 32, int(blockIdx.y) * 8}};
  if (threadIdx.x == 0) {
    tilekern::mbarrier_init(full, 1);
    tilekern::fence_barrier_init();
    tilekern::mbarrier_arrive_expect_tx(full, sizeof(box));
    tilekern::tma_load(address, from, origin, full);
    tilekern::mbarrier_wait(full, 0);
    tilekern::tma_store(to, origin, address);
    tilekern::tma_store_commit();
    tilekern::tma_store_wait_read<0>();
  }
}
"""


def box_map(buffer, x, **changes):
    """Boxes of 8 by 32 of a matrix; the instructions take five dimensions."""
    rows, columns = x.shape
    size = 4 * columns * rows
    settings = {
        "dtype": "float32",
        "sizes": (columns, rows, 1, 1, 1),
        "strides_bytes": (4 * columns, size, size, size),
        "box": (32, 8, 1, 1, 1),
    }
    return jtk.TensorMap(buffer, **{**settings, **changes})


def copy_boxes(**changes):
    settings = {
        "out": lambda x: x,
        "grid": lambda x: (-(-x.shape[1] // 32), -(-x.shape[0] // 8)),
        "block": 32,
        "tensor_maps": lambda x: (box_map(0, x), box_map(1, x)),
        "reference": lambda x: x,
    }
    return jtk.cuda_kernel(COPY_BOX, **{**settings, **changes})


def test_tensor_maps_are_planned(rng):
    x = whole(rng, 20, 36)
    planned = plan(copy_boxes(), x)
    assert planned.alignments == (16, 16)
    assert planned.launch.entry.parameter_bytes == (8, 8, 128, 128)
    batched = plan(copy_boxes(), x, batches=[Batch(3, (True,))])
    assert [p.steps_bytes for p in batched.launch.parameters] == [(2880,)] * 4
    assert_equal(jax.jit(jax.vmap(copy_boxes()))(jnp.stack([x, 2 * x])), jnp.stack([x, 2 * x]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tensor_maps": lambda x: (box_map(0, x, sizes=(36, 21, 1, 1, 1)), box_map(1, x))},
            r"kernel copy_boxes: a tensor map reaches 3024 bytes into buffer 0, which has 2880",
        ),
        (
            {"tensor_maps": lambda x: (box_map(0, x), box_map(2, x))},
            "a tensor map of buffer 2, but there are 2 inputs, outputs and workspaces",
        ),
        (
            {"tensor_maps": lambda x: box_map(0, x)},
            r"takes 4 parameters \(const float\*, float\*, tilekern::TensorMap, "
            r"tilekern::TensorMap\), but the call passes 3: .*, tensor map 0\.",
        ),
        ({"batch_axis": "z"}, "has tensor maps and batch_axis='z': a tensor map is of one array"),
    ],
)
def test_tensor_maps_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        lowered(copy_boxes(**change), struct((20, 36)))


# -- What is said of a kernel


def test_explain(rng):
    kernel = multiply_add()
    x = struct((1000,))

    def function(x):
        return kernel(x, x, a=2.0) + kernel(x, x, a=3.0)

    with jtk.gpu_target("sm_90a"):
        choices = jtk.explain(function, x, platform="cuda")
        (batched,) = jtk.explain(
            jax.vmap(functools.partial(kernel, a=2.0)), *[struct((7, 5))] * 2, platform="cuda"
        )
    for choice, a in zip(choices, (2.0, 3.0), strict=True):
        assert choice.call == f"cuda_kernel multiply_add a={a}"
        assert choice.kernel == "multiply_add<float>"
        assert choice.operands == ("f32[1000]", "f32[1000]")
        assert choice.result == "f32[1000]"
        assert re.fullmatch(
            r"\d+ registers, 0 bytes spilled, 0 bytes of stack, 0 bytes of shared memory, "
            r"16 blocks per SM \(100% of its warps, limited by threads\)",
            choice.reason,
        )
    assert batched.reason.endswith(", 7 launches")
    with jtk.gpu_target("sm_90a"):
        equal = jtk.explain(lambda x: twice()(x) + twice()(x), x, platform="cuda")
        same = twice()
        repeated = jtk.explain(lambda x: same(x) + same(x), x, platform="cuda")
        (empty,) = jtk.explain(twice(), struct((0,)), platform="cuda")
    assert repeated == equal
    assert len(equal) == 2
    assert (empty.kernel, empty.reason) == (None, "its outputs have no elements")
    assert "multiply_add<float>" in str(choices)
    (choice,) = jtk.explain(squares(), x, platform="cpu")
    assert choice.kernel is None
    assert choice.reason.startswith("its reference: no CUDA here")
    assert choice.result == "f32[1000], i32[1000]"


# -- The headers

EVERY_HEADER = r"""
#include <tilekern/convert.cuh>
#include <tilekern/types.cuh>
#include <tilekern/view.cuh>

__global__ void widen(const tilekern::TYPE* x, float* out, long long rows, long long columns) {
  const tilekern::View<const tilekern::TYPE, 2> from{x, {rows, columns}};
  const tilekern::View<float, 2> to{out, {rows, columns}};
  const int row = blockIdx.x, column = threadIdx.x;
  if (to.contains(1, column)) to[row](column) = tilekern::to_float(from(row, column));
}

template <typename T>
__global__ void narrow(const float* x, T* out) {
  out[threadIdx.x] = tilekern::from_float<T>(x[threadIdx.x]);
}
"""


def widen(dtype, **changes):
    name = jtk.cxx_type(dtype).removeprefix("tilekern::")
    settings = {
        "name": "widen",
        "out": lambda x: struct(x.shape),
        "grid": lambda x: x.shape[0],
        "block": 64,
        "scalars": lambda x: tuple(np.int64(size) for size in x.shape),
        "options": f"-DTYPE={name}",
        "reference": lambda x: x.astype(np.float32),
    }
    return jtk.cuda_kernel(EVERY_HEADER, **{**settings, **changes})


def narrow(dtype, **changes):
    settings = {
        "name": f"narrow<{jtk.cxx_type(dtype)}>",
        "out": lambda x: struct(x.shape, dtype),
        "grid": 1,
        "block": lambda x: x.size,
        "options": "-DTYPE=bfloat16",
        "reference": lambda x: x.astype(dtype),
    }
    return jtk.cuda_kernel(EVERY_HEADER, **{**settings, **changes})
