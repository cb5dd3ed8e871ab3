"""Kernels compile, for every architecture, to what their plans assume."""

import itertools
import random
import re
import struct
from collections import Counter

import numpy as np
import pytest
from compiled_text import compile_source
from kernel_samples import (
    grouped_mma_instances,
    grouped_wgmma_instances,
    mma_instances,
    scaled_wgmma_instances,
    symmetric_instances,
    wgmma_instances,
)
from nvrtc_mark import require_nvrtc
from products import BF16, F16, F32, F64, H100, INT8, INT32, product_of
from selection import covering
from small_products import SIZES, SIZES_ACROSS_K, TYPES, random_product

from jax_tilekern.compilation.compiler import (
    compile_kernels,
    compile_to_ptx,
    cuda_folder,
)
from jax_tilekern.compilation.nvrtc import nvrtc
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gemm.sm90.emulated import emulated_candidates
from jax_tilekern.plans.gemm.small.candidates import small_candidates
from jax_tilekern.plans.gemm.vector_product import SUM_DTYPES, vector_product_candidate
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.grouped_gemm.expert_rows import ExpertRows, plan_combine, plan_spread
from jax_tilekern.plans.grouped_gemm.sm80.candidates import grouped_kernel
from jax_tilekern.plans.launch import Buffer
from jax_tilekern.plans.reduction.problem import SummedDims
from jax_tilekern.plans.reduction.select import sum_candidate

require_nvrtc()

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_120a")
# Which differ in the instructions, and not only in the shared memory.
RAGGED_ARCHS = ("sm_80", "sm_90a", "sm_120a")
# One kernel of each kind and types is compiled for these.
FURTHER_ARCHS = ("sm_103a", "sm_110a", "sm_121a")

# The low 12 bits of an instruction, the same on all of these architectures.
OPCODES = {0x23C: "HMMA", 0x237: "IMMA", 0x23F: "DMMA", 0x27A: "QMMA", 0x223: "FFMA", 0x83B: "LDSM"}
# The warpgroup MMAs, with lhs in shared memory and in registers.
OPCODES |= {0x9F0: "HGMMA", 0x9F1: "IGMMA", 0x9F3: "QGMMA"}
OPCODES |= {0xDF0: "HGMMA", 0xDF1: "IGMMA", 0xDF3: "QGMMA"}
# griddepcontrol.launch_dependents and griddepcontrol.wait.
OPCODES |= {0x82D: "PREEXIT", 0x82E: "ACQBULK"}


def _types(instance):
    return "-".join(name.removeprefix("tilekern::") for name in instance.types)


def _name(arch, instance):
    lhs, rhs = ("NT"[operand.k_major] for operand in (instance.lhs, instance.rhs))
    tile = f"{instance.tile.block_m}x{instance.tile.block_n}x{instance.stages}"
    loads = instance.lhs.load_bytes
    return f"{arch}-{instance.family}-{_types(instance)}-{tile}-{lhs}{rhs}{loads}"


def _cases():
    yield from _cases_of(ARCHS, RAGGED_ARCHS)
    for arch in FURTHER_ARCHS:
        of_kind = {}
        for case in _cases_of((arch,), (arch,)):
            _, kernel, instance = case.values
            kind = kernel.name.partition("<")[0], instance.family, instance.types
            of_kind.setdefault(kind, case)
        yield from of_kind.values()


def _cases_of(archs, ragged_archs):
    for arch in archs:
        for instance in dict.fromkeys(mma_instances(known_gpu(arch))):
            # sm_89 adds float8 to the instructions of sm_80.
            if arch == "sm_89" and "float8" not in instance.types[0]:
                continue
            yield pytest.param(arch, instance.kernel, instance, id=_name(arch, instance))
    for arch in ragged_archs:
        for instance, ragged in dict.fromkeys(grouped_mma_instances(known_gpu(arch))):
            kernel = grouped_kernel(instance, ragged)
            name = f"{_name(arch, instance)}-ragged_{ragged}"
            yield pytest.param(arch, kernel, instance, id=name)


