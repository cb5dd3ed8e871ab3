"""Plans for reductions to segments, and for the sort of small integers that they read."""
