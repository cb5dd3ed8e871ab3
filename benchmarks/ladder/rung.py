"""What a ladder is made of: rungs, and the problems that they are climbed for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

import jax_tilekern
from benchmarks.errors import BenchmarkError
from jax_tilekern.inspection.kernel_report import KernelReport

Sizes = tuple[int, ...]
Function = Callable[..., Any]


class LadderError(BenchmarkError):
    """A command line that names no problem or no rung; the message says what there is."""


# The rungs' CUDA files, a folder for each ladder.
SOURCES = Path(__file__).parents[2] / "examples" / "ladder"


def rungs_digest(ladder: str) -> str:
    """Return a digest of a ladder's CUDA files and of the module that launches them."""
    files = [
        *sorted((SOURCES / ladder).iterdir()),
        Path(__file__).with_name(f"{ladder}.py"),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kernel(file: str, **settings: Any) -> jax_tilekern.CudaKernel:
    """Return the kernel of a rung's file, ``"<ladder>/<number>_<name>.cu"``."""
    return jax_tilekern.cuda_kernel(SOURCES / file, **settings)


def blocks(size: int, of: int) -> int:
    """Return how many blocks ``of`` elements each cover ``size`` elements."""
    return -(-size // of)


def multiples(**of: int) -> Callable[..., str | None]:
    """Return a :attr:`Rung.cannot` that wants named sizes to be multiples of numbers."""

    def cannot(**sizes: int) -> str | None:
        odd = [f"{name} {sizes[name]}" for name, n in of.items() if sizes[name] % n]
        return f"takes multiples of {max(of.values())}, not {' and '.join(odd)}" if odd else None

    return cannot


@dataclass(frozen=True)
class Rung:
    """One way to compute a problem.

    Attributes
    ----------
    name
        What is shown.
    stages
        Functions of arrays; each takes what the one before returns. Some are kernels of
        :func:`jax_tilekern.cuda_kernel`.
    source
        The CUDA file whose idea it is; ``None`` for the library's own and for ``jnp``.
    cannot
        Says of a problem's named sizes why it cannot take them, or ``None`` if it can.
    on_host
        What is left to do on the host with the last stage's result. The time is then the host's.
    compute_capability
        The least that it runs on.
    arithmetic
        Where that is not the problem's.
    """

    name: str
    stages: tuple[Function, ...]
    source: str | None = None
    cannot: Callable[..., str | None] = lambda **_: None
    on_host: Function | None = None
    compute_capability: tuple[int, int] = (8, 0)
    arithmetic: str | None = None

    def __call__(self, *operands: Any) -> Any:
        """Compute the problem on the device."""
        for stage in self.stages:
            result = stage(*operands)
            operands = result if isinstance(result, tuple) else (result,)
        return result

    def reports(self, operands: tuple[Any, ...]) -> Iterator[KernelReport]:
        """Compile the kernels for the current GPU; yield what they take."""
        for stage in self.stages:
            if isinstance(stage, jax_tilekern.CudaKernel):
                yield stage.report(*operands)
            result = jax.eval_shape(stage, *operands)
            operands = result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True)
class Problem:
    """What a ladder computes, at one size.

    Attributes
    ----------
    title
        What is shown.
    sizes
        By name.
    operands
        Shapes and types.
    rungs
        From the first to the library's own.
    peers
        ``jnp``'s own.
    bytes
        Read and written at the least.
    flops
        Operations, where they are what counts.
    bound
        What cannot be exceeded: the memory's bandwidth, of a copy or of reading, or arithmetic.
    arithmetic
        Name of what multiplies and adds.
    sums
        Whether results are sums of many products.
    truth
        Says what is right; ``None`` for the first of the peers.
    """

    title: str
    sizes: dict[str, int]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    rungs: tuple[Rung, ...]
    peers: tuple[Rung, ...]
    bytes: int
    flops: int = 0
    bound: Literal["copy", "read", "arithmetic"] = "copy"
    arithmetic: str = "float32"
    sums: bool = False
    truth: Function | None = None

    def types_enabled(self) -> AbstractContextManager[Any]:
        """Return a context in which the operands' types exist."""
        wide = any(operand.dtype.itemsize == 8 for operand in self.operands)
        return jax.enable_x64(True) if wide else nullcontext()


@dataclass(frozen=True)
class Ladder:
    """Rungs for an operation.

    Attributes
    ----------
    size_names
        Names of the sizes, for each number of them that makes a problem.
    defaults
        Sizes, as the command line has them.
    problems
        Returns the problems of sizes.
    """

    size_names: tuple[tuple[str, ...], ...]
    defaults: tuple[str, ...]
    problems: Callable[[Sizes], tuple[Problem, ...]]

    @property
    def size_form(self) -> str:
        """How a size is written."""
        return " or ".join("x".join(name.upper() for name in names) for names in self.size_names)

    def parse(self, text: str) -> tuple[Problem, ...]:
        """Return the problems of a size.

        Raises
        ------
        LadderError
            If it is none.
        """
        fields = text.split("x")
        numbers = [int(field) for field in fields if field.isascii() and field.isdigit()]
        wanted = {len(names) for names in self.size_names}
        if len(numbers) != len(fields) or len(fields) not in wanted or min(numbers) < 1:
            raise LadderError(f"size {text!r} is not {self.size_form}, of positive numbers")
        # Kernels count rows and columns in 32 bits.
        if math.prod(numbers) >= 2**40 or (len(numbers) > 1 and max(numbers) >= 2**31):
            raise LadderError(f"size {text!r} is too large")
        return self.problems(tuple(numbers))
