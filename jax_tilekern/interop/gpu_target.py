"""``gpu_target`` names the GPU that a program is lowered for."""

from __future__ import annotations

from collections.abc import Iterator

from jax_tilekern.interop.compat import in_traced_program
from jax_tilekern.plans.gpu import Gpu, known_gpu, target
from jax_tilekern.scope import scoped


@scoped
def gpu_target(gpu: Gpu | str) -> Iterator[Gpu]:
    """Plan and lower for ``gpu`` inside the context, whatever this machine has.

    For ahead-of-time lowering and tests. Holds for the current thread; trace and lower inside.

    Parameters
    ----------
    gpu
        A :class:`Gpu`, or an architecture or model such as ``"sm_90"`` or ``"H100"``.

    Raises
    ------
    TypeError
        If ``gpu`` is neither a :class:`Gpu` nor a name.
    ValueError
        If no model of that name is known.
    RuntimeError
        In a function that is traced: the whole program is for one GPU.
    """
    if in_traced_program():
        raise RuntimeError(
            "gpu_target is entered in a function that JAX traces, and left before the program is "
            "lowered; enter it around jax.jit(...).lower(...), jax.export or explain"
        )
    if not isinstance(gpu, Gpu | str):
        raise TypeError(
            f"gpu_target takes a jax_tilekern.Gpu, or a name such as 'H100' or 'sm_90', not {gpu!r}"
        )
    chosen = known_gpu(gpu) if isinstance(gpu, str) else gpu
    with target(chosen):
        yield chosen
