"""``cuda_kernel`` on a GPU: what runs is what was asked for, and what goes wrong is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import BF16, assert_equal, on_gpu, poison, whole

import jax_tilekern as jtk
from jax_tilekern.plans.gpu import current_gpu

if not on_gpu():
    pytest.skip("launches kernels, and JAX has no GPU here", allow_module_level=True)

from test_cuda_kernel import (
    blocks_of_first,
    copy_boxes,
    count_up,
    detour,
    difference,
    linear_twice,
    multiply_add,
    narrow,
    operations,
    scale_columns,
    size_of_first,
    squares,
    struct,
    twice,
    widen,
)
from test_cuda_launch import in_a_new_process, thunks_in_command_buffers

needs_hopper = pytest.mark.skipif(
    current_gpu().compute_capability < (9, 0), reason="clusters and tensor maps take sm_90"
)


# -- What runs


def test_the_kernel_runs_and_not_the_reference(rng):
    x = whole(rng, 1000)
    kernel = twice(reference=lambda x: 3 * x)
    assert_equal(kernel(x), 2 * x)
    assert_equal(jax.jit(jax.vmap(kernel))(x[None]), 2 * x[None])
    (choice,) = jtk.explain(kernel, x)
    assert choice.kernel == "twice"
    assert kernel.report(x).arch == current_gpu().arch


@pytest.mark.parametrize("batch_axis", [None, "y"])
def test_large_batches(rng, batch_axis):
    """More launches than a graph of a few, and more blocks than are resident."""
    kernel = scale_columns(batch_axis)
    x, y = whole(rng, 700, 3, 129), whole(rng, 5, 129)
    got = jax.jit(jax.vmap(jax.vmap(kernel, (0, None)), (None, 0)))(x, y)
    assert_equal(got, x[None] * y[:, None, None])


def test_workspaces_of_a_batch_do_not_mix(rng):
    """Elements of one launch run at the same time."""
    x = whole(rng, 2000, 300)
    for batch_axis in (None, "z"):
        poison((2000, 300), np.float32)
        got = jax.jit(jax.vmap(detour(batch_axis)))(x)
        assert_equal(got, 2 * x[:, ::-1])


@needs_hopper
@pytest.mark.parametrize("shape", [(8, 32), (20, 36), (3, 4), (513, 1028)])
def test_tensor_maps(rng, shape):
    """Boxes beyond the edges bring zeros, and what is stored there is left out."""
    run = jax.jit(copy_boxes())
    for _ in range(3):
        x = whole(rng, *shape)
        poison(shape, np.float32)
        assert_equal(run(x), x)
    xs = whole(rng, 3, 5, *shape)
    assert_equal(jax.jit(jax.vmap(jax.vmap(copy_boxes())))(xs), xs)
    debugged = jax.vmap(copy_boxes(debug=True))
    assert_equal(debugged(xs[0]), xs[0])


@needs_hopper
def test_clusters(rng):
    source = r"""
    #include <tilekern/cluster.cuh>
    __global__ void ranks(int* out) {
      tilekern::cluster_sync();
      if (threadIdx.x == 0) out[blockIdx.x] = tilekern::cluster_cta_rank();
    }
    """
    ranks = jtk.cuda_kernel(source, out=struct((12,), np.int32), grid=12, block=32, cluster=4)
    np.testing.assert_array_equal(jax.jit(ranks)(), np.arange(12) % 4)


SCALARS = r"""
struct Pair { int first; double second; };
__global__ void numbers(double* out, bool a, signed char b, unsigned short c, int d, long long e,
                        float f, double g, Pair h) {
  const double all[] = {double(a), double(b), double(c), double(d), double(e), double(f), g,
                        double(h.first), h.second};
  for (int i = 0; i < 9; ++i) out[i] = all[i];
}
"""


def test_scalars_of_every_kind(x64):
    pair = np.array((-5, 1e300), np.dtype([("first", "i4"), ("second", "f8")], align=True))[()]
    kernel = jtk.cuda_kernel(
        SCALARS, out=struct((9,), np.float64), grid=1, block=1,
        scalars=(np.bool_(True), np.int8(-3), np.uint16(65535), np.int32(-(2**31)),
                 np.int64(2**53), np.float32(1.5), np.float64(1e-300), pair),
    )  # fmt: skip
    expected = [1, -3, 65535, -(2**31), 2**53, 1.5, 1e-300, -5, 1e300]
    np.testing.assert_array_equal(jax.jit(kernel)(), expected)


def test_every_element_type(rng, x64):
    source = r"""
    #include <tilekern/types.cuh>
    template <typename T>
    __global__ void copy(const T* x, T* out) { out[threadIdx.x] = x[threadIdx.x]; }
    """
    copy = jtk.cuda_kernel(
        source, name=lambda x: f"copy<{jtk.cxx_type(x.dtype)}>", out=lambda x: x, grid=1,
        block=lambda x: x.size,
    )  # fmt: skip
    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 "
    for name in (names + "float64 complex64 complex128 float8_e4m3fn float8_e5m2").split():
        dtype = jnp.dtype(name)
        x = np.frombuffer(rng.bytes(50 * dtype.itemsize), dtype)
        if name == "bool":
            x = rng.integers(0, 2, 50).astype(bool)
        got = np.asarray(copy(jnp.asarray(x)))
        assert got.dtype == dtype
        assert got.tobytes() == x.tobytes()


# -- Buffers


def test_in_place(rng):
    """A donated input is the output; one that is not is copied first, and stays what it was."""
    values = rng.integers(0, 100, 5000, np.int32)
    run = jax.jit(count_up(), donate_argnums=0)
    given = jnp.asarray(values) + 0
    address = given.unsafe_buffer_pointer()
    got = run(given)
    assert got.unsafe_buffer_pointer() == address
    assert given.is_deleted()
    np.testing.assert_array_equal(got, values + 1)
    kept = jnp.asarray(values)
    for _ in range(2):
        np.testing.assert_array_equal(jax.jit(count_up())(kept), values + 1)
        np.testing.assert_array_equal(kept, values)


def test_in_place_in_a_loop_without_copies(rng):
    x = jnp.asarray(rng.integers(0, 100, 5000, np.int32))
    run = jax.jit(lambda x: lax.fori_loop(0, 100, lambda _, x: count_up()(x), x), donate_argnums=0)
    text = run.lower(x).compile().as_text()
    body = text[: text.index("ENTRY")]
    assert "custom-call" in body
    assert not re.search(r"= s32\[5000\]\S* copy\(", body), text
    expected = np.asarray(x) + 100
    np.testing.assert_array_equal(run(x), expected)


def test_in_place_and_vmapped(rng):
    xs, y = whole(rng, 50, 300), whole(rng, 300)
    for debug in (False, True):
        kernel = difference(aliases={1: 0}, debug=debug)
        assert_equal(jax.jit(jax.vmap(kernel, (0, None)))(xs, y), 2 * xs - y)
        assert_equal(jax.jit(jax.vmap(kernel))(xs, xs + 1), xs - 1)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (2, None), (0, 1)])
def test_the_compiled_program_copies_nothing_but_moved_axes(axes):
    shapes = [(3, 64), (64,)]
    args = [
        struct(shape) if axis is None else struct((*shape[:axis], 5, *shape[axis:]))
        for shape, axis in zip(shapes, axes, strict=True)
    ]
    text = jax.jit(jax.vmap(scale_columns(), axes)).lower(*args).compile().as_text()
    names = re.findall(r"= \S+ ([a-z-]+)\(", text)
    assert names.count("custom-call") == 1, text
    moved = {"copy", "broadcast", "pad", "concatenate"} & set(names)
    # A layout may be changed by a copy or by a transpose.
    assert not moved or (any(axis for axis in axes) and moved == {"copy"}), text


# -- CUDA graphs

_REPLAY = """
import jax, numpy as np
from test_cuda_kernel_gpu import chain, expected_of_chain
run = jax.jit(chain)
rng = np.random.default_rng(0)
alive = []
for i in range(8):
    x = jax.device_put(rng.integers(-8, 9, (6, 64)).astype(np.float32))
    # Some buffers come again, some are new, and some lie where another was.
    alive.append((x, run(x)))
    alive.append((x, run(x)))
    if i % 3 == 2:
        del alive[::2]
