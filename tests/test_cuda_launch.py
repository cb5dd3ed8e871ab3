"""The launch path on a GPU: what a plan says is what runs, and what cannot run is an error."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import hashlib
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import compile_source
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numerics import BF16
from nvrtc_mark import require_gpu

import jax_tilekern as jtk
from jax_tilekern.interop import ffi
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import (
    Buffer,
    Launch,
    LaunchPlan,
    Scalars,
    TensorMap,
    overlapping,
)

require_gpu()

# -- Kernels, exact in 32-bit integers that wrap.

KERNELS = """
#include <tilekern/ptx.cuh>
using u32 = unsigned;

struct Affine { u32 scale; long long shift; u32 flip; };

__global__ void affine(const u32* x, u32* y, Affine f, u32 n) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = (x[i] * f.scale + u32(f.shift)) ^ f.flip;
}

// Prefix sums by three launches, which may overlap: within blocks, over the sums of blocks, and
// both together. The first two take so long that a launch that did not wait would read too early.
__device__ void delay() {
  for (long long end = clock64() + 30000; clock64() < end;) {}
}
__global__ void block_sums(const u32* x, u32* sums, u32 n) {
  tilekern::launch_dependents();
  delay();
  u32 sum = 0;
  for (u32 i = blockIdx.x * 256; i < n && i < (blockIdx.x + 1) * 256; ++i) sum += x[i];
  sums[blockIdx.x] = sum;
}
__global__ void offsets(const u32* sums, u32* before, u32 blocks) {
  tilekern::launch_dependents();
  tilekern::wait_for_prerequisites();
  delay();
  u32 sum = 0;
  for (u32 i = 0; i < blocks; sum += sums[i++]) before[i] = sum;
}
__global__ void prefix_sums(const u32* x, const u32* before, u32* y, u32 n) {
  tilekern::wait_for_prerequisites();
  u32 sum = before[blockIdx.x];
  for (u32 i = blockIdx.x * 256; i < n && i < (blockIdx.x + 1) * 256; ++i) y[i] = sum += x[i];
}

__global__ void reverse(const u32* x, u32* y, u32 n) {
  extern __shared__ u32 tile[];
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[i];
  __syncthreads();
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) y[i] = tile[n - 1 - i];
}
"""

HOPPER_KERNELS = """
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

