"""``fp8``: products of 8-bit floats with scales of blocks, their quantisers, and layers of both.

Products have these sides besides: scales of ``lhs`` with those of rows adjacent, as ``quantize``
writes them (``rows adjacent``), and scales of 1x128 blocks on both sides (``1x128``, as gradients
of weights have). ``bfloat16`` is our product of the same sizes and ``XLA`` is XLA's; ``XLA float8``
is XLA's product without scales. Products with epilogues, some of which quantise rows, have a side
with another kernel for it, and one without. Grouped GEMMs are compared with ours in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tilekern as jtk
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import (
    KERNELS,
    Arrays,
    Errors,
    Program,
    Sides,
    on_gpu,
    random_arrays,
    relative,
)
from jax_tilekern.plans.quantize import BLOCK

# Products as (m, n, k): large ones, and those that DeepGEMM lists.
_LISTED = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
_PRODUCTS = {
    True: [
        (8192, 8192, 8192), (4096, 7168, 2048), (6144, 6144, 6144),
        *((m, n, k) for m in (64, 128, 4096) for n, k in _LISTED),
    ],
    False: [(64, 256, 384)],
}  # fmt: skip
_MATRICES = {True: [(8192, 8192), (8192, 14336), (4096, 7168)], False: [(256, 384)]}
# Tokens, features and results: of a linear layer, and of products with epilogues.
_LAYERS = {True: [(8192, 4096, 14336), (8192, 14336, 4096)], False: [(64, 256, 384)]}
_FUSED = {
    True: [(8192, 4096, 14336), (2048, 4096, 4096), (64, 4096, 14336)],
    False: [(64, 256, 384)],
}
# Groups, rows of all groups, results and features: what DeepGEMM lists, and many experts.
_GROUPED = {
    True: [
        (8, 32768, 4096, 7168), (8, 32768, 7168, 2048), (4, 32768, 4096, 7168),
        (64, 32768, 1536, 2048), (64, 65536, 2560, 1280), (128, 131072, 768, 2048),
    ],
    False: [(4, 256, 256, 384)],
}  # fmt: skip
_CHECKED = 64
_NUMBERS = (((1,), (0,)), ((), ()))
_BF16 = jnp.bfloat16


def _operands(m: int, n: int, k: int) -> Arrays:
    """Return operands in bfloat16, and quantised: values, scales, and scales in other orders."""
    x, w = random_arrays(((m, k), _BF16), ((n, k), _BF16))

    @jax.jit
    def quantized(x: Any, w: Any) -> Arrays:
        values, scales = jtk.quantize(x)
        weights, block_scales = jtk.quantize(w, (BLOCK, BLOCK))
        by_row, row_scales = jtk.quantize(w)
        return values, weights, scales, block_scales, scales.T, by_row, row_scales.T

    return x, w, *quantized(x, w)


def _product_errors(arguments: Arrays, results: Mapping[str, Any]) -> Errors:
    x, w = (np.asarray(a, np.float32) for a in arguments[:2])
    found = {side: y[-_CHECKED:] for side, y in results.items() if side != "XLA float8"}
    return relative(found, x[-_CHECKED:] @ w.T)


def _products(big: bool) -> Iterator[Program]:
    def scaled(
        x: Any, w: Any, values: Any, weights: Any, scales: Any, block_scales: Any, *_: Any
    ) -> Any:
        return jtk.scaled_matmul(values, weights, scales, block_scales, _BF16)

    def adjacent(x: Any, w: Any, values: Any, weights: Any, *scales: Any) -> Any:
        return jtk.scaled_matmul(values, weights, scales[2].T, scales[1], _BF16)

    def by_row(x: Any, w: Any, values: Any, weights: Any, *rest: Any) -> Any:
        _, _, transposed, rows, row_scales = rest
        return jtk.scaled_matmul(values, rows, transposed.T, row_scales.T, _BF16)

    sides: Sides = {
        "ours": scaled, "rows adjacent": adjacent, "1x128": by_row,
        "bfloat16": lambda x, w, *_: jtk.matmul(x, w.T),
        "XLA": lambda x, w, *_: x @ w.T,
        "XLA float8": lambda x, w, values, weights, *_: lax.dot_general(
            values, weights, (((1,), (1,)), ((), ())), preferred_element_type=_BF16
        ),
    }  # fmt: skip
    contexts = dict.fromkeys(("ours", "rows adjacent", "1x128"), KERNELS)
    for m, n, k in _PRODUCTS[big]:
        rows = "4096 rows and more" if m > 128 else "up to 128 rows"
        yield Program(f"product {m}x{n}x{k}", partial(_operands, m, n, k), sides, _product_errors,
                      f"8-bit products with scales, {rows}", contexts=contexts)  # fmt: skip


def _quantizers(big: bool) -> Iterator[Program]:
    contexts = {"ours": KERNELS, "XLA": partial(jtk.policy, "xla")}
    for shape in _MATRICES[big]:
        for block, both in (((1, BLOCK), False), ((1, BLOCK), True), ((BLOCK, BLOCK), True)):
            quantize = partial(jtk.quantize, block=block, both=both)
            blocks = f"{block[0]}x{block[1]}{', both' if both else ''}"
            make = partial(random_arrays, (shape, _BF16))
            yield Program(
                f"quantize {shape[0]}x{shape[1]} in {blocks}", make,
                {"ours": quantize, "XLA": quantize}, _different, "8-bit, quantize",
                contexts=contexts,
            )  # fmt: skip


def _different(_: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the share of bytes in which XLA's results differ: none should."""

    def bytes_of(y: Any) -> Any:
        return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(y)]

    wanted = bytes_of(results["XLA"])
    return {
        side: float(np.mean([(a != b).mean() for a, b in zip(bytes_of(y), wanted, strict=True)]))
        for side, y in results.items()
    }


