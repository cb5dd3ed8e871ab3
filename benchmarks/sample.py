"""``sample``: random calls of any described operation, as ``benchmarks/catalog`` draws them.

    python -m benchmarks sample --operations top_k linalg.svd --count 20 --seed 1 --json FILE

Shapes, types, layouts and options are the description's, and sizes those of the device. The peer is
JAX's function of the same name or, where there is none, the operation in plain JAX as the catalog
writes it; that of ``scaled_matmul, decode`` is a product of bfloat16. Sides beside it have a key
each: those of ``attention value`` and ``attention gradient`` are the kernels and cuDNN. With
``--candidates K`` a call of one product, which may have an epilogue, has a side for each of K
candidates. A row's ``draw`` has the description, seed, index and device that draw its call again:
``fit_policy`` takes records of these.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS, SAMPLED
from benchmarks.catalog.call import Sampled, Side
from benchmarks.catalog.draw import Draw
from benchmarks.commands import ProgramsCommand
from benchmarks.errors import BenchmarkError
from benchmarks.programs import SIDE_BY_SIDE, Arrays, Errors, Program, on_gpu
from benchmarks.regret import spread
from benchmarks.samples import LIMITS
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.tuning.tuner import TunedChoices, products_of, using

# Factor of the sizes that tests draw.
_SCALES = {"cpu": 64, "gpu": 4096}
_DEFAULT = tuple(name for name in SAMPLED if name in DESCRIPTIONS)
_ATTEMPTS = 1000


@dataclass(frozen=True)
class DrawnCall:
    """A call of a description at the sizes of a device.

    Attributes
    ----------
    description, seed, index, device
        What draws it; the device is ``"cpu"`` or ``"gpu"``.
    """

    description: str
    seed: int
    index: int
    device: str = "gpu"

    @functools.cached_property
    def call(self) -> Sampled:
        """The call, which is drawn again while it exceeds a limit of the device.

        Raises
        ------
        BenchmarkError
            If every call does.
        """
        most_bytes, operations = LIMITS[self.device]
        description = SAMPLED[self.description]
        key = [self.seed, self.index]
        if not description.shares_calls:
            key.append(zlib.crc32(self.description.encode()))
        draw = Draw(np.random.default_rng(key), scale=_SCALES[self.device])
        for _ in range(_ATTEMPTS):
            call: Sampled = description.draw(draw)
            sizes = [math.prod(x.shape) * x.dtype.itemsize for x in call.operands]
            if not all(sizes) or sum(sizes) > most_bytes:
                continue
            try:
                if call.operations <= operations:
                    return call
            except (TypeError, ValueError):
                continue  # JAX refuses it.
        raise BenchmarkError(f"every call of {self.description} exceeds a limit: {most_bytes} B")

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.description} {self.seed}/{self.index}: {self.call}"

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes, as they are stored, and types of the operands."""
        return self.call.structs

    def types_enabled(self) -> AbstractContextManager[Any]:
        """Let JAX have 64-bit types inside the context if the call has them."""
        context: AbstractContextManager[Any] = jax.enable_x64(self.call.is_wide)
        return context

    def function(self, namespace: Any) -> Callable[..., Any]:
        """Return the call of a namespace of functions, of the operands as they are stored."""
        return self.call.of_namespace(namespace)


def _errors(_: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the largest difference of finite elements, over the largest of XLA's.

    Where XLA has no result, they are another side's.
    """
    peer = next(side for side in ("XLA", *results) if side in results and side != "ours")
    ours, theirs = (jax.tree.leaves(results[side])[0] for side in ("ours", peer))
    with jax.enable_x64(True):
        return {"ours": float(_largest_difference(ours, theirs))}


@jax.jit
def _largest_difference(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    wide = np.complex128 if jnp.issubdtype(ours.dtype, jnp.complexfloating) else np.float64
    ours, theirs = ours.astype(wide), theirs.astype(wide)
    finite = jnp.isfinite(ours) & jnp.isfinite(theirs)
    error = jnp.max(jnp.abs(ours - theirs), initial=0, where=finite)
    return error / jnp.max(jnp.abs(theirs), initial=1e-30, where=finite)


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    device = "gpu" if on_gpu() else "cpu"
    for index in range(arguments.count):
        for name in arguments.operations:
            drawn = DrawnCall(name, arguments.seed, index, device)
            yield drawn_program(drawn, arguments.policy, arguments.candidates)


def drawn_program(drawn: DrawnCall, policy: str, most: int = 0) -> Program:
    """Return the program of a call, with a side for each of at most so many candidates."""
    ours, sides = drawn.function(jtk), drawn.call.sides()
    for key, choice in choices_of_candidates(drawn, most).items() if most else ():
        sides[key] = Side(ours, functools.partial(using, choice))
    contexts = {key: side.context for key, side in sides.items() if side.context}
    return Program(
        drawn.name, functools.partial(drawn.call.values, drawn.index),
        {"ours": ours} | {key: side.function for key, side in sides.items()},
        _errors, group=f"`{drawn.description}`", wide=drawn.call.is_wide,
        contexts={"ours": functools.partial(jtk.policy, policy), **contexts},
        beyond_cache=True, fields={"draw": list(dataclasses.astuple(drawn))},
        side_by_side=SIDE_BY_SIDE,
    )  # fmt: skip


def choices_of_candidates(call: DrawnCall, most: int) -> dict[str, TunedChoices]:
    """Return choices of each of so many candidates of a call that has one product, by their keys.

    They are those of the product alone, which tuning chooses among. The product that XLA would
    compute before an epilogue may have a wider type, and comes after it.
    """
    with call.types_enabled():
        products = products_of(call.function(jtk), *call.structs)
    sizes = {(x.geometry.batch, x.geometry.m, x.geometry.n, x.geometry.k) for x in products}
    found = candidates(products[0], current_gpu()) if len(sizes) == 1 else NoKernel("")
    result: dict[str, TunedChoices] = {}
    for candidate in [] if isinstance(found, NoKernel) else spread(found, most):
        result[candidate.key] = TunedChoices(None)
        result[candidate.key].put(products[0], current_gpu(), candidate.key)
    return result


COMMAND = ProgramsCommand(
    "random calls of any operation against plain JAX", _programs, 0.1,
    operations={"nargs": "+", "choices": SAMPLED, "default": _DEFAULT, "metavar": "NAME"},
    count={"type": int, "default": 10, "help": "calls of an operation (%(default)s)"},
    seed={"type": int, "default": 0, "help": "even ones are for fitting, odd ones for reporting"},
    policy={"choices": ("auto", "kernels"), "default": "auto", "help": "of the library"},
    candidates={"type": int, "metavar": "K", "default": 0, "help": "sides of each product beside"},
)  # fmt: skip