def _code(cubin, symbol):
    """The kernel's section of machine code."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]
    wanted = f".text.{symbol}".encode() + b"\0"
    for name, offset, length in headers:
        if cubin.startswith(wanted, headers[names_index][1] + name):
            return cubin[offset : offset + length]
    raise AssertionError(f"no {wanted} in the cubin")


def _instructions(cubin, symbol):
    code = _code(cubin, symbol)
    opcodes = (struct.unpack_from("<H", code, at)[0] & 0xFFF for at in range(0, len(code), 16))
    return Counter(OPCODES[opcode] for opcode in opcodes if opcode in OPCODES)


def _expected(instance, arch):
    """The instruction that multiplies, and how often it stands in the loop over k."""
    tile = instance.tile
    if instance.family == "simt":
        return "FFMA", 8 * 8 * instance.block_k
    itemsize = 128 // instance.block_k
    warp_m, warp_n = tile.block_m // tile.warps_m, tile.block_n // tile.warps_n
    products = (warp_m // 16) * (warp_n // 8) * 128 // (64 if itemsize == 8 else 32)
    if itemsize == 8:
        return "DMMA", products * (1 if arch == "sm_90a" else 4)
    if instance.widen:
        return "HMMA", products * 2
    if "float8" in instance.types[0]:
        return "QMMA", products
    return ("IMMA" if itemsize == 1 else "HMMA"), products


def _features(arch, kernel, instance):
    """The architecture, the kernel's template and the value of each template argument."""
    yield from (arch, kernel.name.partition("<")[0])
    yield from vars(instance).items()


