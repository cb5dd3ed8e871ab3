"""Grouped GEMMs on the kernels of ``mma.sync`` and of CUDA cores, for sm_80 and later."""
