"""How rows are measured: device time on a GPU, wall time on a CPU, both sides interleaved."""
