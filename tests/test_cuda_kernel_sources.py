"""What ``cuda_kernel`` takes besides CUDA C++ alone: folders of headers, PTX and cubins."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nvrtc_mark import needs_gpu, require_nvrtc

import jax_tilekern as jtk
from jax_tilekern.compilation import nvjitlink
from jax_tilekern.compilation.nvrtc import toolkit_folders

require_nvrtc()

SCALED = r"""
__global__ void __launch_bounds__(128) scaled(const float* x, float* out, float a, int size) {
  __shared__ float staged[128];
  const int i = blockIdx.x * 128 + threadIdx.x;
  staged[threadIdx.x] = i < size ? x[i] : 0;
  __syncthreads();
  if (i < size) out[i] = a * staged[threadIdx.x ^ 1];
}
"""
X = jax.ShapeDtypeStruct((1000,), np.float32)


def scaled(source, **settings):
    """A kernel that swaps neighbours and doubles them."""
    return jtk.cuda_kernel(
        source,
        out=lambda x: x,
        grid=lambda x: -(-x.size // 128),
        block=128,
        scalars=lambda x: (np.float32(2), np.int32(x.size)),
        reference=lambda x: 2 * x.reshape(-1, 2)[:, ::-1].reshape(-1),
        **settings,
    )


def has_nvjitlink():
    try:
        nvjitlink._load()
    except nvjitlink.NvJitLinkNotFound:
        return False
    return True


needs_nvjitlink = pytest.mark.skipif(not has_nvjitlink(), reason="there is no nvJitLink")


def in_toolkit(name):
    return any(os.path.isfile(f"{folder}/{name}") for folder in toolkit_folders())


@pytest.fixture(scope="module")
def compiled():
    """The kernel by NVRTC."""
    return scaled(SCALED).report(X, gpu="sm_90")


# -- Folders of headers


@pytest.fixture
def library(tmp_path):
    """A header-only library whose headers include their neighbours."""
    (tmp_path / "mine/detail").mkdir(parents=True)
    (tmp_path / "mine/scale.cuh").write_text('#pragma once\n#include "detail/factor.cuh"\n')
    (tmp_path / "mine/detail/factor.cuh").write_text(
        "#include <cstdint>\n#include <tilekern/types.cuh>\nconstexpr float kFactor = 2;\n"
    )
    return tmp_path


INCLUDING = r"""
#include <mine/scale.cuh>
__global__ void scaled(const float* x, float* out, float, int) { out[threadIdx.x] = kFactor * *x; }
"""


def test_headers_of_a_folder(library):
    for include in (library, str(library), [library, library / "mine"]):
        kernel = scaled(INCLUDING, include=include)
        first = kernel.report(X, gpu="sm_90")
        assert (
            first.plan.launch.entry.cubin == kernel.report(X, gpu="sm_90").plan.launch.entry.cubin
        )
    (library / "mine/detail/factor.cuh").write_text("constexpr float kFactor = 3;\n")
    second = kernel.report(X, gpu="sm_90")
    assert "0f40400000" in second.ptx()
    assert first.plan.launch.entry.cubin != second.plan.launch.entry.cubin


def test_an_error_in_a_header_names_its_line(library):
    header = library / "mine/detail/factor.cuh"
    header.write_text("\nconstexpr float kFactor = none;\n")
    with pytest.raises(jtk.CompileError, match=rf'{header}\(2\): error: .*"none" is undefined'):
        scaled(INCLUDING, include=library).report(X, gpu="sm_90")


def test_a_header_with_the_name_of_the_librarys(library):
    (library / "types.cuh").write_text("constexpr float kFactor = 3;\n")
    alone = INCLUDING.replace("mine/scale.cuh", "types.cuh")
    assert "0f40400000" in scaled(alone, include=library).report(X, gpu="sm_90").ptx()
    both = "#include <tilekern/convert.cuh>\n" + alone
    with pytest.raises(
        ValueError, match=r"header types.cuh of .* has the name of one of the libra"
    ):
        scaled(both, include=library).report(X, gpu="sm_90")


def test_what_is_no_folder(library):
    with pytest.raises(ValueError, match=r"include: .*scale.cuh is not a folder"):
        scaled(INCLUDING, include=library / "mine/scale.cuh")
    with pytest.raises(jtk.CompileError, match=r"pass the folder of it, include=\.\.\."):
        scaled(INCLUDING, include=library / "mine").report(X, gpu="sm_90")


@pytest.mark.skipif(not in_toolkit("cub/block/block_radix_sort.cuh"), reason="there is no CUB")
def test_a_block_sort_of_cub():
    # libcu++ and the standard headers define some of the same names.
    source = r"""
    #include <cub/block/block_radix_sort.cuh>
    #include <cfloat>
    __global__ void __launch_bounds__(128) scaled(const float* x, float* out, float, int) {
      using Sort = cub::BlockRadixSort<float, 128, 4>;
      __shared__ typename Sort::TempStorage storage;
      float items[4];
      for (int i = 0; i < 4; ++i) items[i] = x[threadIdx.x * 4 + i];
      Sort(storage).Sort(items);
      for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = items[i] + FLT_EPSILON;
    }
    """
    for order in (source, "#include <cfloat>\n" + source):
        report = scaled(order).report(X, gpu="sm_90")
        assert (report.spill_bytes, report.stack_bytes) == (0, 0)


# -- PTX and cubins


def images(compiled, tmp_path):
    """The same kernel as PTX and as a cubin, each as a text or bytes and as a file."""
    ptx, cubin = compiled.ptx(), compiled.plan.launch.entry.cubin
    (tmp_path / "kernels.ptx").write_text(ptx)
    (tmp_path / "kernels.cubin").write_bytes(cubin)
    if has_nvjitlink():
        yield from (ptx, ptx.encode(), tmp_path / "kernels.ptx")
    yield from (cubin, tmp_path / "kernels.cubin")


def test_images_are_what_nvrtc_compiles(compiled, tmp_path):
    wanted = dataclasses.replace(compiled.plan.launch.entry, cubin=b"")
    for source in images(compiled, tmp_path):
        for name in (None, "scaled", "_Z6scaledPKfPffi"):
            report = scaled(source, name=name).report(X, gpu="sm_90")
            entry = dataclasses.replace(report.plan.launch.entry, cubin=b"", name="scaled")
            assert entry == wanted
    # The last is a cubin.
    with pytest.raises(ValueError, match="is a cubin, of which there is no PTX"):
        report.ptx()


def test_images_of_templates_and_several_kernels():
    source = r"""
    template <typename T, int kSize> __global__ void fill(T* out) { *out = kSize; }
    __global__ void other(float* out) {}
    """
    settings = {"out": lambda: X, "grid": 1, "block": 1}
    name = "fill<float, 3>"
    report = jtk.cuda_kernel(source, name=name, **settings).report(gpu="sm_90")
    cubin = report.plan.launch.entry.cubin
    for spelled in (name, "fill<float,3>"):
        jtk.cuda_kernel(cubin, name=spelled, **settings).report(gpu="sm_90")
    with pytest.raises(
        ValueError, match=r"the cubin has 2 kernels \(fill<float,3>, other\)|other, f"
    ):
        jtk.cuda_kernel(cubin, **settings)
    with pytest.raises(jtk.CompileError, match=r"the cubin has no kernel fill<int>, but .*other"):
        jtk.cuda_kernel(cubin, name="fill<int>", **settings).report(gpu="sm_90")
    with pytest.raises(jtk.CompileError, match="the PTX has no kernel fill, and no other"):
        jtk.cuda_kernel(".version 8.0", name="fill", **settings).report(gpu="sm_90")


def test_parameters_of_images_are_checked_without_a_gpu(compiled):
    for source in (compiled.ptx(), compiled.plan.launch.entry.cubin):
        np.testing.assert_array_equal(scaled(source)(jnp.arange(4.0)), [2, 0, 6, 4])
        with pytest.raises(TypeError, match=r"parameter 0 is (float const|const float)\*, but the"):
            scaled(source)(jnp.arange(4))


def test_a_cubin_of_another_gpu(compiled):
    kernel = scaled(compiled.plan.launch.entry.cubin)
    with pytest.raises(ValueError, match="a cubin for sm_90, which a GPU of sm_80 does not run"):
        kernel.report(X, gpu="sm_80")


@needs_nvjitlink
def test_ptx_of_an_older_gpu_and_ptx_that_is_wrong(compiled):
    older = scaled(SCALED).report(X, gpu="sm_80").ptx()
    assert scaled(older).report(X, gpu="sm_90").arch == "sm_90a"
    with pytest.raises(jtk.CompileError, match=r"the PTX for sm_80.*\n.*SM version"):
        scaled(compiled.ptx()).report(X, gpu="sm_80")
    wrong = older.replace("bar.sync", "bar.none")
    with pytest.raises(jtk.CompileError, match=r"line \d+; error"):
        scaled(wrong).report(X, gpu="sm_90")


def test_no_nvjitlink(compiled, monkeypatch):
    monkeypatch.setattr(nvjitlink, "_candidates", lambda: iter([(13, "libnvJitLink.so.none")]))
    nvjitlink._load.cache_clear()
    nvjitlink.nvjitlink_identity.cache_clear()
    with pytest.raises(
        nvjitlink.NvJitLinkNotFound, match=r"pip install nvidia-nvjitlink.* adds it"
    ):
        scaled(compiled.ptx()).report(X, gpu="sm_90")
    nvjitlink._load.cache_clear()
    nvjitlink.nvjitlink_identity.cache_clear()


@pytest.mark.parametrize(
    ("source", "settings", "error", "message"),
    [
        (lambda c: b"GIF89a..", {}, ValueError, r"begins with b'GIF89a\.\.', unlike PTX"),
        (lambda c: 3, {}, TypeError, "a int, not a string, bytes or a pathlib.Path"),
        (lambda c: c.plan.launch.entry.cubin[:200], {}, ValueError, "the cubin is no whole cubin"),
        (lambda c: c.ptx(), {"include": "/tmp"}, ValueError, "PTX is compiled: it takes no head"),
        (lambda c: c.ptx(), {"options": "-DN=1"}, ValueError, "the PTX takes no options"),
        (
            lambda c: c.ptx().replace("{", ".extern .shared .b8 d[];{"),
            {}, ValueError, "give its bytes to shared_memory_bytes",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(compiled, source, settings, error, message):
    with pytest.raises(error, match=message):
        scaled(source(compiled), **settings)(jnp.arange(4.0))


def test_a_file_that_is_neither(tmp_path):
    path = Path(tmp_path / "x.ptx")
    path.write_text("int main() {}")
    with pytest.raises(ValueError, match=r"x\.ptx is neither PTX, which begins with \.version"):
        scaled(path)


@needs_gpu
def test_images_run(tmp_path):
    report = scaled(SCALED).report(X)
    x = np.arange(1000, dtype=np.float32)
    for source in images(report, tmp_path):
        found = jax.jit(scaled(source, name="scaled"))(x)
        np.testing.assert_array_equal(found, 2 * x.reshape(-1, 2)[:, ::-1].reshape(-1))
