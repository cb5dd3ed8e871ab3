"""Tuning: a product's kernels are measured once, and the fastest is chosen from then on.

Files store the choices, and later plans follow them; see ``plans/tuned.py``. JAX
caches functions that it has lowered already: they change with :func:`jax.clear_caches` or in the
next process.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_tilekern.compilation.nvrtc import nvrtc
from jax_tilekern.compilation.source_digests import source_digests
from jax_tilekern.inspection.columns import columns
from jax_tilekern.inspection.tracing import traced
from jax_tilekern.ops.cuda_kernel import CudaKernel
from jax_tilekern.ops.kernel_tuning import TunableCall
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import Gpu, NoGpu, current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.tuned import (
    XLA,
    TunedChoice,
    TunedChoices,
    current_choices,
    export,
    load,
    recorded_products,
    text_of,
    using,
)
from jax_tilekern.tuning.product_timing import Measured, measure, measure_call

__all__ = ["TunedChoices", "TunedProduct", "Tuning", "export", "load", "tune", "using"]

Problem = Product | TunableCall

# Candidates within this factor of the fastest are equally good. Among them the model's choice comes
# first, and XLA's own product last.
_AS_GOOD = 1.01
# So many candidates are measured, the best by the cost model, and the best of other families.
_MEASURED = 8


def products_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Product]:
    """Return the products in ``function`` that kernels can compute, each once.

    The function is traced and lowered for the GPU to plan for, not executed. Its arguments are
    those of :func:`jax_tilekern.explain`.
    """
    return [x for x in problems_of(function, *args, **kwargs) if isinstance(x, Product)]


def problems_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Problem]:
    """Return what can be tuned in ``function``, each once: also calls of users' kernels."""
    with recorded_products() as recorded:
        traced("tune", function, args, kwargs).lower(lowering_platforms=("cuda",))
    return list({text_of(problem): problem for problem in reversed(recorded)}.values())[::-1]


def short_name(product: Problem) -> str:
    """Return a product in short, such as ``bf16 64x32x16 NT -> float32``; or a call."""
    if isinstance(product, TunableCall):
        return str(product)
    geometry = product.geometry
    sizes = "x".join(map(str, (*geometry.batch, geometry.m, geometry.n, geometry.k)))
    lhs = "N" if geometry.lhs_strides[-1] == 1 else "T"
    rhs = "N" if geometry.rhs_strides[-1] == 1 else "T"
    return f"{product.arithmetic} {sizes} {lhs}{rhs} -> {product.out_dtype}"


