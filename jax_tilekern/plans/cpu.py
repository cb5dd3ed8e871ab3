"""What is left to XLA on a CPU, and the features of the CPU that this depends on.

Ratios are XLA's time over ours on two cores of an AMD EPYC (``docs/tuning-log.md``).
The C++ handlers detect the instruction sets that they need themselves.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.transpose.permutation import Permutation

# The fewest rows and columns of a product that is left to XLA for its use of AMX.
_LEAST_OF_MATRIX_UNITS = 8
# The fewest where XLA transposes lhs first, for each arithmetic that AMX has.
_LEAST_TRANSPOSED = {"bfloat16": 128, "int8": 512}
# A call of a kernel for one product with a vector takes as long as XLA's loop for another vector,
# or for a matrix, of this many elements; or for a matrix of float32 or float64.
_SMALL_OPERAND = 128
_SMALL_WIDE_MATRIX = 192
# The same for a matrix whose rows have fewer elements than the first number, by which the lanes of
# a vector are added up: of narrow types, and of float32 and float64.
_SHORT_ROW, _SMALL_SHORT_ROWS, _SMALL_WIDE_SHORT_ROWS = 32, 320, 448
# A custom call for one product with a vector takes as long as XLA's for so many elements.
_SMALL_PRODUCT = 256
# As does a call of a kernel for a matrix of so many bytes, each of which is one of a transpose.
_SMALL_MATRIX_BYTES = 256
# XLA's loop over fewer elements takes less time than a custom call, and may be fused with others.
_FEW_ELEMENTS = {"transposes": 6144, "sums": 1000, "additions": 1000}
# By the word for it in a kernel's name: why a product is computed in this way.
_PRODUCT_REASONS = {
    "direct": "rhs is small or has few columns, so operands are read in place",
    "packed": "large or narrow operands are packed for the caches first",
    "vector-matrix": "a product with a vector reads the matrix once, as it lies",
    "dot": "a dot product reads both vectors once, as they lie",
}
# Kernels that transpose fewer bytes at once move single elements.
_VECTOR_BYTES = 16


@functools.cache
def has_amx() -> bool:
    """Whether the CPU has Intel AMX, which XLA's products use and this library's do not."""
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "amx_tile" in processors.read_text().split()


@functools.cache
def _last_cache_bytes() -> int:
    """Return the size of the last-level cache, or of a small one where it is unknown."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    text = size.read_text().strip() if size.exists() else ""
    return int(text[:-1]) << 10 if text.endswith("K") else 32 << 20


def is_streamed(permutation: Permutation) -> bool:
    """Return whether a transpose writes past the caches, where its result would not stay."""
    nbytes = math.prod(permutation.sizes) * permutation.itemsize
    return nbytes > _last_cache_bytes() // 2


def matrix_units_left_to_xla(product: Product) -> str | None:
    """Return why a product is XLA's on a CPU that has AMX, or ``None``."""
    geometry, arithmetic = product.geometry, product.arithmetic
    least = min(geometry.m, geometry.n)
    if arithmetic not in _LEAST_TRANSPOSED or not has_amx() or least < _LEAST_OF_MATRIX_UNITS:
        return None
    if current_policy() == "kernels":
        return None
    *out_batch, out_row, _ = geometry.out_strides
    widened = arithmetic == "bfloat16" and product.out_dtype != product.lhs_dtype
    if widened and out_batch and min(out_batch) < out_row:
        # XLA ends the program: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
        return None
    *batch, _, k_stride = geometry.lhs_strides
    # XLA transposes lhs first, and only where its batch dimensions lie inside k.
    transposed = bool(batch) and k_stride > max(batch) and least >= _LEAST_TRANSPOSED[arithmetic]
    if geometry.lhs_k_major or transposed:
        return f"XLA multiplies {arithmetic} in this CPU's matrix units (AMX)"
    return None


def product_left_to_xla(geometry: MatmulGeometry) -> str | None:
    """Return why a product is XLA's whatever its size, or ``None``."""
    contiguous = geometry.lhs_strides[-1] == geometry.rhs_strides[-2] == 1
    if geometry.m == geometry.n == 1 and not contiguous and current_policy() != "kernels":
        return "XLA is faster where the vectors of a dot product are not contiguous (0.01)"
    return None


def small_left_to_xla(product: Product) -> str | None:
    """Return why small products with vectors are XLA's, or ``None``."""
    geometry = product.geometry
    m, n, k = geometry.m, geometry.n, geometry.k
    if min(m, n) > 1 or current_policy() == "kernels":
        return None
    if math.prod(geometry.batch) == 1:
        if m * n * k >= _SMALL_PRODUCT:
            return None
        return (
            f"XLA's products with a vector of fewer than {_SMALL_PRODUCT} elements are faster "
            "(0.85 to 1.0)"
        )
    is_dot = m == n == 1
    wide = not is_dot and product.lhs_dtype.itemsize >= 4
    by_rows = (geometry.lhs_strides[-1] if n == 1 else geometry.rhs_strides[-2]) == 1
    if not is_dot and by_rows and k < _SHORT_ROW:
        least = _SMALL_WIDE_SHORT_ROWS if wide else _SMALL_SHORT_ROWS
    else:
        least = _SMALL_WIDE_MATRIX if wide else _SMALL_OPERAND
    if m * n * k >= least:
        return None
    kind = "dot products" if is_dot else "products of a vector and a matrix"
    return f"XLA's batches of {kind} of fewer than {least} elements are faster (0.2 to 0.9)"


def few_left_to_xla(operation: str, elements: int) -> str | None:
    """Return why an operation on few elements is XLA's, or ``None``."""
    least = _FEW_ELEMENTS[operation]
    if elements >= least or current_policy() == "kernels":
        return None
    return f"XLA's {operation} of fewer than {least} elements are faster (0.77 to 0.94)"


def many_elements(operation: str) -> str:
    """Return why an operation on more elements has a kernel."""
    return f"a kernel is faster than XLA's {operation} from {_FEW_ELEMENTS[operation]} elements on"


def product_reason(kernel: str, arithmetic: str) -> str:
    """Return why a product takes a kernel, by the kernel's name."""
    form = next(form for form in _PRODUCT_REASONS if form in kernel)
    return f"{_PRODUCT_REASONS[form]}; computes in {arithmetic}"


def transpose_left_to_xla(permutation: Permutation) -> str | None:
    """Return why a transpose is XLA's, or ``None``."""
    permutation = permutation.widened
    if permutation.keeps_innermost or current_policy() == "kernels":
        return None
    *_, last, innermost = permutation.order
    itemsize, columns = permutation.itemsize, permutation.sizes[-1]
    rows = permutation.sizes[innermost]
    if rows * columns * itemsize <= _SMALL_MATRIX_BYTES and len(permutation.sizes) > 2:
        return f"XLA's transposes of many matrices of {rows} by {columns} are faster (0.1 to 0.7)"
    if rows * itemsize < _VECTOR_BYTES and last != len(permutation.sizes) - 1:
        return f"XLA's transposes to scattered rows of {rows} elements are faster (0.2 to 0.9)"
    return None
