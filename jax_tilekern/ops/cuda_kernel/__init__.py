"""The user's CUDA sources as JAX functions."""
