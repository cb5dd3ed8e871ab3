"""Plans for products of small matrices on ``gemm/small/small_matmul.cuh``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.candidate import CostedCandidate, Family
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.candidates import refusal
from jax_tilekern.plans.gemm.small.config import FRAGMENT_M, FRAGMENT_N, SmallInstance, SmallTile
from jax_tilekern.plans.gemm.small.cost import small_cycles
from jax_tilekern.plans.gpu import Gpu, power_of_two
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, NoKernel

# 8-bit floats that are promoted have no kernel here, but those that are widened need none.
_ARITHMETICS = ("bf16", "f16", "tf32", "f32", "f64", "int8", "fp8", "fp8_fast")
_ALIGNMENT = 16
# Larger matrices are what the other kernels are for.
_MOST_MULTIPLY_ADDS = 1 << 24
# Fragments of a CTA along m and n, at most, and the accumulators of a thread.
_FRAGMENTS_M, _FRAGMENTS_N = (1, 2, 4, 8, 24), (1, 2, 4, 8, 16, 64)
_MOST_FRAGMENTS_OF_A_WARP = 16
# Bytes of k of a step of most types.
_STEP_BYTES = 32
_WARPS = (1, 2, 4, 8)
# Smaller tiles than a whole matrix are for products that leave SMs idle otherwise.
_CTAS_OF_AN_SM = 4


@dataclass(frozen=True)
class SmallCandidate(CostedCandidate):
    """A tile for a product, not compiled yet.

    Attributes
    ----------
    instance
        The kernel and its sizes.
    cycles
        The estimated cost.
    """

    instance: SmallInstance
    cycles: float

    @property
    def key(self) -> str:
        """The kernel and its tile."""
        return f"small {self.instance.tile}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        instance = self.instance
        product = instance.product
        compiled = compile_kernels(instance.kernel, arch=gpu.arch)
        launch = Launch(
            entry=compiled.entry(instance.kernel.name),
            grid=(instance.ctas, 1, 1),
            block=(instance.tile.threads, 1, 1),
            parameters=(Buffer(0), Buffer(1), Buffer(2)),
            shared_memory_bytes=instance.shared_memory_bytes,
        )
        stages = "" if instance.stages == 1 else f", {instance.stages} stages of {instance.chunk_k}"
        sms = gpu.available_sms
        return LaunchPlan(
            name=f"small_matmul {product.arithmetic}",
            gpu=gpu,
            launches=(launch,),
            alignments=(_ALIGNMENT,) * 3,
            reason=f"{instance.tile} warps, {instance.ctas} tiles on {sms} SMs{stages}",
        )


def small_candidates(product: Product, gpu: Gpu) -> list[SmallCandidate] | NoKernel:
    """Return a candidate for each tile that the product can have, or why there is none."""
    geometry = product.geometry
    if product.epilogue is not None:
        return NoKernel("kernels of small products have no epilogue")
    refused = refusal(product, gpu) or _float8_refusal(product, gpu)
    if refused:
        return refused
    if geometry.without_unit_stride:
        return NoKernel(geometry.without_unit_stride)
    if geometry.m * geometry.n * geometry.k > _MOST_MULTIPLY_ADDS:
        return NoKernel("the matrices are too large for kernels of small products")
    found = []
    for tile in _tiles(product, gpu.available_sms):
        instance = SmallInstance.of(product, tile, gpu)
        if instance.ctas <= MAX_GRID[0] and instance.shared_memory_bytes <= gpu.shared_memory_bytes:
            found.append(SmallCandidate(instance, small_cycles(instance, gpu)))
    return found or NoKernel("no tile fits")


def _float8_refusal(product: Product, gpu: Gpu) -> NoKernel | None:
    """Return why 8-bit floats have no kernel of small products on a GPU, or ``None``."""
    widened = gpu.compute_capability[0] in (9, 10, 11)
    if product.arithmetic == "fp8" and not widened:
        return NoKernel(f"kernels of small products do not promote float8 on {gpu.arch}")
    return None


def _tiles(product: Product, sm_count: int) -> Iterator[SmallTile]:
    """Yield tiles of a product, and for each the warps that share it."""
    geometry = product.geometry
    all_m = math.ceil(geometry.m / FRAGMENT_M)
    all_n = math.ceil(geometry.n / FRAGMENT_N)
    steps = math.ceil(geometry.k * product.lhs_dtype.itemsize / _STEP_BYTES)
    most = _MOST_FRAGMENTS_OF_A_WARP // (2 if product.arithmetic == "f64" else 1)
    matrices = math.prod(geometry.batch)
    found: dict[SmallTile, None] = {}
    for tile_m in sorted({min(x, all_m) for x in _FRAGMENTS_M}):
        for tile_n in sorted({min(x, all_n) for x in _FRAGMENTS_N}):
            ctas = matrices * math.ceil(all_m / tile_m)
            if tile_n < min(all_n, _FRAGMENTS_N[-1]) and ctas >= _CTAS_OF_AN_SM * sm_count:
                continue
            for warps in _WARPS:
                warps_m = min(power_of_two(math.ceil(tile_m / 2)), warps)
                fragments_m = math.ceil(tile_m / warps_m)
                least_n = math.ceil(tile_n / max(most // fragments_m, 1))
                warps_n = min(power_of_two(least_n), warps // warps_m)
                fragments_n = math.ceil(tile_n / warps_n)
                warps_k = min(warps // (warps_m * warps_n), power_of_two(steps))
                if fragments_m * fragments_n <= most:
                    tile = SmallTile(fragments_m, fragments_n, warps_m, warps_n, warps_k)
                    found[tile] = None
    yield from found


SMALL = Family(_ARITHMETICS, small_candidates)
