"""Calls of a plan's kernels, whichever candidate they are of."""

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_tilekern.interop import ffi


def jitted(plan, shape, dtype):
    primitive = Primitive("tilekern_candidate")
    primitive.def_abstract_eval(lambda *_: jax.core.ShapedArray(shape, dtype))
    mlir.register_lowering(primitive, lambda ctx, *xs: ffi.cuda_launch(ctx, xs, plan))
    return jax.jit(primitive.bind)


def run(plan, operands, shape, dtype):
    return run_twice(jitted(plan, shape, dtype), operands)


def run_twice(call, operands, columns=...):
    """The result, or its first columns: those that the kernel writes."""
    out, again = (np.asarray(call(*operands))[columns] for _ in range(2))
    # Two calls of one kernel are bitwise equal.
    assert out.tobytes() == again.tobytes()
    return out.astype(np.float64)
