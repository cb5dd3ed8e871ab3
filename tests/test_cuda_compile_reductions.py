"""The kernels that add up rows and columns compile to what their plans assume."""

import numpy as np
import pytest
from nvrtc_mark import require_nvrtc
from products import BF16, F16, F32, F64, INT8, INT32, product_of

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gemm.vector_product import SUM_DTYPES, vector_product_candidate
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.grouped_gemm.expert_rows import ExpertRows, plan_combine, plan_spread
from jax_tilekern.plans.launch import Buffer
from jax_tilekern.plans.reduction.problem import SummedDims
from jax_tilekern.plans.reduction.select import sum_candidate

require_nvrtc()

ARCHS = ("sm_80", "sm_90a", "sm_120a")
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
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.one_in(9)
def test_compiles_to_what_the_plan_assumes(arch, group):
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


@pytest.mark.parametrize("arch", ARCHS)
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