__global__ void take_map(const __grid_constant__ TensorMap map, unsigned* y) {
  if (threadIdx.x == 0) y[0] = unsigned(map.opaque[0]);
}
"""

HOPPER = current_gpu().compute_capability >= (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="clusters and tensor maps take sm_90")


def compiled(name):
    source = KERNELS if f"void {name}(" in KERNELS else HOPPER_KERNELS
    return compile_source(source, [name], arch=current_gpu().arch)


def launch(name, grid, block, *parameters, **rest):
    return Launch(compiled(name).entry(name), grid, (block, 1, 1), parameters, **rest)


def plan_of(*launches, name="test", alignments=(4, 4), **rest):
    return LaunchPlan(name, current_gpu(), launches, alignments, **rest)


def runner(plan, shape=None):
    """Return a function of one array of uint32 that executes ``plan`` for one such result."""
    primitive = Primitive(f"launch_{plan.name}")
    primitive.def_abstract_eval(lambda x: jax.core.ShapedArray(shape or x.shape, np.dtype("u4")))
    rule = functools.partial(_emit, plan)
    mlir.register_lowering(primitive, rule, platform="cuda")
    return primitive.bind


def _emit(plan, ctx, x):
    return ffi.cuda_launch(ctx, [x], plan)


def affine_plan(n, scale=3, shift=-7, flip=0x55, **rest):
    function = Scalars.pack("IqI", scale, shift, flip)
    parameters = (Buffer(0), Buffer(1), function, Scalars.pack("I", n))
    return plan_of(launch("affine", (-(-n // 128), 1, 1), 128, *parameters), **rest)


def affine(x, scale=3, shift=-7, flip=0x55):
    return (x * np.uint32(scale) + np.uint32(shift % 2**32)) ^ np.uint32(flip)


def integers(rng, *shape):
    return rng.integers(0, 2**32, shape, np.uint32)


# -- What a plan can say


def test_offset_into_a_buffer(rng):
    x = integers(rng, 1000)
    function = Scalars.pack("IqI", 1, 1, 0)
    parameters = (Buffer(0, 4 * 600), Buffer(1), function, Scalars.pack("I", 400))
    plan = plan_of(launch("affine", (4, 1, 1), 128, *parameters))
    np.testing.assert_array_equal(jax.jit(runner(plan, (400,)))(x), x[600:] + np.uint32(1))


def prefix_sums_plan(n, overlaps=False, branches=False):
    blocks, count = -(-n // 256), Scalars.pack("I", n)
    launches = (
        launch("block_sums", (blocks, 1, 1), 1, Buffer(0), Buffer(2), count),
        launch("offsets", (1, 1, 1), 1, Buffer(2), Buffer(3), Scalars.pack("I", blocks)),
        launch("prefix_sums", (blocks, 1, 1), 1, Buffer(0), Buffer(3), Buffer(1), count),
    )
    launches = overlapping(current_gpu(), *launches) if overlaps else launches
    if branches:
        sums, offsets, prefixes = launches
        # Beside the first branch, the result is filled. The second ends with the plan.
        filled = affine_plan(n).launches
        branch = functools.partial(dataclasses.replace, branches=True)
        joining = dataclasses.replace(offsets, joins=True)
        launches = (branch(sums), *filled, joining, branch(prefixes))
    return plan_of(*launches, name="prefix_sums", workspace_bytes=(4 * blocks, 4 * blocks))


def check_prefix_sums(rng, plan, n):
    run = jax.jit(runner(plan))
    for _ in range(3):
        x = integers(rng, n)
        np.testing.assert_array_equal(run(x), np.cumsum(x, dtype=np.uint32))


def test_launches_run_in_order_over_workspaces(rng):
    check_prefix_sums(rng, prefix_sums_plan(100_000, overlaps=False), 100_000)


def test_launches_of_a_branch_run_in_order(rng):
    check_prefix_sums(rng, prefix_sums_plan(100_000, branches=True), 100_000)


@needs_hopper
def test_overlapping_launches_wait_for_each_other(rng):
    check_prefix_sums(rng, prefix_sums_plan(100_000, overlaps=True), 100_000)


@needs_hopper
def test_overlapping_launches_of_a_branch(rng):
    plan = prefix_sums_plan(100_000, overlaps=True)
    branch = tuple(dataclasses.replace(one, branches=True) for one in plan.launches)
    check_prefix_sums(rng, dataclasses.replace(plan, launches=branch), 100_000)


def test_all_of_the_shared_memory(rng):
    """Beyond 48 KB a function opts in, and call sites that share it want different sizes."""
    most = current_gpu().shared_memory_bytes
    for size in (40 << 10, most, 64 << 10, 1 << 10):
        x = integers(rng, size // 4)
        parameters = (Buffer(0), Buffer(1), Scalars.pack("I", x.size))
        one = launch("reverse", (1, 1, 1), 256, *parameters, shared_memory_bytes=size)
        np.testing.assert_array_equal(jax.jit(runner(plan_of(one)))(x), x[::-1])


@needs_hopper
def test_48_kb_of_dynamic_shared_memory_beside_static_one(rng):
    x = rng.integers(-(2**15), 2**15, (3, 10_080), np.int16)
    np.testing.assert_array_equal(jax.jit(jtk.sort)(x), np.sort(x))


# -- Command buffers: XLA records a run of launches as a CUDA graph, and replays it. Since XLA does
# so when it makes the thunks, the HLO does not show it; the dump of the thunks does, and the log.

_REPLAY = """
import pathlib, sys
import jax, numpy as np, pytest
import jax_tilekern as jtk
from test_cuda_launch import chain, expected_of_chain
jtk.policy("kernels").__enter__()
run = jax.jit(chain)
rng = np.random.default_rng(0)
alive = []
for i in range(8):
    x = jax.device_put(rng.integers(0, 2**32, (64, 64), np.uint32))
    # Some buffers come again, some are new, and some lie where another was.
    alive.append((x, run(x)))
    alive.append((x, run(x)))
    if i % 3 == 2:
        del alive[::2]
