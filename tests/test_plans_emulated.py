"""Plans of float32 products by split-float16 emulation; nothing is launched."""

import pytest
from nvrtc_mark import needs_nvrtc
from plan_buffers import assert_within_buffers
from products import F32, product_of

from jax_tilekern.plans.gemm.sm90.emulated import emulated_candidates
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import TensorMap

GPU = known_gpu("sm_90a")
SIDE = 128 * 46  # 16 rounds of tiles of 128x128 for 132 SMs.


def products_of_parts(plan):
    return [launch for launch in plan.launches if "of_parts" in launch.entry.name]


@needs_nvrtc
@pytest.mark.parametrize("arithmetic", ["f32", "f32_normwise"])
@pytest.mark.parametrize(("k", "parts"), [(8192, 1), (8200, 2), (24000, 3)])
@pytest.mark.one_in(3)
def test_a_long_k_is_in_parts(arithmetic, k, parts):
    product = product_of(arithmetic, SIDE, SIDE, k, types=(F32, F32, F32))
    for candidate in emulated_candidates(product, GPU):
        plan = candidate.plan(GPU)
        assert len(products_of_parts(plan)) == parts
        assert (f"{parts} parts of k" in plan.reason) == (parts > 1)
        sizes = [4 * SIDE * k, 4 * SIDE * k, 4 * SIDE * SIDE, *plan.workspace_bytes]
        assert_within_buffers(plan, sizes)
        # Each begins where the part before it ends, and all but the first add what is there.
        size = -(-k // parts // 64) * 64
        offsets = [
            {p.offset_bytes for p in launch.parameters if isinstance(p, TensorMap) and p.buffer > 2}
            for launch in products_of_parts(plan)
        ]
        assert offsets == [{2 * size * part} for part in range(parts)]
        outputs = [
            sum(getattr(p, "index", getattr(p, "buffer", None)) == 2 for p in launch.parameters)
            for launch in products_of_parts(plan)
        ]
        assert all(more > outputs[0] for more in outputs[1:])
        names = [launch.entry.name for launch in products_of_parts(plan)]
        assert len(set(names)) == min(parts, 2)
        assert names[1:] == names[-1:] * (parts - 1)
