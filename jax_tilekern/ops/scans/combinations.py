"""What a scan combines, as CUDA: functions of the numbers of two values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tilekern.epilogue.cuda_text import cuda_text, rounded
from jax_tilekern.epilogue.scalar_function import ScalarFunction, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.plans.cxx import Dtype
from jax_tilekern.plans.scans.problem import Combination

# Types in memory that kernels compute in a wider one.
_WIDER = {
    np.dtype(narrow): np.dtype(wide)
    for wide, narrows in (
        (np.float32, (jnp.bfloat16, np.float16)),
        (np.int32, (np.int8, np.int16)),
        (np.uint32, (np.uint8, np.uint16)),
    )
    for narrow in narrows
}


def computed_dtype(dtype: Dtype) -> Dtype:
    """Return the type that the numbers of an element are combined in."""
    if dtype.kind == "c":
        return np.dtype(f"f{dtype.itemsize // 2}")
    return _WIDER.get(dtype, dtype)


@dataclass(frozen=True)
class _Complex:
    """A complex number as its parts."""

    real: Any
    imag: Any

    def __add__(self, other: _Complex) -> _Complex:
        return _Complex(self.real + other.real, self.imag + other.imag)

    def __mul__(self, other: _Complex) -> _Complex:
        return _Complex(
            self.real * other.real - self.imag * other.imag,
            self.real * other.imag + self.imag * other.real,
        )


@compat.cached(max_size=64, trace_context_in_key=False)
def combination(function: Callable[..., Any], dtypes: tuple[Dtype, ...]) -> Combination:
    """Translate ``function(earlier, later)`` of lists of elements of these types."""
    parts = [2 if dtype.kind == "c" else 1 for dtype in dtypes]

    def elements(numbers: Sequence[Any]) -> list[Any]:
        rest = iter(numbers)
        return [_Complex(next(rest), next(rest)) if n == 2 else next(rest) for n in parts]

    def of_numbers(*numbers: Any) -> list[Any]:
        half = len(numbers) // 2
        results = function(elements(numbers[:half]), elements(numbers[half:]))
        return [
            number
            for x in results
            for number in ((x.real, x.imag) if isinstance(x, _Complex) else (x,))
        ]

    numbers = [
        computed_dtype(dtype) for dtype, n in zip(dtypes, parts, strict=True) for _ in range(n)
    ]
    first, *others = 2 * numbers
    return combination_of_scalars(trace_scalars(of_numbers, first, first, others).function, numbers)


def combination_of_scalars(function: ScalarFunction, dtypes: Sequence[Dtype]) -> Combination:
    """Translate a function of the numbers of the earlier value, and then those of the later one.

    Raises ``Untranslatable`` if a primitive or type has no CUDA.
    """
    text = cuda_text(function)
    results = (rounded(x, dtype) for x, dtype in zip(text.results, dtypes, strict=True))
    return Combination(text.statements, tuple(results), text.instructions)