for x, y in alive:
    np.testing.assert_array_equal(y, expected_of_chain(np.asarray(x)))
for folder in sys.argv[1:]:
    with jax.profiler.trace(folder):
        for _ in range(3):
            run(x).block_until_ready()
    for file in pathlib.Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                print(*(event.name for event in line.events), sep="\\n")
print("right")
"""


def chain(x):
    """Launches of the test, some overlapping or branching, and a product between XLA's fusions."""
    run = runner(affine_plan(64 * 64))
    for step in range(3):
        x = run(x ^ (x >> 3)) + np.uint32(step)
    x = runner(prefix_sums_plan(64 * 64, overlaps=HOPPER))(x)
    x = runner(prefix_sums_plan(64 * 64, branches=True))(x)
    narrow = (x & 15).astype(np.int8)
    return jtk.matmul(narrow, narrow, preferred_element_type=np.int32) + x.astype(np.int32)


def expected_of_chain(x):
    for step in range(3):
        x = affine(x ^ (x >> np.uint32(3))) + np.uint32(step)
    for _ in range(2):
        x = np.cumsum(x, dtype=np.uint32).reshape(x.shape)
    narrow = (x & 15).astype(np.int32)
    return narrow @ narrow + x.astype(np.int32)


def in_a_new_process(code, *args, **environment):
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    process = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process


def test_replayed_from_a_command_buffer(tmp_path):
    environment = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path}",
        "TF_CPP_VMODULE": "command_buffer_thunk=3",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        # The dump is made by a compilation.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    process = in_a_new_process(_REPLAY, **environment)
    assert process.stdout.endswith("right\n")
    (file,) = tmp_path.glob("*jit_chain*thunk_sequence_after_thunk_passes*.txt")
    recorded = thunks_in_command_buffers(file.read_text())
    assert recorded.count("kCustomCall") == 6, file.read_text()
    # XLA's fusions between the calls; their thunks' name differs between versions.
    assert sum(name.endswith("Kernel") for name in recorded) >= 3, file.read_text()
    # Recorded is not yet run: the first time, and while a profiler looks on, the thunks may run one
    # by one. XLA's log says what ran; where it is silent, the profiler does, told to let graphs be.
    replays = re.findall(r"Execute command buffer(?! thunk as)", process.stderr)
    if not replays:
        environment["XLA_FLAGS"] += " --xla_enable_command_buffers_during_profiling=true"
        process = in_a_new_process(_REPLAY, str(tmp_path / "trace"), **environment)
        replays = re.findall(r"command_buffer::execute|GraphLaunch", process.stdout)
    assert replays, process.stderr[-4000:]


def thunks_in_command_buffers(dump):
    """Kinds of the thunks that are indented below a command buffer."""
    kinds, below = [], None
    for line in dump.splitlines():
        found = re.match(r"(\s*)\d+: (k\w+)", line)
        if not found:
            continue
        indent, kind = len(found[1]), found[2]
        if below is not None and indent <= below:
            below = None
        if below is not None:
            kinds.append(kind)
        elif kind == "kCommandBuffer":
            below = indent
    return kinds


# -- What cannot run


def other_arch():
    """An architecture whose cubins this GPU does not run."""
    return "sm_90" if current_gpu().compute_capability[0] == 8 else "sm_80"


