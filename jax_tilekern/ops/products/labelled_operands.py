"""Casts and permutations of the operands of primitives over labelled dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.interop.originals import lax
from jax_tilekern.plans.contraction import Contraction, Labels
from jax_tilekern.plans.gemm.arithmetic import (
    BF16,
    F16,
    F32,
    F64,
    FP8,
    INT8,
    SUB_BYTE_INTEGERS,
    Converted,
    accumulator_dtype,
)
from jax_tilekern.primitives.operation import lowering_platform


@mode_independent
def common_type(lhs: Array, rhs: Array, out_dtype: Any, precision: Any) -> tuple[Array, Array]:
    """Cast two operands to a common type, unless a product of their types has kernels.

    ``lax.dot_general`` casts both to the type of the result, or to those of an algorithm. A
    narrower type that has all values of both is as exact and costs less, and a wider one rounds
    less.
    """
    if lhs.dtype != rhs.dtype:
        # Devices sum the cotangent of an operand that all have in the operand's own type.
        lhs, rhs = compat.unify_varying(lhs, rhs)
    # XLA fails to compile some products of fewer bits.
    lhs, rhs = (x.astype(_in_8_bits(x.dtype)) for x in (lhs, rhs))
    algorithms_own = getattr(precision, "supported_lhs_types", None) or ()
    if algorithms_own and lhs.dtype != rhs.dtype:
        wide = jax.dtypes.canonicalize_dtype(algorithms_own[0])
        lhs, rhs = (x if x.dtype in algorithms_own else x.astype(wide) for x in (lhs, rhs))
    types = (lhs.dtype, rhs.dtype)
    if lhs.dtype == rhs.dtype or all(dtype in FP8 for dtype in types):
        return lhs, rhs
    common, out = _promoted(*types), _in_8_bits(np.dtype(out_dtype))
    exact = all(_has_values_of(common, dtype) for dtype in types)
    if _category(common) != _category(out):
        common = out
    elif _category(common) is jnp.integer:
        # Integers wrap around, so those of the result's type have the same product.
        common = common if exact and common.itemsize <= out.itemsize else out
    elif not exact:
        common = _promoted(common, out)
    return lhs.astype(common), rhs.astype(common)


def _in_8_bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a type that has all values of one of fewer bits."""
    return INT8 if dtype in SUB_BYTE_INTEGERS else dtype


def _promoted(*types: np.dtype[Any]) -> np.dtype[Any]:
    try:
        return np.dtype(jnp.promote_types(*types))
    # An 8-bit float has no implicit promotion. A wider type holds it, and float32 any two of them.
    except jax.dtypes.TypePromotionError:
        widest = max(types, key=lambda dtype: dtype.itemsize)
        return widest if widest.itemsize > 1 else np.dtype(np.float32)


def _category(dtype: Any) -> Any:
    categories = (jnp.complexfloating, jnp.floating, jnp.integer, np.bool_)
    return next(category for category in categories if jnp.issubdtype(dtype, category))


def _has_values_of(wide: np.dtype[Any], narrow: np.dtype[Any]) -> bool:
    """Return whether a type has all values of another."""
    if wide != narrow and jnp.issubdtype(wide, jnp.floating) and wide.itemsize == 1:
        return False
    if wide in (BF16, F16) and narrow.itemsize == 1:
        # NumPy has no safe casts of 8-bit floats to 16 bits. This one has exponents of float32.
        return not (wide == F16 and narrow == jnp.float8_e8m0fnu)
    return bool(np.can_cast(narrow, wide))


def converted(types: Converted, lhs: Array, rhs: Array) -> tuple[Array, Array]:
    """Cast two operands to the types in which a product is computed."""
    if lhs.dtype in FP8:
        return lhs, rhs
    return lhs.astype(types.operands), rhs.astype(types.operands)


def transposed(x: Array, labels: Labels, wanted: Labels) -> Array:
    """Permute an array's dimensions."""
    return x if labels == wanted else lax.transpose(x, tuple(map(labels.index, wanted)))


def broadcasted(x: Array, labels: Labels, wanted: Labels, sizes: Mapping[int, int]) -> Array:
    """Broadcast an array to more dimensions, in any order."""
    # lax.broadcast_in_dim needs the dimensions in order, and does not check it.
    own = tuple(label for label in wanted if label in labels)
    return lax.broadcast_in_dim(
        transposed(x, labels, own),
        tuple(sizes[label] for label in wanted),
        tuple(map(wanted.index, own)),
    )


def swapped_precision(precision: Any) -> Any:
    """Return the canonical precision of a product whose operands change places."""
    if isinstance(precision, lax.DotAlgorithm):
        return precision._replace(
            lhs_precision_type=precision.rhs_precision_type,
            rhs_precision_type=precision.lhs_precision_type,
            lhs_component_count=precision.rhs_component_count,
            rhs_component_count=precision.lhs_component_count,
        )
    return precision[::-1] if isinstance(precision, tuple) else precision


