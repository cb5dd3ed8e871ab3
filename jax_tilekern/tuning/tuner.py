"""Tuning: a product's kernels are measured once, and the fastest is chosen from then on.

A file stores the choices, and later plans follow them; see ``plans/tuned.py``. JAX caches functions
that it has lowered already: they change with :func:`jax.clear_caches` or in the next process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_tilekern.compilation.nvrtc import nvrtc
from jax_tilekern.inspection.tracing import traced
from jax_tilekern.ops.cuda_kernel.cuda_kernel import CudaKernel
from jax_tilekern.ops.cuda_kernel.tuning import TunableCall
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import Gpu, NoGpu, current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.tuned import (
    XLA,
    TunedChoices,
    current_choices,
    recorded_products,
    text_of,
    using,
)
from jax_tilekern.tuning.product_timing import Measured, measure, measure_call

__all__ = ["TunedChoices", "TunedProduct", "tune", "using"]

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


@dataclass(frozen=True)
class TunedProduct:
    """The result of tuning one product, or one call of a user's kernel.

    Attributes
    ----------
    name
        The product with its sizes, types and strides, or the call.
    winner
        The key of what plans follow; ``"xla"`` is XLA's own product, and ``None`` if nothing ran.
    microseconds
        The median time of each candidate that was measured, by key.
    failures
        Why the others were not measured, by key.
    """

    name: str
    winner: str | None
    microseconds: Mapping[str, float]
    failures: Mapping[str, str]

    def __str__(self) -> str:
        """Return the winner, the times in order, and the failures."""
        in_order = sorted(self.microseconds.items(), key=lambda item: item[1])
        lines = [f"{self.name}: {self.winner or 'nothing ran'}"]
        lines += [f"    {key}: {time:.3g} us" for key, time in in_order]
        lines += [f"    {key}: {why}" for key, why in self.failures.items()]
        return "\n".join(lines)


def tune(
    function: Callable[..., Any], *args: Any, seconds: float = 1.0, **kwargs: Any
) -> tuple[TunedProduct, ...]:
    r"""Measure which kernel is the fastest for each of the library's products in ``function``.

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

    Returns
    -------
    tuple of TunedProduct
        One for each product. A choice is stored when it is measured, even if the rest fails.

    Raises
    ------
    NoGpu
        If JAX has no GPU.
    NvrtcNotFound
        If there is no NVRTC to compile the kernels with.
    RuntimeError
        If JAX's profiler does not show which kernel the GPU worked for, or the device fails.
    OSError, ValueError
        If the file of choices cannot be written, or is another file.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((512, 512), jnp.bfloat16)
    >>> print(*jtk.tune(jtk.matmul, x, x), sep="\n")  # doctest: +SKIP
    """
    gpu = gpu_to_measure()
    own = isinstance(function, CudaKernel) and all(hasattr(x, "nbytes") for x in args)
    problems = problems_of(function, *args, **kwargs)
    return tuple(tuned(x, gpu, seconds, operands=args if own else None) for x in problems)


def gpu_to_measure() -> Gpu:
    """Return the GPU that products would be measured on.

    Raises
    ------
    NoGpu
        If JAX has no GPU, or plans are made for another one.
    NvrtcNotFound
        If there is no NVRTC to compile the kernels with.
    """
    if jax.default_backend() != "gpu":
        raise NoGpu(
            "tune measures kernels on an NVIDIA GPU, and JAX's backend here is "
            f"{jax.default_backend()}, where nothing is tuned; with a GPU, python -m jax_tilekern "
            "doctor says what is missing"
        )
    gpu = current_gpu()
    device = jax.devices()[0].device_kind
    if device != gpu.name:
        raise NoGpu(f"plans are made for {gpu.name}, but the GPU to measure on is {device}")
    nvrtc()
    return gpu


def tuned(
    problem: Problem, gpu: Gpu, seconds: float = 1.0, operands: Sequence[Any] | None = None
) -> TunedProduct:
    """Measure a product or a call on this machine's GPU, store the choice and return it.

    ``operands`` are those of a call; random by default.
    """
    if isinstance(problem, TunableCall):
        model = next(iter(problem.candidates()))
        measured = measure_call(problem, operands, gpu, seconds)
    else:
        found = candidates(problem, gpu)
        # Every product of products_of() has one.
        assert not isinstance(found, NoKernel)
        model = found[0].key
        measured = measure(problem, _worth_measuring(found), gpu, seconds)
    winner = _chosen(measured, model, xla=isinstance(problem, Product))
    if winner is not None:
        current_choices().put(problem, gpu, winner)
    return TunedProduct(text_of(problem), winner, *measured)


def _worth_measuring(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the best by the model, and the best of every other family of kernels."""
    best_of_family: dict[str, Candidate] = {}
    for candidate in found:
        best_of_family.setdefault(candidate.key.split()[0], candidate)
    best = found[:_MEASURED]
    return [*best, *(candidate for candidate in best_of_family.values() if candidate not in best)]


def _chosen(measured: Measured, model: str, *, xla: bool = True) -> str | None:
    times = {key: time for key, time in measured.microseconds.items() if xla or key != XLA}
    if not times:
        return None
    in_order = sorted(times, key=lambda key: (key != model, key == XLA, times[key]))
    good = _AS_GOOD * min(times.values())
    return next(key for key in in_order if times[key] <= good)
