"""JAX primitives of the operations: rules, lowering and modes."""
