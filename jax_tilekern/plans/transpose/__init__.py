"""Transposes and other permutations."""
