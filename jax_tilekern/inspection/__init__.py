"""What a call runs: ``explain``, cost analysis, and reports on kernels."""
