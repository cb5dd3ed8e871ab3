"""Kernels of ``wgmma``, for sm_90a."""
