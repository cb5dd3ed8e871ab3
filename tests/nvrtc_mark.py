"""Skips tests of CUDA kernels without NVRTC, without g++, by which they are emulated, or a GPU."""

import pytest
from emulated_plans import COMPILER
from numerics import on_gpu

from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc

try:
    nvrtc()
    has_nvrtc = True
except NvrtcNotFound:
    has_nvrtc = False
NO_NVRTC, NO_GPU = "there is no NVRTC", "launches kernels, and JAX has no GPU here"
needs_nvrtc = pytest.mark.skipif(not has_nvrtc, reason=NO_NVRTC)
needs_emulator = pytest.mark.skipif(COMPILER is None, reason="there is no g++")
needs_gpu = pytest.mark.skipif(not on_gpu(), reason=NO_GPU)


def require_nvrtc():
    """Skip a module without NVRTC."""
    if not has_nvrtc:
        pytest.skip(NO_NVRTC, allow_module_level=True)


def require_gpu():
    """Skip a module without a GPU."""
    if not on_gpu():
        pytest.skip(NO_GPU, allow_module_level=True)
