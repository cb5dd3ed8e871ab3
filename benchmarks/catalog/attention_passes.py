"""Passes of attention at the sizes of models: its value, and its gradient alone.

``sample`` times them, and the policy chooses of each pass apart. One seed and index draw one call
for both. XLA's side is the library's program in blocks of scores, which the policy would take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.catalog.call import Description, Operand, Side, random_arrays
from benchmarks.catalog.draw import Draw
from jax_tilekern.interop import compat
from jax_tilekern.ops.attention import primitives
from jax_tilekern.ops.attention.call import Call
from jax_tilekern.ops.attention.choice import ways_by_key
from jax_tilekern.plans.attention.ways import CUDNN, KERNELS
from jax_tilekern.plans.gpu import NoGpu
from jax_tilekern.primitives.operation import Rewrite

_KINDS = {"plain": 4, "causal": 7, "window": 3, "bias": 2, "soft cap": 2, "decode": 2}
_FEATURES = 32, 64, 64, 64, 80, 96, 128, 128, 128, 128, 192, 256
_HEADS = 4, 8, 12, 16, 16, 24, 32, 32, 40, 64
_CAP = 30.0
# What a call may have: multiply-adds of a product, bytes of its operands, and those of a bias.
_MOST_OPERATIONS, _MOST_BYTES, _MOST_BIAS = 1.2e11, 1 << 29, 1 << 28
# XLA compiles for seconds. Where cuDNN has a call, this share has XLA's side.
_OF_XLA = 1 / 3


@dataclass(frozen=True)
class _Sizes:
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
    def drawn(cls, rng: np.random.Generator) -> _Sizes:
        """Draw calls until one exceeds no limit."""
        while not (found := cls._any(rng)).fits:
            pass
        return found

    @classmethod
    def _any(cls, rng: np.random.Generator) -> _Sizes:
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
        bias = 2 * self.heads * self.queries * self.keys if self.kind == "bias" else 0
        sizes = (math.prod(x.shape) * 2 for x in self.operands)
        within = bias <= _MOST_BIAS and sum(sizes) <= _MOST_BYTES
        return within and self.operations <= _MOST_OPERATIONS

    @property
    def operations(self) -> float:
        """The multiply-adds of a product."""
        return float(self.batch * self.heads * self.queries * self.keys * self.features)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Query, key, value and the bias, if there is one."""
        query = self.batch, self.queries, self.heads, self.features
        key = self.batch, self.keys, self.key_heads, self.features
        bias = [(1, self.heads, self.queries, self.keys)] if self.kind == "bias" else []
        return tuple(
            Operand(x, jnp.dtype(self.dtype), (0, 1, 2, 3)) for x in (query, key, key, *bias)
        )

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


class _Pass:
    """A pass of a call: see :class:`benchmarks.catalog.call.Sampled`."""

    is_wide = False

    def __init__(self, draw: Draw, name: str) -> None:
        self.name = name
        self.sizes = _Sizes.drawn(draw.rng)
        self.has_xla = draw.chance(_OF_XLA)
        self.operands = self.sizes.operands

    def __str__(self) -> str:
        return str(self.sizes)

    @property
    def operations(self) -> float:
        """The operations of the pass: two products of a value, and five of a gradient."""
        return 2 * self.sizes.operations * (2 if self.name == "forward" else 5)

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Types of the operands; a gradient's are those of its primitive but for ``d_lse``."""
        operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.operands]
        if self.name == "forward":
            return operands
        results = jax.eval_shape(self._bound("forward"), *operands)
        return [*operands[:3], *results, operands[0], *operands[3:]]

    @property
    def _d_lse(self) -> int:
        """The position of ``d_lse`` among the operands of a gradient, behind which are arrays."""
        return len(self.structs) - (len(self.operands) - 3)

    def values(self, seed: int) -> Sequence[Any]:
        """Return normal numbers, and for a gradient the results of the value."""
        operands = random_arrays(self.operands, seed)
        if self.name == "forward":
            return operands
        results = jax.jit(self._bound("forward"))(*operands)
        return [*operands[:3], *results, operands[0], *operands[3:]]

    def of_namespace(self, _: Any) -> Callable[..., Any]:
        """Return the pass, as the policy in force computes it."""
        return self._of_structs(self._bound(self.name))

    def sides(self) -> dict[str, Side]:
        """Return XLA's blocks of scores, the kernels and cuDNN, where they have the pass."""
        own, ways = self.of_namespace(jtk), self.ways
        sides: dict[str, Side] = {}
        if CUDNN not in ways or self.has_xla:
            sides["XLA"] = Side(own, functools.partial(jtk.policy, "xla"))
        if KERNELS in ways:
            sides[KERNELS] = Side(own, functools.partial(jtk.policy, "kernels"))
        if CUDNN in ways:
            sides[CUDNN] = Side(self._of_structs(ways[CUDNN].function))
        return sides

    @property
    def ways(self) -> Mapping[str, Rewrite]:
        """What computes the pass beside XLA; nothing without a GPU."""
        types = self.structs
        if self.name == "backward":
            types.insert(self._d_lse, types[4])
        try:
            call = Call(self.name, tuple(types), **self._params(self.name))
            return ways_by_key(call, has_lse=False)[0]
        except NoGpu:
            return {}

    def _bound(self, name: str) -> Callable[..., Any]:
        return functools.partial(primitives.BINDS[name], **self._params(name))

    def _params(self, name: str) -> dict[str, Any]:
        """Return the parameters of a primitive."""
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.operands]
        traced = jax.make_jaxpr(functools.partial(jtk.attention, **self.sizes.options))(*types)
        (scores,) = (
            eqn.params["scores"]
            for eqn in compat.leaf_equations(traced.jaxpr)
            if eqn.primitive.name == "tilekern_attention"
        )
        wanted = {} if name == "forward" else {"wanted": tuple(range(len(types)))}
        return {"scores": scores} | wanted

    def _of_structs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the operands, of one of the primitive's."""
        if self.name == "forward":
            return function

        def gradient(*given: Any) -> Any:
            first, others = given[: self._d_lse], given[self._d_lse :]
            return function(*first, jnp.zeros_like(given[4]), *others)

        return gradient


SAMPLES = [
    Description(name, functools.partial(_Pass, name=of_primitive), shares_calls=True)
    for name, of_primitive in (("attention value", "forward"), ("attention gradient", "backward"))
]