def product_by_lax(
    lhs: Array,
    rhs: Array,
    contraction: Contraction,
    *,
    precision: Any,
    out_dtype: Any,
    out_sharding: NamedSharding | None = None,
) -> Array:
    """Contract two arrays with ``lax.dot_general``."""
    if contraction.dot_general_out != contraction.out:
        # jnp.einsum swaps them too, and XLA partitions the two products differently.
        lhs, rhs, contraction = rhs, lhs, contraction.swapped()
        precision = swapped_precision(precision)
    if out_sharding is not None:
        partitions = dict(zip(contraction.out, out_sharding.spec.partitions, strict=True))
        ordered = tuple(partitions[label] for label in contraction.dot_general_out)
        out_sharding = out_sharding.update(spec=out_sharding.spec.update(partitions=ordered))
    product = functools.partial(
        _dot_general, contraction, precision=precision, out_sharding=out_sharding
    )
    if lowering_platform.value == "cpu" and _is_inexact_in_bfloat16(contraction, lhs, rhs):
        # XLA also ends some of these into float32: "Unsupported element type for DotThunk::Execute:
        # BF16 x BF16 = F32".
        lhs, rhs = lhs.astype(np.float32), rhs.astype(np.float32)
    if lowering_platform.value == "cuda" and _has_16_bit_vector(contraction, lhs, rhs):
        # XLA rounds each product of these to 16 bits.
        return dot_by_sum(lhs, rhs, contraction, out_dtype=out_dtype)
    if lowering_platform.value == "cuda" and _is_16_bit_loop(contraction, lhs, rhs):
        # And of these. Float32 operands, TF32 ones too, have all of their bits.
        lhs, rhs = lhs.astype(np.float32), rhs.astype(np.float32)
    if lowering_platform.value == "cuda" and _sums_narrow_integers(lhs, rhs, out_dtype):
        # XLA's products of 8-bit integers are wrong at some k. Float16 has all of these integers,
        # and float32 all sums up to a limit.
        if _is_exact_in_float32(contraction, lhs, rhs):
            lhs, rhs = lhs.astype(np.float16), rhs.astype(np.float16)
            out = product(lhs, rhs, out_dtype=np.float32, precision=lax.Precision.DEFAULT)
            out = out.astype(np.int32).astype(out_dtype)  # Integers wrap around.
        else:
            out = product(lhs.astype(out_dtype), rhs.astype(out_dtype), out_dtype=out_dtype)
    elif lowering_platform.value == "cuda" and _is_narrowed(contraction, lhs, rhs, out_dtype):
        # XLA and LLVM would multiply in the type of the result, in which operands are rounded and
        # may overflow.
        out = lax.optimization_barrier(product(lhs, rhs, out_dtype=lhs.dtype)).astype(out_dtype)
    else:
        out = product(lhs, rhs, out_dtype=out_dtype)
    return transposed(out, contraction.dot_general_out, contraction.out)


def _is_inexact_in_bfloat16(contraction: Contraction, lhs: Array, rhs: Array) -> bool:
    """Return whether XLA's product of bfloat16 on a CPU may round every sum.

    That is where batch dimensions do not come first, several dimensions are contracted, the right
    operand has several dimensions of its own, or the result is transposed.
    """
    if not lhs.dtype == rhs.dtype == jnp.bfloat16:
        return False
    batch = set(contraction.lhs) & set(contraction.rhs) & set(contraction.out)
    leading = all(
        set(labels[: len(batch)]) == batch
        for labels in (contraction.lhs, contraction.rhs, contraction.out)
    )
    own = set(contraction.rhs) & set(contraction.out) - batch
    contracted = set(contraction.lhs) - set(contraction.out)
    several = len(own) > 1 or len(contracted) > 1
    return not leading or several or contraction.dot_general_out != contraction.out


def _has_16_bit_vector(contraction: Contraction, lhs: Array, rhs: Array) -> bool:
    """Return whether 16-bit floats are multiplied with at least one vector."""
    if lhs.dtype != rhs.dtype or lhs.dtype not in (jnp.bfloat16, np.float16):
        return False
    kept = set(contraction.out) - (set(contraction.lhs) & set(contraction.rhs))
    return any(
        all(size == 1 for label, size in zip(labels, x.shape, strict=True) if label in kept)
        for labels, x in ((contraction.lhs, lhs), (contraction.rhs, rhs))
    )


