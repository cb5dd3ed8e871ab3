"""Times of the ways to compute one product, or one call of a user's kernel, side by side."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.compilation.nvrtc import CompileError
from jax_tilekern.interop import compat, ffi, global_modes
from jax_tilekern.interop.compat import mlir
from jax_tilekern.ops.cuda_kernel.tuning import TunableCall
from jax_tilekern.ops.products.labelled_operands import product_by_lax
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.contraction import Contraction, Labels
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan
from jax_tilekern.plans.tuned import XLA
from jax_tilekern.tuning.device_time import Unattributed, run_blocks
from jax_tilekern.tuning.random_operands import Operands, beyond_cache, random_array
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

# Blocks of calls of each side, interleaved, and calls in a block.
_ROUNDS = 8
_MOST_CALLS = 50


class Measured(NamedTuple):
    """Times of the ways to compute one product or call, and why the others have none.

    XLA's own product, or the reference of a kernel, has the key :data:`XLA`.
    """

    microseconds: Mapping[str, float]
    failures: Mapping[str, str]


# Executes a given plan for a product.
_planned = compat.Primitive("tilekern_planned")
_planned.multiple_results = True
_planned.def_abstract_eval(lambda *operands, plan, results: results)


def _emit(ctx: Any, *operands: Any, plan: LaunchPlan, results: Any) -> Sequence[Any]:
    return ffi.cuda_launch(ctx, operands, plan)


mlir.register_lowering(_planned, _emit, platform="cuda")


def by_plan(plan: LaunchPlan, shape: Sequence[int], dtype: Any, *operands: Array) -> Array:
    """Return the result, of this shape and type, of a plan's kernels."""
    results = (jax.core.ShapedArray(tuple(shape), dtype),)
    found: list[Array] = _planned.bind(*operands, plan=plan, results=results)
    return found[0]


class _Array(NamedTuple):
    """A row-major array: labels and sizes of its dimensions, and its type."""

    labels: Labels
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(
        cls, labels: Sequence[int], sizes: Sequence[int], strides: Sequence[int], dtype: Any
    ) -> _Array:
        """Return the array that a product sees by strides; ValueError if it has gaps."""
        # A dimension of size 1, or one that is broadcast, is not a dimension of the array.
        dims = sorted(
            (x for x in zip(strides, sizes, labels, strict=True) if x[0] > 0 and x[1] > 1),
            reverse=True,
        )
        shape = tuple(size for _, size, _ in dims)
        if any(stride != math.prod(shape[i + 1 :]) for i, (stride, _, _) in enumerate(dims)):
            raise ValueError(f"sizes {tuple(sizes)} with strides {tuple(strides)} have gaps")
        return cls(tuple(label for _, _, label in dims), shape, dtype)

    def random(self, seed: int) -> Array:
        """Return normal numbers, or integers of the whole range."""
        result: Array = random_array(_key(seed), self.shape, self.dtype)
        return result


# XLA's precision for an arithmetic, where it is not the default. The kernel of f32_emulated serves
# several names, of which this is the slowest in XLA.
_PRECISIONS = {
    "f32": "highest",
    "f32_emulated": "BF16_BF16_F32_X6",
    "fp8": "highest",
}


