"""Additions, sums and transposes of arrays."""