@dataclass(frozen=True)
class TunedProduct:
    """The result of tuning one product, or one call of a user's kernel.

    Attributes
    ----------
    product
        The product or call.
    choice
        The measured choice, new or earlier; ``None`` if nothing ran.
    failures
        Why candidates were not measured, by key.
    known
        Whether it had been tuned before.
    """

    product: Problem
    choice: TunedChoice | None
    failures: Mapping[str, str]
    known: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return the entries of a line of :class:`Tuning`."""
        choice = self.choice
        if choice is None:
            return (str(self), "nothing ran", "", "", "", "")
        tuned, model, xla = (
            "-" if time is None else f"{time:.3g} us" if time < 1000 else f"{time / 1000:.3g} ms"
            for time in map(choice.microseconds.get, (choice.winner, choice.model, XLA))
        )
        winner = f"{choice.winner} (known)" if self.known else choice.winner
        return (str(self), winner, tuned, choice.model, model, xla)

    def __str__(self) -> str:
        """Return the product in short."""
        return short_name(self.product)


class Tuning(tuple[TunedProduct, ...]):
    """The results of tuning the products of a function; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return one line per product."""
        if not self:
            return "no product has a kernel"
        headings = ("product", "winner", "tuned", "model's choice", "its time", "XLA")
        return columns([headings, *(row.cells() for row in self)])


def tune(
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 1.0,
    force: bool = False,
    **kwargs: Any,
) -> Tuning:
    """Measure which kernel is the fastest for each of the library's products in ``function``.

    Calls of :func:`jax_tilekern.cuda_kernel` with parameters to ``tune`` are measured too, with all
    combinations of their values. Kernels are measured on random operands, not in the function,
    which is traced and not executed. Integers in operands of a ``cuda_kernel`` are 0, since they
    may be indices; if ``function`` is such a kernel and its arguments are arrays, it is measured on
    these.
    Functions that are lowered afterwards use the winners. A jitted function that has already run
    uses them after :func:`jax.clear_caches` or in later processes.

    Parameters
    ----------
    function
        Any function that ``jax.jit`` takes, jitted or not.
    *args, **kwargs
        Its arguments: arrays or ``jax.ShapeDtypeStruct``.
    seconds
        Time to measure each product, besides compilation.
    force
        Measure products again that were tuned with these kernels.

    Returns
    -------
    Tuning
        One :class:`TunedProduct` per product; ``print`` it for a table. Each is stored when it is
        measured, even if the rest is interrupted.

    Raises
    ------
    NoGpu
        If JAX has no GPU.
    NvrtcNotFound
        If there is no NVRTC to compile the kernels with.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((512, 512), jnp.bfloat16)
    >>> print(jtk.tune(jtk.matmul, x, x))  # doctest: +SKIP
    """
    gpu = gpu_to_measure()
    own = isinstance(function, CudaKernel) and all(hasattr(x, "nbytes") for x in args)
    problems = problems_of(function, *args, **kwargs)
    return Tuning(
        tune_products(problems, gpu, seconds=seconds, force=force, operands=args if own else None)
    )


def gpu_to_measure() -> Gpu:
    """Return the GPU that products would be measured on.

    Raises
    ------
    NoGpu
        If JAX has no GPU, or plans are made for another one.
    NvrtcNotFound
        If there is no NVRTC to compile the kernels with.
    """
    gpu = current_gpu()
    if jax.default_backend() != "gpu":
        raise NoGpu(
            f"tuning measures on a GPU, and JAX's backend is {jax.default_backend()}; "
            "python -m jax_tilekern doctor says what is missing"
        )
    device = jax.devices()[0].device_kind
    if device != gpu.name:
        raise NoGpu(f"plans are made for {gpu.name}, but the GPU to measure on is {device}")
    nvrtc()
    return gpu


def tune_products(
    problems: Iterable[Problem],
    gpu: Gpu,
    *,
    seconds: float = 1.0,
    force: bool = False,
    operands: Sequence[Any] | None = None,
) -> Iterator[TunedProduct]:
    """Tune products and calls one after the other; yield each when its result is stored.

    Parameters
    ----------
    problems
        The products and calls.
    gpu
        The GPU of this machine.
    seconds, force
        As for :func:`tune`.
    operands
        Of calls; random by default.
    """
    choices = current_choices()
    for problem in problems:
        digest = problem.digest if isinstance(problem, TunableCall) else _digest()
        choice = choices.find(problem, gpu)
        if choice is not None and choice.digest == digest and not force:
            yield TunedProduct(problem, choice, {}, known=True)
            continue
        if isinstance(problem, TunableCall):
            model = next(iter(problem.candidates()))
            measured = measure_call(problem, operands, gpu, seconds)
        else:
            found = candidates(problem, gpu)
            # Every product of products_of() has one.
            assert not isinstance(found, NoKernel)
            model = found[0].key
            measured = measure(problem, _worth_measuring(found), gpu, seconds)
        choice = _chosen(measured, model, digest, xla=isinstance(problem, Product))
        if choice is not None:
            choices.put(problem, gpu, choice)
        yield TunedProduct(problem, choice, measured.failures)


def _worth_measuring(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the best by the model, and the best of every other family of kernels."""
    best_of_family: dict[str, Candidate] = {}
    for candidate in found:
        best_of_family.setdefault(candidate.key.split()[0], candidate)
    best = found[:_MEASURED]
    return [*best, *(candidate for candidate in best_of_family.values() if candidate not in best)]


def _chosen(measured: Measured, model: str, digest: str, *, xla: bool = True) -> TunedChoice | None:
    times = measured.microseconds
    of_kernels = [key for key in times if xla or key != XLA]
    if not of_kernels:
        return None
    in_order = sorted(of_kernels, key=lambda key: (key != model, key == XLA, times[key]))
    good = _AS_GOOD * min(times[key] for key in of_kernels)
    return TunedChoice(
        winner=next(key for key in in_order if times[key] <= good),
        model=model,
        microseconds={key: round(times[key], 3) for key in sorted(times, key=times.__getitem__)},
        method=measured.method,
        digest=digest,
    )


@functools.cache
def _digest() -> str:
    digests = source_digests()
    return hashlib.sha256(f"{digests['cuda']} {digests['plans']}".encode()).hexdigest()[:16]