@dataclass(frozen=True)
class ArrayProduct:
    """A product over arrays of JAX, which XLA or a plan computes."""

    lhs: _Array
    rhs: _Array
    out: _Array
    arithmetic: str

    @classmethod
    def of(cls, product: Product) -> ArrayProduct:
        """Return the product over row-major arrays; ValueError if one has gaps."""
        geometry = product.geometry
        *batch, m, n, k = range(len(geometry.batch) + 3)
        lhs, rhs, out = (
            _Array.of((*batch, *matrix), (*geometry.batch, *sizes), strides, dtype)
            for matrix, sizes, strides, dtype in (
                ((m, k), (geometry.m, geometry.k), geometry.lhs_strides, product.lhs_dtype),
                ((k, n), (geometry.k, geometry.n), geometry.rhs_strides, product.rhs_dtype),
                ((m, n), (geometry.m, geometry.n), geometry.out_strides, product.out_dtype),
            )
        )
        return cls(lhs, rhs, out, product.arithmetic)

    @global_modes.by_xla
    def by_xla(self, lhs: Array, rhs: Array) -> Array:
        """Compute it as the library does where no kernel takes it."""
        return product_by_lax(
            lhs,
            rhs,
            Contraction(self.lhs.labels, self.rhs.labels, self.out.labels),
            precision=_PRECISIONS.get(self.arithmetic, "default"),
            out_dtype=self.out.dtype,
        )

    def by_plan(self, plan: LaunchPlan, lhs: Array, rhs: Array) -> Array:
        """Compute it by a kernel."""
        return by_plan(plan, self.out.shape, self.out.dtype, lhs, rhs)

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the operands."""
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (self.lhs, self.rhs))

    def operands(self, seed: int) -> Operands:
        """Return random operands."""
        return self.lhs.random(2 * seed), self.rhs.random(2 * seed + 1)


def _key(seed: int) -> Array:
    # This generator of JAX compiles fastest.
    return jax.random.key(seed, impl="unsafe_rbg")


# Returns an array, or a sequence of them.
Side = Callable[..., Any]

# The root mean square by which two results may differ, besides the rounding of the result. Other
# arithmetics accumulate in float32. XLA's own float32 emulation may be no better than TF32.
_TOLERANCES = {
    "tf32": 2e-3,
    "f32_emulated": 2e-3,
    "fp8": 5e-3,
    "fp8_fast": 1e-2,
    "f64": 1e-12,
}
_FLOAT32_TOLERANCE = 1e-4
_TOLERANCE_OF_CALLS = 1e-2
# A single one of some hundred million elements may differ by this multiple of it.
_DEVIATION = 32
# Accepts JAX's types as well as numpy's, and has no type annotations.
_finfo: Callable[[Any], Any] = jnp.finfo


def tolerance_of(product: Product) -> float:
    """Return the root mean square by which two results of a product may differ."""
    tolerance = _TOLERANCES.get(product.arithmetic, _FLOAT32_TOLERANCE)
    if jnp.issubdtype(product.out_dtype, jnp.floating):
        tolerance += float(_finfo(product.out_dtype).eps)
    return tolerance


def measure(product: Product, found: Sequence[Candidate], gpu: Gpu, seconds: float) -> Measured:
    """Measure candidates for a product, and XLA's own, side by side on random operands."""
    with jax.enable_x64(any(dtype.itemsize == 8 for dtype in product.dtypes)):
        problem = ArrayProduct.of(product)
        sides: dict[str, Side] = {XLA: problem.by_xla}
        failures: dict[str, str] = {}
        # NVRTC compiles several kernels at a time.
        with ThreadPoolExecutor() as pool:
            plans = pool.map(functools.partial(plan_of, gpu=gpu), found)
            for candidate, plan in zip(found, plans, strict=True):
                if isinstance(plan, str):
                    failures[candidate.key] = plan
                else:
                    sides[candidate.key] = functools.partial(problem.by_plan, plan)
        measured = _side_by_side(sides, problem.operands, tolerance_of(product), gpu, seconds)
    return measured._replace(failures={**failures, **measured.failures})


def measure_call(
    call: TunableCall, operands: Sequence[Any] | None, gpu: Gpu, seconds: float
) -> Measured:
    """Measure a call of a user's kernel with each choice, and its reference, side by side.

    By default operands are random floats, and integers that are 0, since they may be indices.
    """

    def operands_of(seed: int) -> Operands:
        if operands is not None:
            return tuple(jnp.array(x) for x in operands)
        keys = jax.random.split(jax.random.key(seed), max(1, len(call.types)))
        return tuple(
            random_array(key, *x) if jnp.issubdtype(x[1], jnp.inexact) else jnp.zeros(*x)
            for key, x in zip(keys, call.types, strict=False)
        )

    with jax.enable_x64(call.use.parameters.modes.x64):
        meant = {} if call.reference is None else {XLA: call.reference}
        sides = meant | call.sides()
        return _side_by_side(sides, operands_of, _TOLERANCE_OF_CALLS, gpu, seconds)


