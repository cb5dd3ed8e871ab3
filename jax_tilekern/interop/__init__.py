"""What connects to JAX and XLA and knows no operation: custom calls, versions, modes."""
