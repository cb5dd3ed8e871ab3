"""Grouped GEMMs on the kernels of ``wgmma``, for sm_90a."""
