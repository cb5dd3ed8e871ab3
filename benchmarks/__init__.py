"""Programs that measure the library, run from a clone by ``python -m benchmarks``."""
