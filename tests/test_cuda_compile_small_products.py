"""Kernels of small products compile for every architecture, without spills."""

import random

import pytest
from nvrtc_mark import require_nvrtc
from small_products import SIZES, SIZES_ACROSS_K, TYPES, random_product

from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.gemm.small.candidates import small_candidates
from jax_tilekern.plans.gpu import known_gpu

require_nvrtc()

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_120")
TILES = 2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES + SIZES_ACROSS_K, ids=str)
@pytest.mark.one_in(60)
def test_kernels_compile(types, sizes, rng):
    numbers = random.Random(int(rng.integers(2**32)))
    # float8 takes sm_89.
    arch = numbers.choice(ARCHS[1:] if types[0].startswith("float8") else ARCHS)
    gpu = known_gpu(arch)
    with gpu_target(gpu):
        product, *_ = random_product(numbers, types, sizes, most_matrices=1)
    found = small_candidates(product, gpu)
    for candidate in numbers.sample(found, min(TILES, len(found))):
        (launch,) = candidate.plan(gpu).launches
        assert launch.entry.spill_bytes == launch.entry.stack_bytes == 0, candidate.key
