"""Sums, and products with a vector."""
