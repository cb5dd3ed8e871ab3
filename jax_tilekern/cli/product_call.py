"""Products as a command line names them, such as ``matmul bf16 4096x4096x4096 NT``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern

_FORM = "matmul TYPE MxNxK, or BxMxNxK for a batch, with NT, TN or TT for transposed operands"

_TYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
# Result types that differ from the operands' own.
_RESULTS = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
_PRODUCT = re.compile(r"matmul (\S+) (\d+x\d+x\d+(?:x\d+)?)(?: ([NT])([NT]))?", re.ASCII)


class ProductCallError(ValueError):
    """A text that names no product."""


@dataclass(frozen=True)
class ProductCall:
    """A call of the library that computes a product.

    Attributes
    ----------
    name
        What messages call it.
    function
        Computes the product of two operands.
    operands
        Shapes and types.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]

    def types_enabled(self) -> AbstractContextManager[Any]:
        """Return a context in which JAX has 64-bit types if the operands need them."""
        wide = any(np.zeros((), x.dtype).real.itemsize == 8 for x in self.operands)
        context: AbstractContextManager[Any] = jax.enable_x64(wide)
        return context


def add_product_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name products."""
    parser.add_argument("products", nargs="*", metavar="PRODUCT", help=_FORM)
    parser.add_argument("--out", metavar="TYPE", help="type of the results")
    parser.add_argument("--precision", metavar="NAME", help="as JAX names it")


def product_calls(arguments: argparse.Namespace) -> list[ProductCall]:
    """Return the products that a command line names, whether each is quoted or not."""
    text = " ".join(arguments.products).strip()
    names = re.split(r"\s+(?=matmul\b)", text) if text else []
    return [parse_product(name, arguments.out, arguments.precision) for name in names]


def parse_product(text: str, out: str | None = None, precision: str | None = None) -> ProductCall:
    """Return the product that a command line names.

    Parameters
    ----------
    text
        ``matmul TYPE MxNxK`` or ``matmul TYPE BxMxNxK``, then ``NT`` if the right operand is
        stored transposed, ``TN`` if the left one is, ``TT`` if both are.
    out
        Type of the result; by default the operands' own, int32 for int8 and bfloat16 for float8.
    precision
        As ``jax.lax.dot_general`` takes it.

    Raises
    ------
    ProductCallError
        If the text has another form, a size is 0, or a type does not exist.
    """
    match = _PRODUCT.fullmatch(text)
    sizes = [int(size) for size in match[2].split("x")] if match else []
    if match is None or min(sizes) < 1:
        raise ProductCallError(f"{text!r} is not {_FORM}")
    *batch, m, n, k = sizes
    dtype = _dtype(match[1], text)
    lhs = (k, m) if match[3] == "T" else (m, k)
    rhs = (n, k) if match[4] == "T" else (k, n)
    first = len(batch)
    batch_dims = tuple(range(first))
    contracted = ((first + (match[3] != "T"),), (first + (match[4] == "T"),))
    function = partial(
        jax_tilekern.dot_general,
        dimension_numbers=(contracted, (batch_dims, batch_dims)),
        precision=precision,
        preferred_element_type=_dtype(out or _RESULTS.get(dtype.name, dtype.name), text),
    )
    operands = (
        jax.ShapeDtypeStruct((*batch, *lhs), dtype),
        jax.ShapeDtypeStruct((*batch, *rhs), dtype),
    )
    return ProductCall(text, function, operands)


def _dtype(name: str, text: str) -> np.dtype[Any]:
    try:
        return jnp.dtype(_TYPES.get(name, name))
    except TypeError as error:
        raise ProductCallError(f"{text!r}: {error}") from error
