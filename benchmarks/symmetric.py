"""``symmetric``: products of which half is computed, and Newton-Schulz iterations made of these.

Each row has ours under both policies and XLA's, and products of a matrix and its transpose have the
best kernels of halves by their estimates, whichever is chosen.
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

import jax_tilekern as jtk
from benchmarks.muon import by_jnp
from benchmarks.programs import KERNELS, Arrays, Program, ProgramCommand
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.tuning.product_timing import ArrayProduct

Shape = tuple[int, ...]

# Shapes of stacks of matrices (m, k), and those of iterations.
_SHAPES: dict[str, list[Shape]] = {
    "gpu": [
        *((n, n) for n in (512, 768, 1024, 1536, 2048, 3072, 4096, 8192)),
        (2048, 8192), (16, 512, 512), (16, 1024, 1024), (4, 4096, 11008),
    ],
    "cpu": [(64, 64), (2, 48, 96)],
}  # fmt: skip
_STACKS: dict[str, list[Shape]] = {
    "gpu": [(512, 512), (8, 256, 1024), (16, 1024, 1024), (4096, 4096), (4, 4096, 11008)],
    "cpu": [(2, 48, 96)],
}
_ARITHMETICS = {"bfloat16": "bf16", "float16": "f16", "float32": "tf32"}
# Elements that the error is that of.
_CHECKED = 64
_CANDIDATES = 4


def _random(shape: Shape, dtype: str) -> Arrays:
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    return [(x / math.sqrt(shape[-1])).astype(dtype)]


def _gram(shape: Shape, dtype: str) -> Arrays:
    (x,) = _random(shape, "float32")
    return [(x @ x.mT).astype(dtype)]


def _errors_of(exact: Callable[[Any], Any]) -> Callable[..., dict[str, float]]:
    """Return the largest error of a row and of a column, relative to the largest element."""

    def errors(arguments: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
        (x,) = (np.asarray(x.reshape(-1, *x.shape[-2:])[-1], np.float64) for x in arguments)
        wanted = exact(x)

        def error(result: Any) -> float:
            last = result.reshape(-1, *result.shape[-2:])[-1]
            parts = (
                np.asarray(part, np.float64) for part in (last[:_CHECKED], last[:, -_CHECKED:].T)
            )
            found = (np.abs(got - want).max() for got, want in zip(parts, wanted, strict=True))
            return float(max(found) / max(np.abs(want).max() for want in wanted))

        return {side: error(result) for side, result in results.items()}

    return errors


def _exact_product(x: Any) -> tuple[Any, Any]:
    return x[:_CHECKED] @ x.T, x[-_CHECKED:] @ x.T


def _exact_polynomial(x: Any) -> tuple[Any, Any]:
    first, last = x[:_CHECKED], x[-_CHECKED:]
    return 2 * first @ x - 3 * first, 2 * last @ x - 3 * last


def _halves(shape: Shape, dtype: str) -> dict[str, Callable[..., Any]]:
    """Return the best kernels of half of a product, by their keys."""
    if jax.default_backend() != "gpu":
        return {}
    *batch, m, k = shape
    geometry = MatmulGeometry(
        tuple(batch), m, m, k,
        *((*(step,) * len(batch), *strides)
          for step, strides in ((m * k, (k, 1)), (m * k, (1, k)), (m * m, (m, 1)))),
    )  # fmt: skip
    each = jnp.dtype(dtype)
    product = Product(geometry, each, each, each, _ARITHMETICS[dtype], symmetric=True)
    found = wgmma_candidates(product, current_gpu())
    if isinstance(found, NoKernel):
        return {}
    best = sorted(found, key=lambda candidate: candidate.cycles)[:_CANDIDATES]
    compute = ArrayProduct.of(product).by_plan

    def run(candidate: Any, x: Any) -> Any:
        return compute(candidate.plan(current_gpu()), x, x)

    return {candidate.key: functools.partial(run, candidate) for candidate in best}


def _polynomial(x: Any) -> Any:
    return jtk.symmetric_matmul(x, x, epilogue=lambda y, x: 2 * y - 3 * x, operands=(x,))


def _differences(_: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest difference from XLA's result, relative to its largest element."""
    wanted = np.asarray(results["XLA"], np.float32)
    largest = float(np.abs(wanted).max())
    return {
        side: float(np.abs(np.asarray(x, np.float32) - wanted).max()) / largest
        for side, x in results.items()
    }


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    for dtype in arguments.types:
        for shape in _SHAPES[backend]:
            name = "x".join(map(str, shape))
            yield Program(
                f"x @ x.mT {name} {dtype}",
                functools.partial(_random, shape, dtype),
                {
                    "ours": jtk.symmetric_matmul,
                    "kernels": jtk.symmetric_matmul,
                    "XLA": lambda x: x @ x.mT,
                    **_halves(shape, dtype),
                },
                _errors_of(_exact_product),
                contexts={"kernels": KERNELS},
            )
            if shape[-1] == shape[-2]:
                yield Program(
                    f"2 x @ x - 3 x {name} {dtype}",
                    functools.partial(_gram, shape, dtype),
                    {
                        "ours": _polynomial,
                        "kernels": _polynomial,
                        "XLA": lambda x: 2 * (x @ x) - 3 * x,
                    },
                    _errors_of(_exact_polynomial),
                    contexts={"kernels": KERNELS},
                )
        for shape in _STACKS[backend]:
            standard, gram = (
                functools.partial(jtk.linalg.newton_schulz, method=method)
                for method in ("standard", "gram")
            )
            yield Program(
                f"newton_schulz {'x'.join(map(str, shape))} {dtype}",
                functools.partial(_random, shape, dtype),
                {
                    "ours": jtk.linalg.newton_schulz,
                    "standard": standard,
                    "gram": gram,
                    "standard, kernels": standard,
                    "gram, kernels": gram,
                    "XLA": by_jnp,
                },
                _differences,
                contexts={"standard, kernels": KERNELS, "gram, kernels": KERNELS},
            )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--types", nargs="*", default=list(_ARITHMETICS), choices=_ARITHMETICS)


COMMAND = ProgramCommand(
    "products with a symmetric result, and Newton-Schulz iterations", _programs, 0.5,
    _add_arguments,
)  # fmt: skip
