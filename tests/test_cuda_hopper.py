"""Hopper's kernels beyond what plans ask for: headers, barriers and the dynamic tile scheduler."""

import re

import pytest
from compiled_text import compile_source
from kernel_samples import grouped_wgmma_instances, wgmma_instances
from nvrtc_mark import require_nvrtc
from products import H100

from jax_tilekern.compilation.compiler import (
    compile_to_ptx,
    cuda_folder,
)

require_nvrtc()


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
