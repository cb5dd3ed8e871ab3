"""Every kind of matmul kernel compiles, for every architecture, to what its plan assumes."""

import itertools
import struct
from collections import Counter

import pytest
from kernel_samples import (
    grouped_mma_instances,
    grouped_wgmma_instances,
    mma_instances,
    scaled_wgmma_instances,
    symmetric_instances,
    wgmma_instances,
)
from nvrtc_mark import require_nvrtc
from products import H100, product_of
from selection import covering

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.compilation.nvrtc import nvrtc
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gemm.sm90.emulated import emulated_candidates
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.grouped_gemm.sm80.candidates import grouped_kernel

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

require_nvrtc()


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