def _is_16_bit_loop(contraction: Contraction, lhs: Array, rhs: Array) -> bool:
    """Return whether XLA multiplies 16-bit floats in a loop, rather than in matrix units.

    It does where the two matrices of an element of the batch have less than 100 elements together
    (its `xla_gpu_gemm_rewrite_size_threshold`), unless it pads them.
    """
    if lhs.dtype != rhs.dtype or lhs.dtype not in (jnp.bfloat16, np.float16):
        return False
    batch = set(contraction.lhs) & set(contraction.rhs) & set(contraction.out)
    elements = sum(
        math.prod(n for label, n in zip(labels, x.shape, strict=True) if label not in batch)
        for labels, x in ((contraction.lhs, lhs), (contraction.rhs, rhs))
    )
    return isinstance(elements, int) and elements < 100


def _terms(contraction: Contraction, lhs: Array) -> int | None:
    """Return how many products are summed; nothing is known of a symbolic size."""
    k = math.prod(lhs.shape[contraction.lhs.index(label)] for label in contraction.contracted)
    return k if isinstance(k, int) else None


def _is_narrowed(contraction: Contraction, lhs: Array, rhs: Array, out_dtype: Any) -> bool:
    """Return whether XLA fuses products with their rounding, so that the operands are rounded.

    It does where nothing is contracted. Operands of float32 may have been bfloat16.
    """
    k = math.prod(lhs.shape[contraction.lhs.index(label)] for label in contraction.contracted)
    narrow = {F32: (F16,), F64: (F32, BF16, F16)}.get(lhs.dtype, ())
    is_narrow = lhs.dtype == rhs.dtype and np.dtype(out_dtype) in narrow
    return is_narrow and isinstance(k, int) and k == 1


def _sums_narrow_integers(lhs: Array, rhs: Array, out_dtype: Any) -> bool:
    """Return whether integers of 8 bits or fewer are summed in a wider type."""
    types = (lhs.dtype, rhs.dtype, np.dtype(out_dtype))
    integers = all(jnp.issubdtype(dtype, jnp.integer) for dtype in types)
    return integers and lhs.dtype.itemsize == rhs.dtype.itemsize == 1 < types[2].itemsize


def _is_exact_in_float32(contraction: Contraction, lhs: Array, rhs: Array) -> bool:
    """Return whether every sum of products of two arrays of integers fits float32."""
    terms = _terms(contraction, lhs)
    largest = math.prod(
        128 if jnp.issubdtype(x.dtype, jnp.signedinteger) else 255 for x in (lhs, rhs)
    )
    return terms is not None and terms * largest <= 1 << 24


def _dot_general(
    contraction: Contraction,
    lhs: Array,
    rhs: Array,
    *,
    precision: Any,
    out_dtype: Any,
    out_sharding: NamedSharding | None,
) -> Array:
    """Contract two arrays in the order of ``lax.dot_general``, into any type."""
    out_dtype = element_type = np.dtype(out_dtype)
    narrower = out_dtype in SUB_BYTE_INTEGERS or out_dtype.itemsize < lhs.dtype.itemsize
    if isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        pass  # It states the types.
    elif not jnp.issubdtype(lhs.dtype, jnp.floating):
        # lax.dot_general has no results that are narrower than integers.
        element_type = None if narrower else out_dtype
    elif out_dtype != lhs.dtype and out_dtype.itemsize < F32.itemsize:
        # XLA would multiply in one 16-bit type, and round to the other afterwards.
        element_type = accumulator_dtype(lhs.dtype)
    out = lax.dot_general(
        lhs,
        rhs,
        contraction.dimension_numbers,
        precision=precision,
        preferred_element_type=element_type,
        out_sharding=out_sharding,
    )
    return out.astype(out_dtype)


def dot_by_sum(
    lhs: Array, rhs: Array, contraction: Contraction, *, out_dtype: np.dtype[Any]
) -> Array:
    """Multiply element by element and add up, both in float32."""
    sizes = dict(zip(contraction.lhs, lhs.shape, strict=True))
    sizes |= dict(zip(contraction.rhs, rhs.shape, strict=True))
    every = (*contraction.out, *contraction.contracted)
    left, right = (
        broadcasted(x.astype(np.float32), labels, every, sizes)
        for x, labels in ((lhs, contraction.lhs), (rhs, contraction.rhs))
    )
    axes = range(len(contraction.out), len(every))
    return (left * right).sum(tuple(axes)).astype(out_dtype)


def check_operands(call: str, epilogue: Callable[..., Any] | None, **operands: Any) -> None:
    """Raise a ``TypeError`` if operands of an epilogue are no sequence, or nothing reads them."""
    for name, arrays in operands.items():
        if not isinstance(arrays, Sequence):
            raise TypeError(
                f"{call}: {name} are a sequence of arrays, got one of shape {np.shape(arrays)}: "
                f"pass {name}=(x,)"
            )
        if arrays and epilogue is None:
            raise TypeError(
                f"{call}: {len(arrays)} {name} of an epilogue, but no epilogue= that reads them"
            )