for x, y in alive:
    np.testing.assert_array_equal(y, expected_of_chain(np.asarray(x)))
print("right")
"""


def chain(x):
    """Calls with repeats, in place, with a workspace and in the grid, between XLA's fusions."""
    x = jax.vmap(twice())(x) - 1
    x = count_up()(x.astype(np.int32)).astype(np.float32)
    x = jax.vmap(detour("z"))(x) * 0.5
    return scale_columns()(x, x[0] + 1)


def expected_of_chain(x):
    x = (2 * x - 1 + 1)[:, ::-1]
    return x * (x[0] + 1)


def test_replayed_from_a_command_buffer(tmp_path):
    process = in_a_new_process(
        _REPLAY,
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path}",
        # The dump is made by a compilation.
        JAX_ENABLE_COMPILATION_CACHE="false",
    )
    assert process.stdout.endswith("right\n")
    (file,) = tmp_path.glob("*jit_chain*thunk_sequence_after_thunk_passes*.txt")
    recorded = thunks_in_command_buffers(file.read_text())
    assert recorded.count("kCustomCall") == 4, file.read_text()


# -- Derivatives


def test_training_step_through_kernels(rng):
    kernel = linear_twice()
    x = whole(rng, 16, 300)

    def loss(x):
        return (jax.vmap(kernel)(x) ** 2).sum()

    assert_equal(jax.jit(jax.grad(loss))(x), 8 * x)
    assert_equal(jax.jit(jax.jvp, static_argnums=0)(loss, (x,), (x,))[1], 8 * (x * x).sum())


