"""``QuantizedWeights``: matrices of a model in 4 or 8 bits, which products take for arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, export
from jax.typing import DTypeLike

from jax_tilekern.interop import linen
from jax_tilekern.interop.array_sources import ArraySource
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.products.scaled_operands import check_weight_scales, dequantized
from jax_tilekern.ops.products.weight_product import weights_call
from jax_tilekern.ops.quantisation.quantize import Block, quantize
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.arithmetic import FP8
from jax_tilekern.plans.quantize import BLOCK, INTEGERS, QUANTIZED_DTYPES, quantized_type


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "zeros"],
    meta_fields=["dtype"],
)
@dataclass(frozen=True, eq=False)
class QuantizedWeights(ArraySource):
    """A matrix ``(..., k, n)`` in 4 or 8 bits, as a leaf of a model's parameters.

    :func:`matmul`, :func:`dot_general`, :func:`linear` and :func:`gated_linear`
    take it as their second operand, and compute :func:`scaled_matmul`. So do ``jnp.matmul``,
    ``jnp.dot`` and ``jnp.tensordot`` inside :func:`patch`, and layers of Flax with
    ``dot_general=jax_tilekern.dot_general``, if they compute in its ``dtype``. Other functions of
    ``jnp``, and ``x @ weights``, dequantise it. ``jnp.asarray(weights)`` is the array for functions
    of ``lax`` and methods of arrays. It is a tree of arrays, as which it is stored, sharded and
    differentiated; integers have derivatives of ``float0``.

    Attributes
    ----------
    values
        ``(..., n, k)`` of int4, int8, float8_e4m3fn or float8_e5m2, the transpose of the matrix.
    scales, zeros
        As those of ``rhs`` in :func:`scaled_matmul`; ``zeros`` may be ``None``.
    dtype
        Type of the matrix for which it stands, float32 by default.

    Raises
    ------
    TypeError, ValueError
        When it is used, if types or shapes do not fit.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> values, scales = jtk.quantize(jnp.ones((3, 256)), dtype=jnp.int4)
    >>> weights = jtk.QuantizedWeights(values, scales)
    >>> weights.shape
    (256, 3)
    >>> jtk.matmul(jnp.ones(256), weights)
    Array([256., 256., 256.], dtype=float32)
    """

    values: Any
    scales: Any
    zeros: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        linen.register_box(type(self))
        linen.register_state(type(self), ("values", "scales", "zeros"))
        # One type is one object, whether it was given as a type, a class or a name.
        dtype = np.dtype(np.float32 if self.dtype is None else self.dtype)
        object.__setattr__(self, "dtype", dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        *batch, n, k = self.values.shape
        return (*batch, k, n)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def factors(self) -> tuple[Array, Array, Array | None]:
        """The arrays as JAX has them, checked."""
        values, scales = jnp.asarray(self.values), jnp.asarray(self.scales)
        zeros = None if self.zeros is None else jnp.asarray(self.zeros)
        if values.dtype not in (*INTEGERS, *FP8) or values.ndim < 2:
            raise TypeError(
                "QuantizedWeights have values (..., n, k) of int4, int8, float8_e4m3fn or "
                f"float8_e5m2, not {values.dtype} of shape {values.shape}"
            )
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise TypeError(f"QuantizedWeights stand for a matrix of floats, not {self.dtype}")
        check_weight_scales("QuantizedWeights: ", values, scales, zeros)
        return values, scales, zeros

    def array(self) -> Array:
        """Return the dequantised matrix."""
        return jnp.swapaxes(dequantized(*self.factors), -1, -2).astype(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the dequantised matrix as an array of NumPy."""
        return np.asarray(self.array(), dtype)

    def __getitem__(self, index: Any) -> Any:
        # Flax reads a whole parameter by an ellipsis.
        return self if index is Ellipsis else self.array()[index]

    # What flax.linen asks of a box around a parameter: layers get the array.

    def unbox(self) -> Array:
        """Return the dequantised matrix, which products know again."""
        return self.__jax_array__()

    def replace_boxed(self, value: Any) -> Any:
        """Return the value in place of these weights."""
        return value

    def add_axis(self, *_: Any) -> QuantizedWeights:
        """Return the weights: the arrays have the axes that a ``scan`` adds."""
        return self

    remove_axis = add_axis


