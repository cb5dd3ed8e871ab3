"""``explain``: which kernel takes each of the library's calls in a function, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_tilekern.inspection.columns import columns
from jax_tilekern.inspection.tracing import traced
from jax_tilekern.interop.outcomes import Choice, recorded_choices

_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


class Explanation(tuple[Choice, ...]):
    """The choices made for one function; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return one line per call; a call that is part of another is indented below it."""
        if not self:
            return "no call of jax_tilekern"
        return columns(
            (
                "  " * choice.depth
                + f"{choice.call}  {' x '.join(choice.operands)} -> {choice.result}",
                f"[{choice.partition}]" if choice.partition else "",
                choice.kernel or "-",
                choice.reason,
            )
            for choice in self
        )


def explain(
    function: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any
) -> Explanation:
    """Say which kernel computes each of the library's calls in ``function``, and why.

    The function is traced and lowered, not executed; kernels that are not in the cache are
    compiled. XLA partitions a call among several devices when it compiles the program. So such a
    program is compiled as well, and the table shows how the call is partitioned, and the shapes and
    the kernel on each device.

    Parameters
    ----------
    function
        Any function of arrays. One that is jitted already keeps its static arguments.
    *args, **kwargs
        Its arguments: arrays or ``jax.ShapeDtypeStruct``, numbers, and trees of these. Other
        leaves, such as the functions inside a model, are static.
    platform
        ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``; by default JAX's default backend. ``"gpu"``
        is ``"cuda"``, and takes the name of a GPU by :func:`jax_tilekern.gpu_target` where there is
        none.

    Returns
    -------
    Explanation
        One :class:`~jax_tilekern.interop.outcomes.Choice` per call; ``print`` it for a table.
        Calls inside a jitted function that is called several times are listed once, as they are
        lowered once.

    Raises
    ------
    ValueError
        If JAX has no such platform.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((64, 64), jnp.int16)
    >>> print(jtk.explain(jtk.matmul, x, x)[0].reason)
    no kernel for int16 x int16 -> int16 at precision DEFAULT
    """
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"platform {platform!r} is none of {', '.join(_PLATFORMS)}")
    target = _canonical(jax.default_backend() if platform is None else platform)
    with recorded_choices(target) as recorder:
        program = traced(function, args, kwargs)
        lowered = program.lower(lowering_platforms=None if platform is None else (target,))
        if recorder.awaited and target in _platforms(args, kwargs):
            lowered.compile()
        else:
            recorder.choices += recorder.awaited.values()
    return Explanation(recorder.choices)


def _platforms(*trees: Any) -> set[str]:
    """Return the platforms of the devices that arguments are on; without any, the default."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(trees))
    devices: set[Any] = set()
    for sharding in shardings:
        is_abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
        if isinstance(sharding, jax.sharding.Sharding) and not is_abstract:
            devices |= sharding.device_set
    platforms = {_canonical(device.platform) for device in devices}
    return platforms or {_canonical(jax.default_backend())}


def _canonical(platform: str) -> str:
    return "cuda" if platform == "gpu" else platform
