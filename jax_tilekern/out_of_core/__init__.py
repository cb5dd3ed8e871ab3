"""Matrix products whose operands exceed the memory of the GPU, or of the host."""

from jax_tilekern.out_of_core.plan import Plan
from jax_tilekern.out_of_core.product import matmul, plan
from jax_tilekern.out_of_core.progress import Progress

__all__ = ["Plan", "Progress", "matmul", "plan"]
