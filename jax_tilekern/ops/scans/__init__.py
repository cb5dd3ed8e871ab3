"""Scans: cumulative reductions, linear recurrences, and associative functions."""
