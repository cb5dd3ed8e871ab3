"""Reductions to segments, rows by number, and what both are made of."""