# -- debug=True


def test_debug_passes_what_is_right(rng):
    x, y = whole(rng, 3, 300), whole(rng, 300)
    xs = whole(rng, 7, 3, 300)
    kernel = scale_columns(debug=True)
    assert_equal(jax.jit(kernel)(x, y), x * y)
    assert_equal(jax.jit(jax.vmap(kernel, (0, None)))(xs, y), xs * y)
    assert_equal(jax.jit(jax.vmap(scale_columns("y", debug=True), (0, None)))(xs, y), xs * y)
    assert_equal(squares(debug=True)(x), (x * x, (x < 0).astype(np.int32)))
    assert_equal(multiply_add(debug=True)(x, x, a=2.0), 3 * x)
    integers = x.astype(np.int32)
    for _ in range(2):
        # Run twice for the checks, and counted up once.
        assert_equal(jax.jit(count_up(debug=True))(integers), integers + 1)
        assert_equal(jax.jit(jax.vmap(count_up(debug=True)))(integers), integers + 1)
        donated = jax.jit(count_up(debug=True), donate_argnums=0)
        assert_equal(donated(integers + 0), integers + 1)
    assert_equal(detour(debug=True)(y), 2 * y[::-1])
    assert_equal(jax.vmap(detour("z", debug=True))(x), 2 * x[:, ::-1])
    # A written byte may well be what the output was filled with, once.
    every_byte = jnp.arange(256, dtype=np.uint8)
    source = "__global__ void copy(const char* x, char* out) { out[threadIdx.x] = x[threadIdx.x]; }"
    copy = jtk.cuda_kernel(source, out=lambda x: x, grid=1, block=256, debug=True)
    assert_equal(copy(every_byte), every_byte)


UNWRITTEN = r"""
// Leaves out every element whose index is 3 more than a multiple of `step`.
__global__ void leaves_out(const float* x, short* all, float* out, int size, int step) {
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    all[i] = 7;
    if (i % step != 3) out[i] = x[i];
  }
}
"""


def leaves_out(step, **changes):
    settings = {
        "out": lambda x: (struct(x.shape, np.int16), x),
        "grid": 1,
        "block": 64,
        "scalars": lambda x: (np.int32(x.size), np.int32(step)),
        "debug": True,
    }
    return jtk.cuda_kernel(UNWRITTEN, **{**settings, **changes})


