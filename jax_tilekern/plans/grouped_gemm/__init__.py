"""Grouped GEMMs."""
