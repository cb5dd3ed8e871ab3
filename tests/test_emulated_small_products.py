"""Kernels of small products compiled as C++ for the CPU: values without a GPU."""

import random

import numpy as np
import pytest
from emulated import COMPILER, build, output_of
from small_products import ACROSS_K, SIZES, SIZES_ACROSS_K, SPECS, TYPES, bound, random_product

from jax_tilekern.plans.gemm.small.candidates import small_candidates
from jax_tilekern.plans.gpu import gpu_target, known_gpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")
FILES = (
    "types.cuh", "ptx.h", *(f"gemm/small/{name}.cuh" for name in
    ("config", "rows", "fragments", "arithmetic", "small_matmul")),
)  # fmt: skip
# Types whose elements are packed to words.
PACKED = [types for types in TYPES if types[0] not in ("float32", "float64")]
# Emulation takes a millisecond and more for a CTA.
MOST_CTAS = 64


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.one_in(17)
def test_kernels_compute_the_product(types, sizes, rng, tmp_path):
    _check_product(types, sizes, rng, tmp_path, SPECS)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", SIZES_ACROSS_K, ids=str)
@pytest.mark.parametrize("types", PACKED, ids=str)
@pytest.mark.one_in(13)
def test_kernels_pack_elements_across_k(types, sizes, rng, tmp_path):
    _check_product(types, sizes, rng, tmp_path, ACROSS_K)


def _check_product(types, sizes, rng, tmp_path, specs):
    numbers = random.Random(int(rng.integers(2**32)))
    # The emulated MMAs do not multiply float8, which is widened on sm_90.
    arches = ("sm_90",) if types[0].startswith("float8") else ("sm_80", "sm_90")
    gpu = known_gpu(numbers.choice(arches))
    with gpu_target(gpu):
        product, operands, exact, scale = random_product(numbers, types, sizes, 3, specs)
    found = small_candidates(product, gpu)
    few = [candidate for candidate in found if candidate.instance.ctas <= MOST_CTAS]
    candidate = numbers.choice(few or sorted(found, key=lambda x: x.instance.ctas)[:1])
    instance = candidate.instance
    program = build("small_matmul", FILES, tmp_path, f"-DKERNEL={instance.kernel.name}")
    files = [tmp_path / name for name in ("lhs", "rhs", "out")]
    poison = b"\xff" * (exact.size * product.out_dtype.itemsize)
    contents = (*(np.asarray(x).tobytes() for x in operands), poison)
    for file, data in zip(files, contents, strict=True):
        file.write_bytes(data)
    output_of(program, instance.ctas, instance.tile.threads, instance.shared_memory_bytes, *files)
    got = np.frombuffer(files[-1].read_bytes(), product.out_dtype).reshape(exact.shape)
    error = np.linalg.norm(got.astype(np.float64) - exact) / scale
    assert error <= bound(product), (candidate.key, product)
