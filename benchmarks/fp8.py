"""``fp8``: products of 8-bit floats with scales of blocks, their quantisers, and layers of both.

``ours`` has the kernels. Products have these sides besides: scales of ``lhs`` with those of rows
adjacent, as ``quantize`` writes them (``rows adjacent``), scales of 1x128 blocks on both sides
(``1x128``, as gradients of weights have), and the best kernels of either by their estimates, by
their keys. ``bfloat16`` is our product of the same sizes and ``XLA`` is XLA's; ``XLA float8`` is
XLA's product without scales. Products with epilogues, some of which quantise rows, have a side with
another kernel for it, and one without. Grouped GEMMs are compared with ours in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tilekern as jtk
from benchmarks.programs import KERNELS, Arrays, Program, ProgramCommand
from jax_tilekern.epilogue.cuda_text import cuda_text
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.ops.fused_lowering import epilogue_of
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gemm.arithmetic import BF16, F32, FP8
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.grouped_gemm.sm90.candidates import grouped_wgmma_candidates
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.tuning.product_timing import by_plan, results_by_plan

# Products as (m, n, k): large ones, and those that DeepGEMM lists.
_LISTED = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
_PRODUCTS = {
    "gpu": [
        (8192, 8192, 8192), (4096, 7168, 2048), (6144, 6144, 6144),
        *((m, n, k) for m in (64, 128, 4096) for n, k in _LISTED),
    ],
    "cpu": [(64, 256, 384)],
}  # fmt: skip
_MATRICES = {"gpu": [(8192, 8192), (8192, 14336), (4096, 7168)], "cpu": [(256, 384)]}
# Tokens, features and results of a linear layer.
_LAYERS = {"gpu": [(8192, 4096, 14336), (8192, 14336, 4096)], "cpu": [(64, 256, 384)]}
# The same of products with epilogues.
_FUSED = {
    "gpu": [(8192, 4096, 14336), (2048, 4096, 4096), (64, 4096, 14336)],
    "cpu": [(64, 256, 384)],
}
# Groups, rows of all groups, results and features: what DeepGEMM lists, and many experts.
_GROUPED = {
    "gpu": [
        (8, 32768, 4096, 7168), (8, 32768, 7168, 2048), (4, 32768, 4096, 7168),
        (64, 32768, 1536, 2048), (64, 65536, 2560, 1280), (128, 131072, 768, 2048),
    ],
    "cpu": [(4, 256, 256, 384)],
}  # fmt: skip
_CANDIDATES = 4
_CHECKED = 64
_NUMBERS = (((1,), (0,)), ((), ()))


def _operands(m: int, n: int, k: int) -> Arrays:
    """Return operands in bfloat16, and quantised: values, scales, and scales in other orders."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((m, k), (n, k)), strict=True)
    )

    @jax.jit
    def quantized(x: Any, w: Any) -> Arrays:
        values, scales = jtk.quantize(x)
        weights, of_blocks = jtk.quantize(w, (BLOCK, BLOCK))
        by_row, of_rows = jtk.quantize(w)
        return values, weights, scales, of_blocks, scales.T, by_row, of_rows.T

    return x, w, *quantized(x, w)


