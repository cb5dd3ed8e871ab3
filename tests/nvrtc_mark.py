"""Skips tests that compile CUDA kernels where there is no NVRTC."""

import pytest

from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc

try:
    nvrtc()
    has_nvrtc = True
except NvrtcNotFound:
    has_nvrtc = False
needs_nvrtc = pytest.mark.skipif(not has_nvrtc, reason="there is no NVRTC")
