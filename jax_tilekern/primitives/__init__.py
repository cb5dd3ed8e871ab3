"""How an operation becomes a JAX primitive: its rules, its lowering, its modes."""
