"""Reports on a call: ``explain``, cost analysis, and the resources of kernels."""
