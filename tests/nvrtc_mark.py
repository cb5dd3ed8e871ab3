"""Skips tests that compile CUDA kernels without NVRTC, and those that run them without a GPU."""

import pytest
from numerics import on_gpu

from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc

try:
    nvrtc()
    has_nvrtc = True
except NvrtcNotFound:
    has_nvrtc = False
NO_NVRTC, NO_GPU = "there is no NVRTC", "launches kernels, and JAX has no GPU here"
needs_nvrtc = pytest.mark.skipif(not has_nvrtc, reason=NO_NVRTC)
needs_gpu = pytest.mark.skipif(not on_gpu(), reason=NO_GPU)


def require_nvrtc():
    """Skip a module without NVRTC."""
    if not has_nvrtc:
        pytest.skip(NO_NVRTC, allow_module_level=True)


def require_gpu():
    """Skip a module without a GPU."""
    if not on_gpu():
        pytest.skip(NO_GPU, allow_module_level=True)
