"""Kernels from source to machine code: NVRTC, cubins, and the disk cache."""