@pytest.mark.parametrize(("arch", "kernel", "instance"), covering(_cases(), _features))
@pytest.mark.one_in(24)
def test_compiles_to_what_the_plan_assumes(arch, kernel, instance):
    compiled = compile_kernels(kernel, arch=arch)
    entry = compiled.entry(kernel.name)
    assert compiled.log == ""
    # ptxas spills a few words of a few instances on some architectures; that of CUDA 13.0 on more.
    spills = "ragged" in kernel.name and arch in ("sm_103a", "sm_110a")
    old = arch in ("sm_120a", "sm_121a") and nvrtc().version < (13, 5)
    assert entry.spill_bytes <= (64 if spills or old else 0)
    assert entry.stack_bytes <= (64 if spills or old else 0)
    assert entry.max_threads == instance.tile.threads
    assert entry.shared_memory_bytes == 0
    # Registers are handed out to warps in units of 8 a thread.
    registers = -(-entry.registers // 8) * 8 * instance.tile.threads
    assert registers * instance.min_blocks <= 65536

    found = _instructions(entry.cubin, entry.symbol)
    instruction, count = _expected(instance, arch)
    # Exactly the loop's: nothing is unrolled twice, emulated or left out.
    assert found[instruction] == count
    itemsize = 128 // instance.block_k
    uses_ldmatrix = instance.family == "mma" and (
        itemsize == 2 or (itemsize < 8 and (instance.lhs.k_major or instance.rhs.k_major))
    )
    assert (found["LDSM"] > 0) == uses_ldmatrix


def _wgmma_instances():
    gpu = known_gpu("sm_90a")
    yield from wgmma_instances(gpu)
    yield from grouped_wgmma_instances(gpu)
    yield from symmetric_instances(gpu)
    yield from scaled_wgmma_instances(gpu)
    # Split-float16 emulation, with TMA stores and with stores of single elements.
    for n in (4096, 4097):
        product = product_of("f32", 4096, n, 4096)
        yield from (candidate.instance for candidate in emulated_candidates(product, gpu))


def _wgmma_cases():
    for instance in dict.fromkeys(_wgmma_instances()):
        tile = f"{instance.block_m}x{instance.block_n}x{instance.stages}"
        who = f"{instance.consumers}{'together' if instance.cooperative else 'in_turns'}"
        orders = "".join("NT"[k_major] for k_major in (instance.lhs_k_major, instance.rhs_k_major))
        out = "m" * instance.out_m_major + ("boxes" if instance.tma_store else "single")
        extra = f"x{instance.cluster}{'-promote' * instance.promote}"
        if instance.ragged:
            extra += f"-ragged_{instance.ragged}"
        extra += "-symmetric" * instance.symmetric
        if instance.scaled_columns is not None:
            extra += "-scales" + "_of_columns" * instance.scaled_columns
        if instance.parts > 1:
            extra += f"-{instance.parts}parts"
        name = f"{_types(instance)}-{tile}-{who}-{orders}-{out}-{extra}"
        yield pytest.param(instance, id=name)


def _expected_wgmma(instance):
    """The instruction that multiplies, and how often it may stand in the kernel."""
    itemsize = 128 // instance.block_k
    lhs_in_registers = not instance.lhs_k_major and itemsize != 2
    row_blocks = instance.block_m // (instance.consumers if instance.cooperative else 1) // 64
    parts = range(instance.parts)
    orders = sum(i + j < instance.parts for i in parts for j in parts)
    # Two k-tiles and the odd last one, where registers come in two sets (kSlots); elsewhere the
    # compiler may unroll by itself.
    two_sets = lhs_in_registers and itemsize == 1 and not instance.promote
    if "float8" in instance.types[0]:
        instruction = "QGMMA"
    else:
        instruction = "IGMMA" if itemsize == 1 else "HGMMA"
    once = 4 * row_blocks * orders
    counts = [3 * once] if two_sets else [once, 3 * once]
    if instance.ragged == "n":
        # A loop for each number of columns.
        counts = [count * (instance.block_n // instance.column_step) for count in counts]
    if instance.ragged == "k":
        # The first k-tile, from each of its MMA k-steps on.
        counts = [(4 + 3 + 2 + 1) * row_blocks + count for count in counts]
    return instruction, counts


def _wgmma_features(instance):
    """The value of each template argument."""
    return vars(instance).items()


@pytest.mark.parametrize("instance", covering(_wgmma_cases(), _wgmma_features))
@pytest.mark.one_in(12)
def test_compiles_to_warpgroup_products_that_run_in_the_background(instance):
    kernel = instance.kernel
    compiled = compile_kernels(kernel, arch="sm_90a")
    entry = compiled.entry(kernel.name)
    # ptxas would report that it serializes MMAs.
    assert compiled.log == ""
    assert entry.spill_bytes == entry.stack_bytes == 0
    assert entry.max_threads == instance.threads
    assert entry.shared_memory_bytes == 0
    assert -(-entry.registers // 8) * 8 * instance.threads <= 65536

    found = _instructions(entry.cubin, entry.symbol)
    instruction, counts = _expected_wgmma(instance)
    products = {name: found[name] for name in ("HGMMA", "IGMMA", "QGMMA") if name in found}
    assert list(products) == [instruction]
    assert products[instruction] in counts


def _best(candidates):
    return min(candidates, key=lambda candidate: candidate.cycles).plan(H100)


def _wgmma(arithmetic, m, n, k):
    return _best(wgmma_candidates(product_of(arithmetic, m, n, k), H100))


# Plans, and which of their launches overlap with the one before.
OVERLAPS = {
    "split-K": (lambda: _wgmma("bf16", 64, 1000, 16384), (False, True)),
    "packed, split-K": (lambda: _wgmma("bf16", 64, 1000, 16383), (False, False, True)),
    "packed": (lambda: _wgmma("bf16", 517, 1019, 1023), (False, False, False)),
    "int8 split-K": (lambda: _wgmma("int8", 64, 1024, 65536), (False, False)),
    "emulated": (
        lambda: _best(emulated_candidates(product_of("f32", 64, 64, 64), H100)),
        (False, True, True, True, True),
    ),
}


@pytest.mark.parametrize(("plan", "overlaps"), OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.one_in(3)
def test_overlapping_launches_wait(plan, overlaps):
    launches = plan().launches
    assert tuple(launch.overlaps for launch in launches) == overlaps
    for before, launch in itertools.pairwise(launches):
        if launch.overlaps:
            assert _instructions(before.entry.cubin, before.entry.symbol)["PREEXIT"] == 1
            assert _instructions(launch.entry.cubin, launch.entry.symbol)["ACQBULK"] >= 1


ARCHS_OF_SUMS = ("sm_80", "sm_90a", "sm_120a")
SUMS = [(F32, F32), (BF16, BF16), (INT8, INT32)]
INT64 = np.dtype(np.int64)
UINT8, UINT64 = np.dtype(np.uint8), np.dtype(np.uint64)
OTHER_SUMS = [
    (F16, F32), (F16, F64), (F32, F64), (F64, F64), (np.dtype(bool), INT32), (UINT8, UINT8),
    (INT8, INT64), (np.dtype(np.int16), INT32), (INT32, INT64), (np.dtype(np.uint32), UINT64),
    (INT64, INT64), (np.dtype(np.complex64), np.dtype(np.complex64)),
]  # fmt: skip
# Vector and element loads.
SHAPES = [((512, 8192), (0,)), ((8192, 512), (1,)), ((512, 513), (0,))]
MATRICES = [(8192, 8192), (513, 513)]


def sums(gpu, types, shapes):
    for dtype, out in types:
        for shape, axes in shapes:
            yield from sum_candidate(SummedDims.of(shape, axes), dtype, out, gpu).passes


def products(gpu):
    for arithmetic in ("f32", "bf16", "f16", "f64", "int8"):
        assert arithmetic in SUM_DTYPES
        for n, k in MATRICES[: 2 if arithmetic in ("bf16", "int8") else 1]:
            for k_major in (True, False):
                product = product_of(arithmetic, 1, n, k, rhs_k_major=k_major)
                yield from vector_product_candidate(product, gpu).passes


GROUPS = {
    "sums": lambda gpu: sums(gpu, SUMS, SHAPES),
    "other_sums": lambda gpu: sums(gpu, OTHER_SUMS, SHAPES[:2]),
    "products": products,
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("arch", ARCHS_OF_SUMS)
@pytest.mark.one_in(9)
def test_sums_compile_to_what_the_plan_assumes(arch, group):
    kernels = {step.kernel: step for step in GROUPS[group](known_gpu(arch))}
    compiled = compile_kernels(*kernels, arch=arch)
    assert compiled.log == ""
    for kernel, step in kernels.items():
        entry = compiled.entry(kernel.name)
        assert entry.spill_bytes == entry.stack_bytes == 0, kernel.name
        assert entry.max_threads == 256
        # Registers are handed out to warps in units of 8 a thread. An SM holds two CTAs at least.
        assert -(-entry.registers // 8) * 8 * 256 * 2 <= 65536, kernel.name
        # The launch checks itself against the kernel's parameters.
        assert step.launch(compiled, *map(Buffer, range(3))).grid == (step.ctas, 1, 1)


@pytest.mark.parametrize("arch", ARCHS_OF_SUMS)
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
@pytest.mark.one_in(6)
def test_rows_of_experts(arch, dtype):
    for columns in (2048, 33):
        rows = ExpertRows(16384, 8, 131072, columns, dtype)
        sums = [plan_combine(rows, arrays, known_gpu(arch)) for arrays in (1, 2)]
        for plan in (plan_spread(rows, known_gpu(arch)), *sums):
            (entry,) = (launch.entry for launch in plan.launches)
            assert entry.spill_bytes == entry.stack_bytes == 0, entry
            assert entry.registers <= 64


ARCHS_OF_SMALL_PRODUCTS = ("sm_80", "sm_89", "sm_90", "sm_120")
TILES = 2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES + SIZES_ACROSS_K, ids=str)
@pytest.mark.one_in(60)
def test_small_products_compile(types, sizes, rng):
    numbers = random.Random(int(rng.integers(2**32)))
    # float8 takes sm_89.
    arch = numbers.choice(
        ARCHS_OF_SMALL_PRODUCTS[1:] if types[0].startswith("float8") else ARCHS_OF_SMALL_PRODUCTS
    )
    gpu = known_gpu(arch)
    with gpu_target(gpu):
        product, *_ = random_product(numbers, types, sizes, most_matrices=1)
    found = small_candidates(product, gpu)
    for candidate in numbers.sample(found, min(TILES, len(found))):
        (launch,) = candidate.plan(gpu).launches
        assert launch.entry.spill_bytes == launch.entry.stack_bytes == 0, candidate.key


def test_all_headers_can_be_included_together():
    folder = cuda_folder()
    headers = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.cuh"))
    source = "".join(f'#include "{header}"\n' for header in headers)
    compiled = compile_source(f"{source}__global__ void nothing() {{}}", ["nothing"], arch="sm_90a")
    assert compiled.log == ""
    assert len(headers) > 50


def _instance(instances, cluster):
    return next(
        instance
        for instance in instances
        if (instance.block_m, instance.block_n, instance.cluster) == (128, 256, cluster)
        and instance.types[2] == "tilekern::bfloat16"
        and instance.tma_store
    )


def test_dense_gemm_compiles_with_a_dynamic_tile_scheduler():
    static = _instance(wgmma_instances(H100), 1).kernel
    name = static.name.replace("wgmma_matmul<", "wgmma_matmul_dynamic<")
    source = '#include "gemm/sm90/dynamic_matmul.cuh"\n'
    compiled = compile_source(source, [name], arch="sm_90a")
    (entry,) = compiled.entries
    # ptxas would tell of MMAs that wait for each other.
    assert compiled.log == ""
    assert entry.spill_bytes == entry.stack_bytes == 0
    assert -(-entry.registers // 8) * 8 * entry.max_threads <= 65536
    # The counter of claimed tiles comes before the shape.
    assert entry.parameter_bytes == (128, 128, 128, 8, 8, 112)


@pytest.fixture(scope="module")
def ptx_of_clusters():
    kernel = _instance(grouped_wgmma_instances(H100), 2).kernel
    ptx = compile_to_ptx(kernel, arch="sm_90a")
    return ptx[ptx.index("ragged_wgmma_matmul") :]


def test_a_fence_follows_all_initialised_barriers(ptx_of_clusters):
    inits = [found.start() for found in re.finditer(r"mbarrier\.init", ptx_of_clusters)]
    fences = re.finditer(r"fence\.mbarrier_init\.release\.cluster", ptx_of_clusters)
    # Those of the pipeline, and three kinds of the ring of work tiles.
    assert len(inits) > 9
    assert max(inits) < max(fence.start() for fence in fences)


def test_warps_converge_before_the_last_barrier_of_a_cluster(ptx_of_clusters):
    end = ptx_of_clusters.rindex("barrier.cluster.arrive.release.aligned")
    before = ptx_of_clusters[:end].splitlines()[-4:]
    assert any("bar.warp.sync" in line for line in before)