# Exported programs have the type for which weights stand by its name.
export.register_pytree_node_serialization(
    QuantizedWeights,
    serialized_name="jax_tilekern.QuantizedWeights",
    serialize_auxdata=lambda meta: np.dtype(meta[0]).name.encode(),
    deserialize_auxdata=lambda name: (jnp.dtype(name.decode()),),
)


# In place of arrays in products.


def split_weights(x: Any) -> tuple[Any, QuantizedWeights | None]:
    """Return the operand of a product as an array, and the weights that it was made of, if any."""
    return (x.array(), x) if isinstance(x, QuantizedWeights) else (x, None)


def can_multiply(x: Array, weights: QuantizedWeights, c: Contraction, out: Any) -> bool:
    """Whether a product contracts the dimension along which the weights are quantised, alone."""
    return (
        len(c.rhs) == weights.ndim
        and c.contracted == c.rhs[-2:-1]
        and _common_type(x, weights) in QUANTIZED_DTYPES
        and jnp.issubdtype(out, jnp.floating)
    )


def multiply_by(
    x: Array, weights: QuantizedWeights, c: Contraction, bounds: Sequence[Array] = (), **call: Any
) -> Any:
    """Multiply by weights; ``c`` has the labels of their array, and the others are a call's."""
    *batch, k, n = c.rhs
    contraction = dataclasses.replace(c, rhs=(*batch, n, k))
    wide = x.astype(_common_type(x, weights))
    return weights_call(wide, weights.factors, bounds, contraction=contraction, **call)


def _common_type(x: Array, weights: QuantizedWeights) -> Any:
    return np.dtype(jnp.promote_types(x.dtype, weights.dtype))


# In place of the matrices of a model.


def quantize_weights(
    params: Any,
    where: Callable[[str, Any], bool] | None = None,
    dtype: DTypeLike = jnp.int4,
    *,
    block: Block = (1, BLOCK),
    symmetric: bool = True,
) -> Any:
    """Quantise the matrices of a model.

    Parameters
    ----------
    params
        A tree of arrays.
    where
        ``where(path, array)`` says which arrays are quantised, of which the path is text such as
        ``"params/block_0/dense/kernel"``. By default those are the float matrices named
        ``kernel``.
    dtype, block, symmetric
        As in :func:`quantize`, of the transposes: blocks lie along the first dimension of a matrix,
        which products contract.

    Returns
    -------
    tree
        The same tree, with :class:`QuantizedWeights` in place of these arrays.

    Raises
    ------
    TypeError, ValueError
        As :func:`quantize` does, of an array that ``where`` names.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> params = {"embedding": jnp.ones((9, 64)), "dense": {"kernel": jnp.ones((64, 3))}}
    >>> small = jtk.quantize_weights(params)
    >>> small["dense"]["kernel"].values.dtype
    dtype(int4)
    >>> jtk.matmul(small["embedding"], small["dense"]["kernel"])[0]
    Array([64., 64., 64.], dtype=float32)
    """
    chosen, dtype = where or _is_kernel, quantized_type("quantize_weights rounds to", dtype)

    def quantised(path: Any, x: Any) -> Any:
        if not chosen(jax.tree_util.keystr(path, simple=True, separator="/"), x):
            return x
        name = f"quantize_weights: {jax.tree_util.keystr(path)}"
        if np.ndim(x) < 2:
            raise ValueError(f"{name} has shape {np.shape(x)}; where= takes matrices (..., k, n)")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} is an array of floats if where= takes it, not {x.dtype}")
        # Matrices of float64 are rounded to float32 first.
        dtype_of_x = jax.dtypes.canonicalize_dtype(x.dtype)
        wide = x if x.dtype in QUANTIZED_DTYPES else jnp.asarray(x, np.float32)
        columns = jnp.swapaxes(wide, -1, -2)
        values, scales, *zeros = quantize(columns, block, dtype, symmetric=symmetric)
        return QuantizedWeights(values, scales, zeros[0] if zeros else None, np.dtype(dtype_of_x))

    return jax.tree_util.tree_map_with_path(quantised, params)


def _is_kernel(path: str, x: Any) -> bool:
    is_matrix = np.ndim(x) == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    # flax.nnx has the array of a parameter as its value.
    return is_matrix and path.removesuffix("/value").rpartition("/")[2] == "kernel"
