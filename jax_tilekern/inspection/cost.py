"""``cost_analysis``: XLA's count of a function's flops and bytes, kernels included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_tilekern.inspection.tracing import traced
from jax_tilekern.plans.policy.setting import counted


def cost_analysis(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, float]:
    """Count a function's operations and bytes, as ``jax.jit(function).lower(...)`` would.

    XLA cannot see into a custom call: its own ``cost_analysis()`` counts -1 for each kernel, in
    lowered and in compiled programs. Here every kernel counts as the XLA operation that it
    replaces. The function is traced and lowered as inside
    :func:`jax_tilekern.policy` ``"xla"``, and neither compiled nor run.

    Parameters
    ----------
    function
        Any function that ``jax.jit`` takes, jitted or not.
    *args, **kwargs
        Its arguments: arrays or ``jax.ShapeDtypeStruct``.

    Returns
    -------
    dict[str, float]
        As :meth:`jax.stages.Lowered.cost_analysis` returns it: ``"flops"``, ``"bytes accessed"``
        and others. A grouped GEMM counts as XLA's own, which may multiply every group with
        all rows.

    Raises
    ------
    NotImplementedError
        If a :func:`jax_tilekern.cuda_kernel` has no ``reference`` to count.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    >>> w = jax.ShapeDtypeStruct((128, 32), jnp.float32)
    >>> int(jtk.cost_analysis(jtk.matmul, x, w)["flops"]) == 2 * 64 * 128 * 32
    True
    """
    with counted():
        lowered = traced("cost_analysis", function, args, kwargs).lower()
        # Some backends count only compiled programs.
        found: dict[str, float] = lowered.cost_analysis() or lowered.compile().cost_analysis()
    return found
