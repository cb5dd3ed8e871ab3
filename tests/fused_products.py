"""Epilogues of products to plan for, which tests of planners and of kernels share."""

import numpy as np
from products import BF16, F32

from jax_tilekern.epilogue.cuda_text import computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray


def epilogue_of(function, *operands, n=None, batch=(), out=BF16, accumulator=F32):
    """The epilogue of a function; an operand is a type and how it lies.

    That is "" for a number, "n" or "m" for a row or a column, "mn" for a matrix of n columns that
    the batch shares, or (rows, "bmn") for a matrix of so many rows for each of the batch.
    """
    zeros = (0,) * len(batch)
    strides = {"": (0, 0), "n": (0, 1), "m": (1, 0), "mn": (n, 1)}

    def strides_of(lies):
        if isinstance(lies, str):
            return (*zeros, *strides[lies])
        (rows, _), (_,) = lies, batch
        return (rows * n, n, 1)

    dtypes = [np.dtype(dtype) for dtype, _ in operands]
    text = cuda_text(trace_scalars(function, accumulator, out, dtypes).function)
    arrays = tuple(
        EpilogueArray(dtype, computed_type(dtype), strides_of(lies))
        for dtype, (_, lies) in zip(dtypes, operands, strict=True)
    )
    return Epilogue(text.statements, text.results, arrays, (), batch, text.instructions)
