"""Partitioning of a call among the devices of a mesh."""
