"""Matrix products whose operands exceed the memory of the GPU, or of the host."""

from jax_tilekern.out_of_core.blocks import Plan
from jax_tilekern.out_of_core.product import matmul, plan

__all__ = ["Plan", "matmul", "plan"]


def __dir__() -> list[str]:
    """List the public names, and no modules of the implementation."""
    return sorted(__all__)