def _product_errors(arguments: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest error of some rows, relative to the largest element."""
    x, w = (np.asarray(a, np.float32) for a in arguments[:2])
    wanted = x[-_CHECKED:] @ w.T
    return {
        side: float(np.abs(np.asarray(y[-_CHECKED:], np.float32) - wanted).max())
        / float(np.abs(wanted).max())
        for side, y in results.items()
        if side != "XLA float8"
    }


def _scaled(x: Any, w: Any, values: Any, weights: Any, scales: Any, of_blocks: Any, *_: Any) -> Any:
    return jtk.scaled_matmul(values, weights, scales, of_blocks, jnp.bfloat16)


def _rows_adjacent(x: Any, w: Any, values: Any, weights: Any, *scales: Any) -> Any:
    _, of_blocks, transposed, *_ = scales
    return jtk.scaled_matmul(values, weights, transposed.T, of_blocks, jnp.bfloat16)


def _both_by_row(x: Any, w: Any, values: Any, weights: Any, *rest: Any) -> Any:
    _, _, transposed, by_row, of_rows = rest
    return jtk.scaled_matmul(values, by_row, transposed.T, of_rows.T, jnp.bfloat16)


def _candidates(m: int, n: int, k: int, by_row: bool) -> dict[str, Callable[..., Any]]:
    """Return the best kernels by their estimates, with scales of rows adjacent.

    ``rhs`` has blocks of 1x128 or of 128x128.
    """
    if jax.default_backend() != "gpu":
        return {}
    blocks = math.ceil(k / BLOCK)
    of_rhs = Scales(1, (), 1, n) if by_row else Scales(BLOCK, (), blocks, 1)
    geometry = MatmulGeometry((), m, n, k, (k, 1), (1, k), (n, 1))
    scales = Scales(1, (), 1, m), of_rhs
    product = Product(geometry, FP8[0], FP8[0], BF16, "fp8", scales=scales)
    found = wgmma_candidates(product, current_gpu())
    if isinstance(found, NoKernel):
        return {}
    best = sorted(found, key=lambda candidate: candidate.cycles)[:_CANDIDATES]

    def run(candidate: Any, x: Any, w: Any, values: Any, weights: Any, *rest: Any) -> Any:
        _, of_blocks, transposed, row_weights, of_rows = rest
        right = (row_weights, of_rows) if by_row else (weights, of_blocks)
        plan = candidate.plan(current_gpu())
        return by_plan(plan, (m, n), BF16, values, right[0], transposed, right[1])

    prefix = "1x128, " if by_row else ""
    return {f"{prefix}{candidate.key}": functools.partial(run, candidate) for candidate in best}


def _products(backend: str) -> Iterator[Program]:
    for m, n, k in _PRODUCTS[backend]:
        yield Program(
            f"product {m}x{n}x{k}",
            functools.partial(_operands, m, n, k),
            {
                "ours": _scaled,
                "rows adjacent": _rows_adjacent,
                "1x128": _both_by_row,
                **_candidates(m, n, k, by_row=False),
                **_candidates(m, n, k, by_row=True),
                "bfloat16": lambda x, w, *_: jtk.matmul(x, w.T),
                "XLA": lambda x, w, *_: x @ w.T,
                "XLA float8": lambda x, w, values, weights, *_: lax.dot_general(
                    values, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
                ),
            },
            _product_errors,
            contexts=dict.fromkeys(("ours", "rows adjacent", "1x128"), KERNELS),
        )


def _group_sizes(groups: int, rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return sizes between 0.7 and 1.3 of their mean, of all rows together."""
    shares = np.random.default_rng(0).uniform(0.7, 1.3, groups)
    bounds = np.rint(rows * np.cumsum(shares) / shares.sum())
    return np.diff(bounds, prepend=0).astype(np.int32)


def _grouped_operands(groups: int, m: int, n: int, k: int) -> Arrays:
    """Return operands in bfloat16, sizes, and both quantised; scales of rows are adjacent."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (groups, k, n), jnp.bfloat16)

    @jax.jit
    def quantized(x: Any, w: Any) -> Arrays:
        values, scales = jtk.quantize(x)
        _, (weights, of_blocks) = jtk.quantize(w, (BLOCK, BLOCK), both=True)
        return values, weights, scales.T, of_blocks

    return x, w, jnp.asarray(_group_sizes(groups, m)), *quantized(x, w)


def _grouped_errors(arguments: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest error of the last group's last rows, relative to the largest element."""
    rows = slice(-min(_CHECKED, int(arguments[2][-1])), None)
    x, w = (np.asarray(a, np.float32) for a in (arguments[0][rows], arguments[1][-1]))
    wanted = x @ w
    largest = float(np.abs(wanted).max())
    return {
        side: float(np.abs(np.asarray(y[rows], np.float32) - wanted).max()) / largest
        for side, y in results.items()
    }


def _grouped(
    x: Any, w: Any, sizes: Any, values: Any, weights: Any, scales: Any, of_blocks: Any
) -> Any:
    return jtk.scaled_ragged_dot(values, weights, sizes, scales.T, of_blocks, jnp.bfloat16)


def _grouped_candidates(groups: int, m: int, n: int, k: int) -> dict[str, Callable[..., Any]]:
    """Return the best kernels by their estimates."""
    if jax.default_backend() != "gpu":
        return {}
    blocks = math.ceil(k / BLOCK)
    geometry = MatmulGeometry((groups,), m, n, k, (0, k, 1), (n * k, 1, k), (0, n, 1))
    of_rhs = Scales(BLOCK, (math.ceil(n / BLOCK) * blocks,), blocks, 1)
    product = Product(
        GroupedGeometry.of(geometry, "m", ()), FP8[0], FP8[0], BF16, "fp8",
        scales=(Scales(1, (0,), 1, m), of_rhs),
    )  # fmt: skip
    found = grouped_wgmma_candidates(product, current_gpu())
    if isinstance(found, NoKernel):
        return {}
    best = sorted(found, key=lambda candidate: candidate.cycles)[:_CANDIDATES]

    def run(candidate: Any, x: Any, w: Any, sizes: Any, *operands: Any) -> Any:
        values, weights, scales, of_blocks = operands
        bounds = jnp.pad(jnp.cumsum(sizes, dtype=np.int32), (1, 0))
        plan = candidate.plan(current_gpu())
        return by_plan(plan, (m, n), BF16, values, weights, bounds, scales, of_blocks)

    return {candidate.key: functools.partial(run, candidate) for candidate in best}


def _grouped_products(backend: str) -> Iterator[Program]:
    for groups, m, n, k in _GROUPED[backend]:
        yield Program(
            f"grouped {groups}, {m}x{n}x{k}",
            functools.partial(_grouped_operands, groups, m, n, k),
            {
                "ours": _grouped,
                **_grouped_candidates(groups, m, n, k),
                "bfloat16": lambda x, w, sizes, *_: jtk.ragged_dot(x, w, sizes),
            },
            _grouped_errors,
            peer="bfloat16",
            contexts={"ours": KERNELS},
        )


def _different(_: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of bytes in which XLA's results differ: none should."""
    leaves = {side: [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(y)]
              for side, y in results.items()}  # fmt: skip
    return {
        side: float(np.mean([(a != b).mean() for a, b in zip(x, leaves["XLA"], strict=True)]))
        for side, x in leaves.items()
    }


def _quantizers(backend: str) -> Iterator[Program]:
    for shape in _MATRICES[backend]:
        for block, both in (((1, BLOCK), False), ((1, BLOCK), True), ((BLOCK, BLOCK), True)):
            quantize = functools.partial(jtk.quantize, block=block, both=both)

            def arguments(shape: tuple[int, ...] = shape) -> Arrays:
                return [jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)]

            blocks = "x".join(map(str, block))
            name = f"quantize {'x'.join(map(str, shape))} in {blocks}{', both' if both else ''}"
            sides = {"ours": quantize, "XLA": quantize}
            contexts = {"ours": KERNELS, "XLA": functools.partial(jtk.policy, "xla")}
            yield Program(name, arguments, sides, _different, contexts=contexts)


def _layer(dot_general: Callable[..., Any], x: Any, w: Any, dy: Any) -> Any:
    y, vjp = jax.vjp(lambda x, w: dot_general(x, w, _NUMBERS), x, w)
    return y, *vjp(dy)


def _layer_errors(_: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest relative difference in norm from XLA's results."""
    wanted = [np.asarray(x, np.float32) for x in results["XLA"]]
    return {
        side: max(
            float(np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b))
            for a, b in zip(found, wanted, strict=True)
        )
        for side, found in results.items()
    }


def _layers(backend: str) -> Iterator[Program]:
    products: dict[str, Callable[..., Any]] = {
        "ours": jtk.fp8_dot_general,
        "power of two": functools.partial(jtk.fp8_dot_general, power_of_two=True),
        "bfloat16": jtk.dot_general,
        "XLA": lax.dot_general,
    }
    for m, k, n in _LAYERS[backend]:

        def arguments(shapes: Any = ((m, k), (k, n), (m, n))) -> Arrays:
            keys = jax.random.split(jax.random.key(0), 3)
            return [
                jax.random.normal(key, shape, jnp.bfloat16)
                for key, shape in zip(keys, shapes, strict=True)
            ]

        kernels = dict.fromkeys(("ours", "power of two"), KERNELS)
        yield Program(
            f"layer {m}x{k}x{n}, forward",
            arguments,
            {
                name: lambda x, w, dy, product=product: product(x, w, _NUMBERS)
                for name, product in products.items()
            },
            lambda given, results: _layer_errors(given, {s: [y] for s, y in results.items()}),
            contexts=kernels,
        )
        yield Program(
            f"layer {m}x{k}x{n}, forward and backward",
            arguments,
            {name: functools.partial(_layer, product) for name, product in products.items()},
            _layer_errors,
            contexts=kernels,
        )


def _activated(y: Any) -> Any:
    return jax.nn.gelu(y)


def _quantized(y: Any) -> Any:
    return jtk.row_quantize(_activated(y))


def _biased(y: Any, bias: Any) -> Any:
    return _activated(y + bias)


def _quantizing_candidates(m: int, n: int, k: int, scaled: bool) -> dict[str, Callable[..., Any]]:
    """Return the best kernels that quantise rows by their estimates."""
    if jax.default_backend() != "gpu":
        return {}
    gpu = current_gpu()
    function = trace_scalars(_quantized, F32, BF16, []).function
    epilogue = epilogue_of(
        cuda_text(function), function, [], [(n, 1), (1, 0)],
        batch=(), m=m, products=1, ragged=None,
    )  # fmt: skip
    geometry = MatmulGeometry((), m, n, k, (k, 1), (1, k), (n, 1))
    if scaled:
        scales = Scales(1, (), 1, m), Scales(BLOCK, (), math.ceil(k / BLOCK), 1)
        product = Product(geometry, FP8[0], FP8[0], BF16, "fp8", epilogue, scales=scales)
    else:
        product = Product(geometry, BF16, BF16, BF16, "bf16", epilogue)
    found = wgmma_candidates(product, gpu)
    if isinstance(found, NoKernel):
        return {}
    results = [
        jax.core.ShapedArray((m, n), FP8[0]),
        jax.core.ShapedArray((math.ceil(n / BLOCK), m), F32),
    ]

    def run(candidate: Candidate, x: Any, w: Any, values: Any, weights: Any, *rest: Any) -> Any:
        _, of_blocks, transposed, *_ = rest
        operands = (values, weights, transposed, of_blocks) if scaled else (x, w)
        values, scales = results_by_plan(candidate.plan(gpu), results, *operands)
        return values, scales.T

    best = sorted(found, key=lambda candidate: candidate.cycles)[:_CANDIDATES]
    return {candidate.key: functools.partial(run, candidate) for candidate in best}


def _fused_products(backend: str) -> Iterator[Program]:
    """Products with epilogues, and such that quantise rows: in one kernel, and in several."""
    for m, k, n in _FUSED[backend]:
        sizes = f"{m}x{n}x{k}"

        def given(scale: float, m: int = m, n: int = n, k: int = k) -> Arrays:
            x, w, values, weights, scales, of_blocks, transposed, *others = _operands(m, n, k)
            up = jax.random.normal(jax.random.key(1), (n, k), jnp.bfloat16)
            return (
                x * jnp.bfloat16(scale), w, values, weights, scales * scale, of_blocks,
                transposed * scale, *others, up, jnp.ones(n, jnp.bfloat16),
            )  # fmt: skip

        def scaled(*operands: Any, epilogue: Any = None, bias: bool = False) -> Any:
            _, _, values, weights, _, of_blocks, transposed, *_, row = operands
            return jtk.scaled_matmul(
                values, weights, transposed.T, of_blocks, jnp.bfloat16,
                epilogue=epilogue, operands=(row,) if bias else (),
            )  # fmt: skip

        fused = functools.partial(scaled, epilogue=_biased, bias=True)
        yield Program(
            f"epilogue of a scaled product {sizes}",
            functools.partial(given, 1.0),
            {
                "ours": fused,
                "after the kernel": lambda *xs: _biased(scaled(*xs), xs[-1]),
                "no epilogue": scaled,
                "XLA": lambda x, w, *xs: _biased(x @ w.T, xs[-1]),
            },
            _layer_errors_of_one,
            contexts={"ours": KERNELS, "after the kernel": KERNELS, "no epilogue": KERNELS},
        )
        # Results are of the order of 1.
        small = functools.partial(given, k**-0.5)
        kernels = dict.fromkeys(("ours", "two kernels", "not quantised"), KERNELS)
        of_each: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "linear": (
                lambda x, w, *_, epilogue: jtk.matmul(x, w.T, epilogue=epilogue),
                lambda x, w, *_: _activated(x @ w.T),
            ),
            "gated linear": (
                lambda x, w, *xs, epilogue: jtk.gated_linear(
                    x, w.T, xs[-2].T, _activated,
                    epilogue=jtk.row_quantize if epilogue is _quantized else None,
                ),
                lambda x, w, *xs: _activated(x @ w.T) * (x @ xs[-2].T),
            ),
            "scaled product": (scaled, lambda x, w, *_: _activated(x @ w.T)),
        }  # fmt: skip
        for name, (product, by_xla) in of_each.items():
            yield Program(
                f"quantised rows of a {name} {sizes}",
                small,
                {
                    "ours": functools.partial(product, epilogue=_quantized),
                    "two kernels": lambda *xs, f=product: jtk.quantize(f(*xs, epilogue=_activated)),
                    "not quantised": functools.partial(product, epilogue=_activated),
                    **(
                        {}
                        if name.startswith("gated")
                        else _quantizing_candidates(m, n, k, name.startswith("scaled"))
                    ),
                    "XLA": lambda *xs, f=by_xla: jtk.quantize(f(*xs)),
                },
                _dequantized_errors,
                contexts=kernels,
            )


def _layer_errors_of_one(given: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    return _layer_errors(given, {s: [y] for s, y in results.items() if s != "no epilogue"})


def _dequantized_errors(given: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Compare some rows, which are dequantised."""

    def rows(values: Any, scales: Any) -> np.ndarray:
        factors = np.repeat(np.asarray(scales[-_CHECKED:]), BLOCK, 1)[:, : values.shape[1]]
        dequantized: np.ndarray = np.asarray(values[-_CHECKED:], np.float32) * factors
        return dequantized

    found = {s: [rows(*y)] for s, y in results.items() if isinstance(y, (tuple, list))}
    return _layer_errors(given, found)


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    yield from _products(backend)
    yield from _quantizers(backend)
    yield from _layers(backend)
    yield from _fused_products(backend)
    yield from _grouped_products(backend)


COMMAND = ProgramCommand(
    "products of 8-bit floats with scales of blocks, and quantisers", _programs, 0.5
)
