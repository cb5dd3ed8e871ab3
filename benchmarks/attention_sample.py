"""``attention_sample``: random calls of attention by the kernels, by cuDNN and by XLA.

    python -m benchmarks attention_sample --count 60 --seed 2 --minutes 1.5 --json FILE

Shapes are those of models, values and gradients alone. ``XLA`` is the library's program in blocks
of scores, ``ours`` the side that the policy takes. A side that does not have the call is left out,
and XLA's of most calls that cuDNN has.
``fit_policy`` takes the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.errors import BenchmarkError
from benchmarks.measure import failure_of
from benchmarks.programs import RowsCommand, on_gpu
from benchmarks.record import Record
from benchmarks.timing import Runs, Times, times_of_rows, wall_times
from jax_tilekern.interop import compat
from jax_tilekern.ops.attention import primitives
from jax_tilekern.ops.attention.kernel_lowering import choice_of, ways_by_key
from jax_tilekern.plans.attention.ways import CUDNN, KERNELS
from jax_tilekern.plans.gpu import NoGpu
from jax_tilekern.primitives.operation import Rewrite

# The primitive of each pass, by the names of their descriptions.
PASSES: Mapping[str, str] = {"attention value": "forward", "attention gradient": "backward"}
_KINDS = {"plain": 4, "causal": 7, "window": 3, "bias": 2, "soft cap": 2, "decode": 2}
_FEATURES = 32, 64, 64, 64, 80, 96, 128, 128, 128, 128, 192, 256
_HEADS = 4, 8, 12, 16, 16, 24, 32, 32, 40, 64
_CAP = 30.0
# What a call may have: multiply-adds of a product, bytes of its operands, and those of a bias.
_MOST_OPERATIONS, _MOST_BYTES, _MOST_BIAS = 1.2e11, 1 << 29, 1 << 28
_CALLS_AT_A_TIME, _ROUNDS = 24, 3
# XLA compiles for seconds. Where cuDNN has a call, one of so many has XLA's side.
_OF_XLA = 3
# Results of more bytes are not compared.
_COMPARED_BYTES = 1 << 25

Sides = dict[str, Any]


@dataclass(frozen=True)
class AttentionCall:
    """A pass of a random call.

    Attributes
    ----------
    description
        A key of ``PASSES``.
    seed, index
        What draws the call, the same one for both passes.
    """

    description: str
    seed: int
    index: int

    @functools.cached_property
    def drawn(self) -> _Drawn:
        """The call, which is drawn again while it exceeds a limit."""
        rng = np.random.default_rng((self.seed, self.index))
        while True:
            found = _Drawn.by(rng)
            if found.fits:
                return found

    @property
    def pass_name(self) -> str:
        return PASSES[self.description]

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.description} {self.seed}/{self.index}: {self.drawn}"

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Types of the operands of the primitive, without the cotangent of the logarithms."""
        query, key, value, *arrays = self.drawn.structs
        if self.pass_name == "forward":
            return [query, key, value, *arrays]
        batch, queries, heads, _ = query.shape
        lse = jax.ShapeDtypeStruct((batch, heads, queries), np.float32)
        return [query, key, value, query, lse, query, *arrays]

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """Parameters of the primitive."""
        traced = jax.make_jaxpr(functools.partial(jtk.attention, **self.drawn.options))
        jaxpr = traced(*self.drawn.structs).jaxpr
        (scores,) = (
            eqn.params["scores"]
            for eqn in compat.leaf_equations(jaxpr)
            if eqn.primitive.name == "tilekern_attention"
        )
        if self.pass_name == "forward":
            return {"scores": scores}
        return {"scores": scores, "wanted": tuple(range(len(self.drawn.structs)))}

    def types_enabled(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing, because no call has 64-bit types."""
        return nullcontext()

    def function(self, _: Any = None) -> Callable[..., Any]:
        """Return the pass, as the policy in force computes it."""
        return self._of(functools.partial(primitives.BINDS[self.pass_name], **self.params))

    def by_cudnn(self) -> Callable[..., Any] | None:
        """Return the pass by cuDNN, if that has it."""
        found = self.ways.get(CUDNN)
        return None if found is None else self._of(found.function)

    @property
    def ways(self) -> dict[str, Rewrite]:
        """What computes the pass beside XLA; nothing without a GPU."""
        try:
            return ways_by_key(self.pass_name, self.avals, has_lse=False, **self.params)[0]
        except NoGpu:
            return {}

    @property
    def avals(self) -> list[Any]:
        """Types of the operands of the primitive."""
        if self.pass_name == "forward":
            return self.structs
        return [*self.structs[:6], self.structs[4], *self.structs[6:]]

    def _of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.pass_name == "forward":
            return function

        def gradient(*given: Any) -> Any:
            return function(*given[:6], jnp.zeros_like(given[4]), *given[6:])

        return gradient


@dataclass(frozen=True)
class _Drawn:
    """A call: its kind, type, and sizes."""

    kind: str
    dtype: str
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    features: int
    window: int

    @classmethod
    def by(cls, rng: np.random.Generator) -> _Drawn:
        """Draw a call of any size."""

        def size(least: int, most: int) -> int:
            found = round(math.exp(rng.uniform(math.log(least), math.log(most))))
            forms = found, 1 << round(math.log2(found)), -(-found // 64) * 64
            return min(most, int(rng.choice(forms)))

        kind = str(rng.choice(list(_KINDS), p=np.array([*_KINDS.values()]) / sum(_KINDS.values())))
        keys = size(128, 16384)
        queries = keys
        if kind == "decode":
            queries = size(1, 64)
        elif kind == "plain" and rng.random() < 0.3:
            queries = size(128, 16384)
        if kind == "bias":
            queries, keys = queries + queries % 2, keys + keys % 2
        heads, features = int(rng.choice(_HEADS)), int(rng.choice(_FEATURES))
        group = int(rng.choice([x for x in (1, 1, 4, 8) if heads % x == 0]))
        dtype = str(rng.choice(["bfloat16", "float16"], p=[0.75, 0.25]))
        window = size(16, max(17, keys // 2)) if kind == "window" else 0
        batch = size(1, 16)
        return cls(kind, dtype, batch, queries, keys, heads, heads // group, features, window)

    @property
    def fits(self) -> bool:
        """Whether no limit is exceeded."""
        scores = self.heads * self.queries * self.keys
        bias = 2 * scores if self.kind == "bias" else 0
        sizes = (math.prod(x.shape) * 2 for x in self.structs)
        operations = self.batch * scores * self.features
        return operations <= _MOST_OPERATIONS and bias <= _MOST_BIAS and sum(sizes) <= _MOST_BYTES

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Types of query, key, value and the bias, if there is one."""
        query = self.batch, self.queries, self.heads, self.features
        key = self.batch, self.keys, self.key_heads, self.features
        bias = [(1, self.heads, self.queries, self.keys)] if self.kind == "bias" else []
        return [jax.ShapeDtypeStruct(x, jnp.dtype(self.dtype)) for x in (query, key, key, *bias)]

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the call."""
        options: dict[str, dict[str, Any]] = {
            "causal": {"is_causal": True},
            "window": {"is_causal": True, "local_window_size": (self.window - 1, 0)},
            "soft cap": {"is_causal": True, "score_mod": _capped},
        }
        return options.get(self.kind, {})

    def __str__(self) -> str:
        lengths = (
            f"{self.queries}" if self.queries == self.keys else f"{self.queries} on {self.keys}"
        )
        heads = (
            f"{self.heads}" if self.heads == self.key_heads else f"{self.heads} on {self.key_heads}"
        )
        kind = f"{self.kind} of {self.window}" if self.window else self.kind
        return f"{kind}, {self.dtype}, {self.batch}x{lengths}, {heads} heads of {self.features}"


def _capped(score: Any, *_: Any) -> Any:
    return _CAP * jnp.tanh(score / _CAP)


def drawn_calls(seed: int, count: int) -> list[AttentionCall]:
    """Return both passes of each call."""
    return [AttentionCall(name, seed, i) for i in range(count) for name in PASSES]


class _Compiled:
    """A pass with its compiled sides."""

    def __init__(self, call: AttentionCall) -> None:
        self.call, self.sides, self.failures = call, Sides(), dict[str, str]()
        own, ways = call.function(), call.ways
        sides: dict[str, tuple[Any, Any]] = {}
        # What XLA alone computes is not chosen.
        is_measured = ways or not on_gpu()
        if is_measured and (CUDNN not in ways or call.index % _OF_XLA == 0):
            sides["XLA"] = own, jtk.policy("xla")
        if KERNELS in ways:
            sides[KERNELS] = own, jtk.policy("kernels")
        by_cudnn = call.by_cudnn()
        if by_cudnn is not None:
            sides[CUDNN] = by_cudnn, nullcontext()
        for key, (function, context) in sides.items():
            try:
                with context:
                    # Sides of one function differ in their policies.
                    traced = jax.jit(lambda *args, function=function: function(*args))
                    self.sides[key] = traced.lower(*call.structs).compile()
            except Exception as error:
                self.failures[key] = failure_of(error)

    def run(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Run each side, and return its results."""
        results: dict[str, Any] = {}
        for key, side in list(self.sides.items()):
            try:
                results[key] = jax.block_until_ready(side(*operands))
            except Exception as error:
                self.failures[key] = failure_of(error)
                del self.sides[key]
        return results

    def row(self, seconds: Mapping[str, float], errors: Mapping[str, float]) -> Record:
        """Return the row of the record."""
        call = self.call
        keys = {x for x in (CUDNN, KERNELS) if x in seconds}
        taken = "XLA"
        if keys:
            choice, _ = choice_of(call.pass_name, call.avals, keys, **call.params)
            taken = "XLA" if choice.candidate is None else choice.candidate.key
        ours = seconds.get(taken, min(seconds.values()))
        return {
            "name": call.name,
            "error": errors,
            "seconds": {"ours": ours, **seconds},
            "ratio": {peer: seconds[peer] / ours for peer in ("XLA", CUDNN) if peer in seconds},
            "taken": taken,
            "kernels": [x if x in keys else f"- {x}" for x in (taken,)],
            "draw": list(dataclasses.astuple(call)),
            **({"failures": self.failures} if self.failures else {}),
        }


def _operands(call: AttentionCall) -> list[Any]:
    """Return query, key, value and bias of normal numbers, which the host makes."""
    numbers = _normal(call.drawn.dtype)

    def array(i: int, struct: Any) -> Any:
        values = np.resize(numbers[i << 10 :], math.prod(struct.shape))
        return jax.device_put(values.reshape(struct.shape))

    return [array(i, x) for i, x in enumerate(call.drawn.structs)]


@functools.cache
def _normal(dtype: str) -> Any:
    return np.random.default_rng(0).standard_normal(1 << 24, np.float32).astype(jnp.dtype(dtype))


def _errors(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest difference from XLA's first result, relative to its largest number."""
    first = {key: jax.tree.leaves(x)[0] for key, x in results.items()}
    if "XLA" not in first or first["XLA"].nbytes > _COMPARED_BYTES:
        return {}
    wide = {key: np.asarray(x).astype(np.float32) for key, x in first.items()}
    right = wide.pop("XLA")
    largest = float(np.abs(right).max(initial=1e-30))
    return {key: float(np.abs(x - right).max(initial=0)) / largest for key, x in wide.items()}


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    end = time.monotonic() + 60 * arguments.minutes
    calls = drawn_calls(arguments.seed, arguments.count)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for start in range(0, len(calls), _CALLS_AT_A_TIME):
            if time.monotonic() > end:
                return
            # NVRTC and XLA compile without the interpreter's lock.
            yield from _measured(
                list(pool.map(_Compiled, calls[start : start + _CALLS_AT_A_TIME])),
                arguments.seconds,
            )


def _measured(passes: Sequence[_Compiled], seconds: float) -> Iterator[Record]:
    """Yield the rows of pairs of passes, a value and its gradient, of one profile."""
    runs: list[dict[str, Any]] = []
    errors: list[dict[str, float]] = []
    for value, gradient in zip(passes[::2], passes[1::2], strict=True):
        operands = _operands(value.call)
        results = value.run(operands)
        if not results:
            raise BenchmarkError(f"{value.call.name}: {value.failures}")
        out, lse = next(iter(results.values()))
        given = [*operands[:3], out, lse, operands[0], *operands[3:]]
        of_gradient = gradient.run(given)
        for each, read, of_each in ((value, operands, results), (gradient, given, of_gradient)):
            errors.append(_errors(of_each))
            runs.append({key: functools.partial(x, *read) for key, x in each.sides.items()})
    timed = [i for i, row in enumerate(runs) if row]
    times = _times([runs[i] for i in timed], seconds)
    for i, found in zip(timed, times, strict=True):
        yield passes[i].row(found.medians(), errors[i])


def _times(runs: Sequence[Runs], seconds: float) -> Sequence[Times]:
    """Return the times of several passes, for which one profile serves on a GPU."""
    if on_gpu():
        return times_of_rows(runs, seconds, _ROUNDS)
    return [wall_times(x, seconds) for x in runs]


COMMAND = RowsCommand(
    "time random calls of attention by the kernels, cuDNN and XLA", _rows, 0.05,
    count={"type": int, "default": 60, "help": "calls, each a value and a gradient (%(default)s)"},
    minutes={"type": float, "default": math.inf, "help": "begin no calls after this time"},
    seed={"type": int, "default": 0, "help": "even ones are for fitting, odd ones for reporting"},
)  # fmt: skip