def wrong_entry(plan):
    (one,) = plan.launches
    entry = dataclasses.replace(one.entry, symbol="absent")
    return dataclasses.replace(plan, launches=(dataclasses.replace(one, entry=entry),))


def with_cubin(plan, cubin):
    (one,) = plan.launches
    entry = dataclasses.replace(one.entry, cubin=cubin)
    return dataclasses.replace(plan, launches=(dataclasses.replace(one, entry=entry),))


def damaged_cubin(plan):
    cubin = plan.launches[0].entry.cubin
    return with_cubin(plan, cubin[:64] + bytes(len(cubin) - 64))


def cubin_of_another_gpu(plan):
    other = compile_source(KERNELS, ["affine"], arch=other_arch())
    return with_cubin(plan, other.entry("affine").cubin)


def misaligned_buffer(plan):
    return dataclasses.replace(plan, alignments=(2**40, 4))


def too_much_shared_memory(plan):
    # For a GPU that has it, or the plan itself would refuse.
    gpu = dataclasses.replace(plan.gpu, shared_memory_bytes=2**30)
    (one,) = plan.launches
    one = dataclasses.replace(one, shared_memory_bytes=2**29)
    return dataclasses.replace(plan, gpu=gpu, launches=(one,))


def offset_beyond_the_buffer(plan):
    (one,) = plan.launches
    parameters = (Buffer(0, 2**40), *one.parameters[1:])
    return dataclasses.replace(plan, launches=(dataclasses.replace(one, parameters=parameters),))


def still_right(rng):
    x = integers(rng, 1000)
    np.testing.assert_array_equal(jax.jit(runner(affine_plan(1000)))(x), affine(x))
    np.testing.assert_array_equal(jax.jit(lambda x: x * 3 + 1)(x), x * np.uint32(3) + np.uint32(1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_entry, "cuModuleGetFunction of absent: CUDA_ERROR_NOT_FOUND"),
        (damaged_cubin, "cuModule.*: CUDA_ERROR"),
        (cubin_of_another_gpu, "cuModuleLoadData of [0-9]+ bytes: CUDA_ERROR"),
        (misaligned_buffer, "the address of buffer 0 is [0-9]+ bytes past a multiple of 10995"),
        (
            too_much_shared_memory,
            r"kernel _Z6affine\w+ with grid \(8, 1, 1\), block \(128, 1, 1\), "
            r"cluster \(1, 1, 1\) and 536870912 bytes of dynamic shared memory: .*CUDA_ERROR",
        ),
        (
            offset_beyond_the_buffer,
            r"kernel _Z6affine\w+ with grid .*: parameter 0: offset 1099511627776 into 4000 bytes "
            "of buffer 0",
        ),
    ],
)
def test_driver_errors_are_exceptions(rng, damage, message):
    plan = damage(affine_plan(1000, name=damage.__name__))
    x = jnp.asarray(integers(rng, 1000))
    run = jax.jit(runner(plan))
    for _ in range(2):
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=rf"launch plan {damage.__name__} \({plan.gpu.arch}\)(?s:.*){message}",
        ):
            jax.block_until_ready(run(x))
        still_right(rng)


@needs_hopper
@pytest.mark.parametrize(("rows", "offset"), [(38, 0), (37, 208)])
def test_a_tensor_map_beyond_the_buffer_is_an_error(rng, rows, offset):
    source = TensorMap(0, "int32", (52, rows), (208,), (32, 16), offset_bytes=offset)
    one = launch("take_map", (2, 3, 1), 32, source, Buffer(1))
    plan = plan_of(one, alignments=(16, 4))
    x = jnp.asarray(integers(rng, 37, 52))
    message = "take_map.*a tensor map reaches 7904 bytes into 7696 of buffer 0"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(runner(plan, (48, 64)))(x))
    still_right(rng)


# -- Threads, donation, lifetimes


