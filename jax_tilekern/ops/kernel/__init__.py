"""A JAX function as one kernel, in which a thread evaluates a lane."""