def _in_norm(_: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the largest relative difference in norm from XLA's results."""
    found = {
        side: [np.asarray(x, np.float32) for x in jax.tree.leaves(y)]
        for side, y in results.items()
        if side != "no epilogue"
    }
    return {
        side: max(
            float(np.linalg.norm(a - b) / np.linalg.norm(b))
            for a, b in zip(y, found["XLA"], strict=True)
        )
        for side, y in found.items()
    }


def _layers(big: bool) -> Iterator[Program]:
    products: Sides = {
        "ours": jtk.fp8_dot_general,
        "power of two": partial(jtk.fp8_dot_general, power_of_two=True),
        "bfloat16": jtk.dot_general,
        "XLA": lax.dot_general,
    }

    def forward(product: Any, x: Any, w: Any, dy: Any) -> Any:
        return product(x, w, _NUMBERS)

    def with_gradients(product: Any, x: Any, w: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(lambda x, w: product(x, w, _NUMBERS), x, w)
        return y, *vjp(dy)

    contexts = dict.fromkeys(("ours", "power of two"), KERNELS)
    for m, k, n in _LAYERS[big]:
        make = partial(random_arrays, *((shape, _BF16) for shape in ((m, k), (k, n), (m, n))))
        for what, function in (("forward", forward), ("forward and backward", with_gradients)):
            sides = {name: partial(function, product) for name, product in products.items()}
            yield Program(f"layer {m}x{k}x{n}, {what}", make, sides, _in_norm,
                          f"8-bit layers, {what}", contexts=contexts)  # fmt: skip


def _gelu(y: Any) -> Any:
    return jax.nn.gelu(y)


def _quantized(y: Any) -> Any:
    return jtk.row_quantize(_gelu(y))


def _biased(y: Any, bias: Any) -> Any:
    return _gelu(y + bias)


def _scaled(*operands: Any, epilogue: Any = None, bias: bool = False) -> Any:
    _, _, values, weights, _, block_scales, transposed, *_, row = operands
    return jtk.scaled_matmul(
        values, weights, transposed.T, block_scales, _BF16, epilogue=epilogue,
        operands=(row,) if bias else (),
    )  # fmt: skip


def _fused_operands(m: int, n: int, k: int, scale: float) -> Arrays:
    x, w, values, weights, scales, block_scales, transposed, *others = _operands(m, n, k)
    (up,) = random_arrays(((n, k), _BF16), seed=1)
    return (
        x * _BF16(scale), w, values, weights, scales * scale, block_scales, transposed * scale,
        *others, up, jnp.ones(n, _BF16),
    )  # fmt: skip


# Products by the epilogue and, in plain JAX, with the activation.
_QUANTISED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (
        lambda x, w, *_, epilogue: jtk.matmul(x, w.T, epilogue=epilogue),
        lambda x, w, *_: _gelu(x @ w.T),
    ),
    "gated linear": (
        lambda x, w, *xs, epilogue: jtk.gated_linear(
            x, w.T, xs[-2].T, _gelu, epilogue=jtk.row_quantize if epilogue is _quantized else None
        ),
        lambda x, w, *xs: _gelu(x @ w.T) * (x @ xs[-2].T),
    ),
    "scaled product": (_scaled, lambda x, w, *_: _gelu(x @ w.T)),
}


def _fused_products(big: bool) -> Iterator[Program]:
    """Products with epilogues, and such that quantise rows: in one kernel, and in several."""
    for m, k, n in _FUSED[big]:
        sizes = f"{m}x{n}x{k}"
        sides: Sides = {
            "ours": partial(_scaled, epilogue=_biased, bias=True),
            "after the kernel": lambda *xs: _biased(_scaled(*xs), xs[-1]),
            "no epilogue": _scaled,
            "XLA": lambda x, w, *xs: _biased(x @ w.T, xs[-1]),
        }
        contexts = dict.fromkeys(list(sides)[:3], KERNELS)
        make = partial(_fused_operands, m, n, k)
        yield Program(f"epilogue of a scaled product {sizes}", partial(make, 1.0), sides, _in_norm,
                      contexts=contexts)  # fmt: skip
        for name, (product, by_xla) in _QUANTISED.items():
            sides = {
                "ours": partial(product, epilogue=_quantized),
                "two kernels": lambda *xs, f=product: jtk.quantize(f(*xs, epilogue=_gelu)),
                "not quantised": partial(product, epilogue=_gelu),
                "XLA": lambda *xs, f=by_xla: jtk.quantize(f(*xs)),
            }
            contexts = dict.fromkeys(list(sides)[:3], KERNELS)
            # Results are of the order of 1.
            yield Program(f"quantised rows of a {name} {sizes}", partial(make, k**-0.5), sides,
                          _dequantized_errors, contexts=contexts)  # fmt: skip


def _dequantized_errors(given: Arrays, results: Mapping[str, Any]) -> Errors:
    """Compare some rows, which are dequantised."""

    def rows(values: Any, scales: Any) -> Any:
        factors = np.repeat(np.asarray(scales[-_CHECKED:]), BLOCK, 1)[:, : values.shape[1]]
        return np.asarray(values[-_CHECKED:], np.float32) * factors

    found = {s: rows(*y) for s, y in results.items() if isinstance(y, tuple | list)}
    return _in_norm(given, found)


def _grouped_operands(groups: int, m: int, n: int, k: int) -> Arrays:
    """Return operands in bfloat16, sizes, and both quantised; scales of rows are adjacent."""
    x, w = random_arrays(((m, k), _BF16), ((groups, k, n), _BF16))
    # Sizes between 0.7 and 1.3 of their mean, of all rows together.
    shares = np.random.default_rng(0).uniform(0.7, 1.3, groups)
    sizes = np.diff(np.rint(m * np.cumsum(shares) / shares.sum()), prepend=0).astype(np.int32)

    @jax.jit
    def quantized(x: Any, w: Any) -> Arrays:
        values, scales = jtk.quantize(x)
        _, (weights, block_scales) = jtk.quantize(w, (BLOCK, BLOCK), both=True)
        return values, weights, scales.T, block_scales

    return x, w, jnp.asarray(sizes), *quantized(x, w)


def _grouped_errors(arguments: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the largest error of the last group's last rows, relative to the largest element."""
    rows = slice(-min(_CHECKED, int(arguments[2][-1])), None)
    x, w = (np.asarray(a, np.float32) for a in (arguments[0][rows], arguments[1][-1]))
    return relative({side: y[rows] for side, y in results.items()}, x @ w)


def _grouped(big: bool) -> Iterator[Program]:
    def scaled(x: Any, w: Any, sizes: Any, values: Any, weights: Any, *scales: Any) -> Any:
        row_scales, block_scales = scales
        return jtk.scaled_ragged_dot(values, weights, sizes, row_scales.T, block_scales, _BF16)

    sides: Sides = {
        "ours": scaled, "bfloat16": lambda x, w, sizes, *_: jtk.ragged_dot(x, w, sizes)
    }  # fmt: skip
    for groups, m, n, k in _GROUPED[big]:
        make = functools.partial(_grouped_operands, groups, m, n, k)
        yield Program(f"grouped {groups}, {m}x{n}x{k}", make, sides, _grouped_errors,
                      "8-bit, grouped", peer="bfloat16", contexts={"ours": KERNELS})  # fmt: skip


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    for kind in (_products, _quantizers, _layers, _fused_products, _grouped):
        yield from kind(on_gpu())


COMMAND = ProgramsCommand(
    "products of 8-bit floats with scales of blocks, and quantisers", _programs
)