def in_threads(work, count=8):
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_threads_share_an_executable(rng):
    run = jax.jit(runner(affine_plan(5000)))
    inputs = [integers(rng, 5000) for _ in range(8)]

    def work(thread):
        return [np.asarray(run(inputs[(thread + i) % 8])) for i in range(50)]

    for thread, results in enumerate(in_threads(work)):
        for i, got in enumerate(results):
            np.testing.assert_array_equal(got, affine(inputs[(thread + i) % 8]))


def test_threads_with_executables_of_their_own(rng):
    """All of one cubin, compiled, run and dropped while others run."""
    x = integers(rng, 5000)
    lasting = jax.jit(runner(affine_plan(5000)))

    def work(thread):
        results = []
        for i in range(5):
            run = jax.jit(runner(affine_plan(5000, scale=10 * thread + i)))
            results.append((np.asarray(run(x)), np.asarray(lasting(x))))
            del run
            gc.collect()
        return results

    for thread, results in enumerate(in_threads(work)):
        for i, (own, shared) in enumerate(results):
            np.testing.assert_array_equal(own, affine(x, scale=10 * thread + i))
            np.testing.assert_array_equal(shared, affine(x))


def test_last_executable_of_a_cubin_goes_and_another_comes(rng):
    x = integers(rng, 1000)
    # A cubin that no other test has, so that its module is unloaded and loaded again.
    source = KERNELS + "// here and gone\n__global__ void unused_elsewhere() {}\n"
    cubin = compile_source(source, ["affine"], arch=current_gpu().arch).entry("affine").cubin
    for scale in range(5):
        plan = with_cubin(affine_plan(1000, scale), cubin)
        run = jax.jit(runner(plan)).lower(x).compile()
        np.testing.assert_array_equal(run(x), affine(x, scale))
        del run
        gc.collect()


# -- Export: what runs needs no compiler.

_IMPORTED = """
import sys
import jax
from jax_tilekern.compilation import compiler
from jax_tilekern.compilation import nvrtc

def none(*args, **kwargs):
    raise nvrtc.NvrtcNotFound("there is none in this test")
nvrtc.nvrtc = nvrtc._load = compiler.nvrtc = none

import hashlib
import numpy as np
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
a, b = np.load(sys.argv[2]).values()
print(*(hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in exported.call(a, b)))
assert not compiler._memory._slots
"""


def test_exported_program_runs_without_a_compiler(rng, tmp_path):
    def products(a, b):
        value, pullback = jax.vjp(jtk.matmul, a, b)
        return value, *pullback(value)

    a = rng.standard_normal((130, 200)).astype(np.float32)
    b = rng.standard_normal((200, 70)).astype(np.float32)
    run = jax.jit(products)
    exported = jax.export.export(run, platforms=["cuda"], disabled_checks=jtk.export_checks())(a, b)
    assert ffi.CUDA_LAUNCH in str(exported.mlir_module())
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "operands.npz", a=a, b=b)
    process = in_a_new_process(_IMPORTED, str(tmp_path / "program"), str(tmp_path / "operands.npz"))
    expected = [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in run(a, b)]
    assert process.stdout.split() == expected


# -- The same bits every time

_DIGESTS = """
import json
import jax_tilekern as jtk
from test_cuda_launch import digests

with jtk.policy("kernels"):
    print(json.dumps(digests(1)))
"""


def digests(runs):
    """Digests of products, by what they are; with more than one run all must be equal."""
    rng = np.random.default_rng(0)
    found = {}
    for dtype, precision in ((BF16, None), (np.float16, None), (np.float32, None),
                             (np.float32, "highest")):  # fmt: skip
        for m, n, k in ((257, 511, 1025), (512, 512, 4096), (3, 1000, 777)):
            a = jnp.asarray(rng.standard_normal((m, k)).astype(dtype))
            b = jnp.asarray(rng.standard_normal((k, n)).astype(dtype))
            run = jax.jit(functools.partial(jtk.matmul, precision=precision))
            results = {hashlib.sha256(np.asarray(run(a, b)).tobytes()).hexdigest()
                       for _ in range(runs)}  # fmt: skip
            assert len(results) == 1, (dtype, precision, m, n, k)
            found[f"{np.dtype(dtype)} {precision} {m}x{n}x{k}"] = results.pop()
    return found