def _side_by_side(
    sides: Mapping[str, Side],
    operands_of: Callable[[int], Operands],
    tolerance: float,
    gpu: Gpu,
    seconds: float,
) -> Measured:
    """Time those of the sides that are right."""
    sides = {key: jax.jit(side) for key, side in sides.items()}
    operands = operands_of(0)
    failures = faults(sides, operands, tolerance)
    # All sides share one rotation; otherwise a side would find the operands of the preceding one
    # in L2.
    rotation = itertools.cycle(beyond_cache(operands, operands_of, gpu.l2_bytes))
    calls = {
        key: lambda side=side: side(*next(rotation))
        for key, side in sides.items()
        if key not in failures
    }
    return Measured(timed(calls, seconds) if calls else {}, failures)


def plan_of(candidate: Candidate, gpu: Gpu) -> LaunchPlan | str:
    """Return a candidate's plan, or why it has none."""
    try:
        return candidate.plan(gpu)
    except (CompileError, ValueError) as error:
        return f"cannot be planned: {error}"


def faults(sides: Mapping[str, Side], operands: Operands, tolerance: float) -> dict[str, str]:
    """Run each side once; return those that fail or differ from the first that runs."""
    found: dict[str, str] = {}
    expected: Any = None
    for key, side in sides.items():
        try:
            result = ready(side(*operands))
            expected = result if expected is None else expected
            pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
            wrong = next(filter(None, (_wrong(*pair, tolerance) for pair in pairs)), None)
        # One side's lack of memory or bug must not keep the others from being measured.
        except (RuntimeError, ValueError, TypeError) as error:
            wrong = f"failed: {error}"
        if wrong:
            found[key] = wrong
    return found


def _wrong(result: Array, expected: Array, tolerance: float) -> str | None:
    if not result.size:
        return None
    typical, most = map(float, differences(result, expected))
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        tolerance = 0.0
    # Comparisons with NaN are false, so a NaN is wrong.
    if typical <= tolerance and most <= _DEVIATION * tolerance:
        return None
    return f"wrong: {typical:.1e} from the first result in root mean square, {most:.1e} at most"


@jax.jit
def differences(result: Array, expected: Array) -> tuple[Array, Array]:
    """Return the root mean square and the maximum of a difference, in parts of that of a result."""
    real = jnp.promote_types(expected.dtype, jnp.float32)
    # Integers are subtracted as integers, because float32 does not represent all of them.
    exact = expected.dtype if jnp.issubdtype(expected.dtype, jnp.integer) else real
    difference = jnp.abs((result.astype(exact) - expected.astype(exact)).astype(real))
    norm = jnp.sqrt(jnp.mean(jnp.square(expected.astype(real))))
    # The norm is 0 if all elements are.
    norm = jnp.maximum(norm, _finfo(real).tiny)
    return jnp.sqrt(jnp.mean(jnp.square(difference))) / norm, jnp.max(difference) / norm


def timed(sides: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the median device time, in microseconds, of a call of each side.

    The sides are compiled and warm. Unattributed is raised if the profile does not say which of
    them the GPU worked for.
    """
    keys = list(sides)
    share = seconds / (_ROUNDS * len(keys))
    calls = {}
    for key, side in sides.items():
        one = wall_seconds(functools.partial(repeated, side, 4)) / 4
        calls[key] = min(_MOST_CALLS, max(1, int(share / one)))
    # The first side of a round rotates. A round before the first warms up.
    firsts = [i % len(keys) for i in range(_ROUNDS)]
    order = [key for first in firsts for key in (*keys[first:], *keys[:first])]
    for key in keys:
        ready(repeated(sides[key], calls[key]))
    times: dict[str, list[float]] = {key: [] for key in keys}
    try:
        blocks = run_blocks(sides, calls, order)
    except Unattributed as error:
        raise Unattributed(
            f"JAX's profiler does not show the kernels of each candidate: {error}; end other "
            "profilers of this GPU and tune again"
        ) from error
    for block in blocks:
        times[block.side].append(1e6 * block.device_seconds(calls[block.side]))
    return {key: statistics.median(found) for key, found in times.items()}
