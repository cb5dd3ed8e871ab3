"""Kernels of ``mma.sync`` and of CUDA cores, for sm_80 and later."""