def test_results_are_the_same_in_every_run_and_process():
    here = digests(100)
    assert len(here) == 12
    for _ in range(2):
        assert json.loads(in_a_new_process(_DIGESTS).stdout) == here


# -- More than 2**31 elements. In .ci/gpu, which knows their names, a process of their own.


@pytest.fixture
def room():
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < 14 << 30:
        pytest.skip(f"takes 14 GB of GPU memory, and JAX may use {limit >> 30}")
    yield
    gc.collect()


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("order", ["mk", "km"])
def test_operand_of_more_than_2_to_the_31_elements(rng, order):
    m, k, n = 70_000, 32_768, 8
    assert m * k > 2**31
    shape = tuple({"m": m, "k": k}[x] for x in order)

    def element(i, j):
        # No two rows or columns alike, and exact in bfloat16.
        return ((i * 131 + j * 71 + (i >> 8) * (j & 15)) % 257 - 128) / 128

    @jax.jit
    def make():
        i = lax.broadcasted_iota(np.int32, shape, order.index("m"))
        j = lax.broadcasted_iota(np.int32, shape, order.index("k"))
        return element(i, j).astype(BF16)

    rhs = rng.integers(-4, 5, (k, n)).astype(BF16)
    dims = (((order.index("k"),), (0,)), ((), ()))
    run = jax.jit(lambda a, b: jtk.dot_general(a, b, dims, preferred_element_type=np.float32))
    got = np.asarray(run(make(), rhs))
    # Row 65,536 starts at element 2**31 of the k-major operand.
    rows = np.array([0, 1, 30_000, 65_535, 65_536, 65_537, m - 129, m - 2, m - 1])
    lhs = element(rows[:, None], np.arange(k)[None]).astype(np.float64)
    right = rhs.astype(np.float64)
    error = np.abs(got[rows] - lhs @ right)
    # Sums of k products in float32, in any order; see numerics.error_bound.
    bound = 4 * np.sqrt(k + 1) * 2.0**-24 * (np.abs(lhs) @ np.abs(right))
    assert (error <= bound).all(), error.max()
    (choice,) = jtk.explain(run, jax.ShapeDtypeStruct(shape, BF16), rhs)
    assert choice.kernel is not None


@pytest.mark.usefixtures("room")
def test_result_of_more_than_2_to_the_31_elements(rng):
    m, n, k = 46_500, 46_500, 16
    assert m * n > 2**31
    a = rng.integers(-128, 128, (m, k), np.int8)
    b = rng.integers(-128, 128, (k, n), np.int8)

    @jax.jit
    def product(a, b):
        return jtk.matmul(a, b, preferred_element_type=np.int32)

    @jax.jit
    def look(out):
        middle = 2**31 // n
        corners = out[:3, :5], out[middle - 1 : middle + 2], out[-3:, -5:]
        return *corners, out.sum(1), out.sum(0)

    out = product(a, b)
    first, middle, last, over_columns, over_rows = map(np.asarray, look(out))
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    row = 2**31 // n
    np.testing.assert_array_equal(first, wide_a[:3] @ wide_b[:, :5])
    np.testing.assert_array_equal(middle, wide_a[row - 1 : row + 2] @ wide_b)
    np.testing.assert_array_equal(last, wide_a[-3:] @ wide_b[:, -5:])
    # Every element is in one sum along each dimension, which is exact modulo 2**32.
    np.testing.assert_array_equal(over_columns, (wide_a @ wide_b.sum(1)).astype(np.int32))
    np.testing.assert_array_equal(over_rows, (wide_a.sum(0) @ wide_b).astype(np.int32))
    (choice,) = jtk.explain(product, a, b)
    assert choice.kernel is not None
