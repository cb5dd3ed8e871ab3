"""Blocks of 8-bit floats with scales."""