def test_debug_names_what_was_not_written(rng):
    x = whole(rng, 10, 10)
    message = (
        r"leaves_out(?s:.*) with grid \(1, 1, 1\), block \(64, 1, 1\)(?s:.*): 14 of 100 elements "
        r"of output 1 were not written, the first at index 3 of the flattened array"
    )
    for run in (leaves_out(7), jax.jit(leaves_out(7))):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(run(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="70 of 500 elements of output 1"):
        jax.block_until_ready(jax.vmap(leaves_out(7))(whole(rng, 5, 10, 10)))
    # Without the checks nothing is said, and after an error everything works.
    jax.block_until_ready(leaves_out(7, debug=False)(x))
    assert_equal(leaves_out(1000, debug=True)(x[0, :3])[1], x[0, :3])


def test_debug_sees_an_element_of_which_a_part_was_written():
    source = "__global__ void half(void* out) { static_cast<short*>(out)[2 * threadIdx.x] = 1; }"
    half = jtk.cuda_kernel(source, out=struct((5,), np.int32), grid=1, block=5, debug=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="5 of 5 elements of output 0"):
        jax.block_until_ready(half())


def test_debug_does_not_know_of_aliases_what_was_written(rng):
    """An element that an in-place kernel leaves alone has the input's value, and is right."""
    source = "__global__ void first(int* x, int* out) { out[0] = -1; }"
    first = jtk.cuda_kernel(source, out=lambda x: x, grid=1, block=1, aliases={0: 0}, debug=True)
    x = whole(rng, 30, dtype=np.int32)
    assert_equal(jax.jit(first)(x), x.at[0].set(-1))


def test_debug_takes_the_handler_that_waits(rng):
    x = whole(rng, 300)
    text = jax.jit(lambda x: twice(debug=True)(twice(debug=True)(x))).lower(x).as_text()
    assert "jax_tilekern_cuda_launch_checked" in text
    assert operations(text) == {"custom_call"}


# What ends the GPU's context, and with it the process's use of the GPU.

_CRASH = """
import jax, jax.numpy as jnp, numpy as np, test_cuda_kernel_gpu as t
x = jnp.arange(100, dtype=np.float32)
try:
    jax.block_until_ready(getattr(t, {name!r})(debug={debug})(x))
except jax.errors.JaxRuntimeError as error:
    print("ERROR", error, flush=True)
import ctypes, os
ctypes.CDLL(None).fflush(None)
os._exit(0)  # what is left of the context cannot be taken down in order
"""


def beyond_a_view(debug):
    source = r"""
    #include <tilekern/view.cuh>
    __global__ void beyond_a_view(const float* x, float* out, long long size) {
      const tilekern::View<const float, 2> from{x, {size / 10, 10}};
      const tilekern::View<float, 1> to{out, {size}};
      const int i = threadIdx.x;
      to(i) = from(i / 10, i % 10 + (i == 49));
    }
    """
    return jtk.cuda_kernel(
        source, out=lambda x: x, grid=1, block=lambda x: x.size, scalars=size_of_first, debug=debug
    )


def beyond_memory(debug):
    source = r"""
    __global__ void beyond_memory(const float* x, float* out, long long size) {
      out[threadIdx.x + (1ll << 38)] = x[threadIdx.x];
    }
    """
    return jtk.cuda_kernel(
        source, out=lambda x: x, grid=blocks_of_first, block=64, scalars=size_of_first, debug=debug
    )


def crash(name, debug):
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", _CRASH.format(name=name, debug=debug)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_debug_finds_an_index_out_of_a_view_s_bounds():
    process = crash("beyond_a_view", True)
    said = process.stdout + process.stderr
    # The kernel's own message, and the driver's for an assertion, which one of them may lose.
    where = r"index 10 of dimension 1 is out of bounds: its size is 10 \(block 0 0 0, thread 49 0 0"
    assert re.search(rf"{where}|index out of bounds of a tilekern::View", said), said
    assert re.search(r"ERROR (?s:.*)launch plan beyond_a_view (?s:.*)CUDA_ERROR_ASSERT", said), said


def test_a_view_is_not_checked_without_debug():
    process = crash("beyond_a_view", False)
    assert process.returncode == 0, process.stderr
    assert "ERROR" not in process.stdout


def test_debug_names_the_kernel_of_an_illegal_access():
    process = crash("beyond_memory", True)
    assert re.search(
        r"ERROR (?s:.*)launch plan beyond_memory (?s:.*)CUDA_ERROR_ILLEGAL_ADDRESS", process.stdout
    ), process.stdout + process.stderr


# -- The headers


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_conversions_of_every_value(rng, dtype, debug):
    """All 65,536 bit patterns to float, exactly, and back."""
    bits = np.arange(65_536, dtype=np.uint16).view(dtype).reshape(1024, 64)
    expected = bits.astype(np.float32)
    got = np.asarray(widen(dtype, debug=debug)(jnp.asarray(bits)))
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])
    back = jax.vmap(narrow(dtype, debug=debug))(got)
    np.testing.assert_array_equal(np.asarray(back).astype(np.float32), expected)
    random = rng.integers(0, 2**32, (64, 1024), np.uint32).view(np.float32)
    random = np.where(np.isnan(random), np.float32(1), random)
    with np.errstate(over="ignore"):
        rounded = random.astype(dtype)
    got = np.asarray(jax.vmap(narrow(dtype, debug=debug))(random))
    np.testing.assert_array_equal(got.astype(np.float32), rounded.astype(np.float32))
