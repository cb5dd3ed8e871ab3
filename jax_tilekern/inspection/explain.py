"""``explain``: which kernel takes each of the library's calls in a function, and why."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jax_tilekern.inspection.columns import columns
from jax_tilekern.inspection.tracing import traced
from jax_tilekern.interop.outcomes import Choice, record_partition, recorded_choices
from jax_tilekern.plans.gpu import target_is_set
from jax_tilekern.plans.launch import PredictedUs

_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")
# Characters of the table's column of text, with columns of times beside it and without.
_WIDTH, _WIDTH_ALONE = 90, 115


class Explanation(tuple[Choice, ...]):
    """The choices made for one function; prints as a table."""

    __slots__ = ()

    @property
    def predicted_us(self) -> PredictedUs:
        """Predicted microseconds of the calls that have predictions, together.

        ``ours`` has each call as it was chosen, by a kernel or by XLA, and ``xla`` each by XLA's
        operation; both are ``None`` without any prediction. A call counts once for each time that
        it is listed, also inside a loop.
        """
        times = [pair for choice in self if (pair := _times(choice))]
        return PredictedUs(*(sum(column) for column in zip(*times, strict=True)))

    def __str__(self) -> str:
        """Return a table of the calls, each with its kernel and the reason, and a summary.

        Equal calls are one row with their number. A call that is part of another is indented below
        it.
        """
        if not self:
            return "no call of jax_tilekern"
        ours, xla = self.predicted_us
        times = ("", "") if ours is None else ("kernel, us", "   XLA, us")
        rows = [["", "call", *times]]
        calls = kernels = 0
        for count, choice, is_composed in _grouped(self):
            first, *rest = _text(choice, _WIDTH_ALONE if ours is None else _WIDTH)
            each = ["" if time is None else f"{time:10,.1f}" for time in choice.predicted_us]
            rows.append([f"{count}x" if count > 1 else "", first, *each])
            rows += [["", line, "", ""] for line in rest]
            if not is_composed:
                calls, kernels = calls + count, kernels + count * (choice.kernel is not None)
        summary = f"kernels for {kernels} of {calls} calls"
        if ours is not None:
            known = sum(_times(choice) is not None for choice in self)
            summary += f"; predicted {ours:,.1f} us, by XLA alone {xla:,.1f} us"
            summary += f" ({known} of them)" if known < calls else ""
        return f"{columns(rows)}\n{summary}"


def _times(choice: Choice) -> tuple[float, float] | None:
    """Return the predicted times of a call as it was chosen, and by XLA."""
    ours, xla = choice.predicted_us
    if ours is None or xla is None:
        return None
    is_xlas = choice.kernel is None and not choice.is_rewritten
    return (xla if is_xlas else ours), xla


def _grouped(choices: Sequence[Choice], times: int = 1) -> Iterator[tuple[int, Choice, bool]]:
    """Yield each call once: the number of equal ones, the call, and whether calls compose it."""
    calls: list[list[Choice]] = []
    for choice in choices:
        if calls and choice.depth > calls[-1][0].depth:
            calls[-1].append(choice)
        else:
            calls.append([choice])
    for (call, *parts), count in Counter(map(tuple, calls)).items():
        yield times * count, call, bool(parts)
        yield from _grouped(parts, times * count)


def _text(choice: Choice, width: int) -> list[str]:
    """Return the lines of up to ``width`` characters that describe a call."""
    indent = "  " * choice.depth
    types = f"{' x '.join(choice.operands)} -> {choice.result}"
    partition = f"  [{choice.partition}]" if choice.partition else ""
    kernel = f"{choice.kernel}: " if choice.kernel else ""
    return [
        line
        for text, initial in (
            (f"{choice.call}  {types}{partition}", indent),
            (f"{kernel}{choice.reason}", f"{indent}    "),
        )
        for line in textwrap.wrap(
            text,
            width,
            initial_indent=initial,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


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
        Its arguments: arrays or ``jax.ShapeDtypeStruct``, and trees of these. Other leaves, such as
        Python numbers and the functions inside a model, are static.
    platform
        ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``, where ``"gpu"`` is ``"cuda"``. By default
        ``"cuda"`` inside :func:`jax_tilekern.gpu_target`, and JAX's default backend outside of it.
        ``"cuda"`` takes a GPU or a target. On platforms other than ``"cpu"`` and ``"cuda"`` every
        call is XLA's own operation.

    Returns
    -------
    Explanation
        One :class:`~jax_tilekern.interop.outcomes.Choice` per call; ``print`` it for a table, in
        which equal calls are one row. ``predicted_us`` has the predicted times. Calls inside a
        jitted function that is called several times are listed once, as they are lowered once.

    Raises
    ------
    ValueError
        If ``platform`` is none of these.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((64, 64), jnp.int16)
    >>> print(jtk.explain(jtk.matmul, x, x)[0].reason)
    no kernel for int16 x int16 -> int16 at precision DEFAULT
    """
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"explain: platform {platform!r} is none of {', '.join(_PLATFORMS)}")
    if platform is None and target_is_set():
        platform = "cuda"
    target = _canonical(jax.default_backend() if platform is None else platform)
    with recorded_choices(target) as recorder:
        program = traced("explain", function, args, kwargs)
        lowered = program.lower(lowering_platforms=None if platform is None else (target,))
        if recorder.awaited and target in _platforms(args, kwargs):
            lowered.compile()
            # XLA has removed the calls whose results nothing uses.
            for text in list(recorder.awaited):
                record_partition(text, ())
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
