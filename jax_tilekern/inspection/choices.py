"""Record what each call of the library becomes, for :mod:`jax_tilekern.explain`."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_tilekern.scope import Setting


@dataclass(frozen=True)
class Choice:
    """What one call of the library lowered to.

    Attributes
    ----------
    call
        The operation with its dimensions, for example ``contract mk,kn->mn``.
    operands, result
        Types with shapes, for example ``f32[64,128]``; a comma between several results. Where the
        call is partitioned, those on each device.
    platform
        ``cpu``, ``cuda`` or another platform of JAX's.
    kernel
        The kernel, or ``None`` where XLA's own operation or another call of the library takes it.
    reason
        Why.
    partition
        How the call is partitioned among devices, if it is: which dimensions are split into how
        many parts, and which collective adds partial results.
    depth
        How many calls of the library, listed before, this one is a part of.
    """

    call: str
    operands: tuple[str, ...]
    result: str
    platform: str
    kernel: str | None
    reason: str
    partition: str = ""
    depth: int = 0


class Recorder:
    """The choices of one function: first those of tracing, then those of lowering, in order.

    A call that XLA partitions is planned when the program is compiled, perhaps on another thread,
    and is recorded then. The text of the custom call has the recorder's token.
    """

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.choices: list[Choice] = []
        self.awaited: dict[str, Choice] = {}
        self.depth = 0
        # The token is new, so JAX's persistent cache misses and XLA partitions the call.
        self.token = uuid.uuid4().hex

    def choice(self, call: str, ctx: Any, platform: str, kernel: str | None, reason: str) -> Choice:
        """Return what a call that is lowered in a context of JAX's becomes."""
        operands, results = _types(ctx.avals_in), ", ".join(_types(ctx.avals_out))
        return Choice(call, operands, results, platform, kernel, reason, depth=self.depth)


_recorders: dict[str, Recorder] = {}
# The token of the recorder that is active. JAX's caches have it in their keys, so no earlier
# lowering is reused without being recorded.
_token = Setting("recorder", "")


def _active() -> Recorder | None:
    return _recorders.get(_token.value)


@contextlib.contextmanager
def recorded_choices(platform: str = "") -> Iterator[Recorder]:
    """Collect the choice of every call that is traced, lowered or compiled inside the context.

    ``platform`` is the one that the program is for.
    """
    recorder = Recorder(platform)
    _recorders[recorder.token] = recorder
    try:
        with _token(recorder.token):
            yield recorder
    finally:
        del _recorders[recorder.token]


def record_choice(call: str, ctx: Any, platform: str, kernel: str | None, reason: str) -> None:
    """Record what a call lowers to, if a recorder is active."""
    recorder = _active()
    if recorder is not None:
        recorder.choices.append(recorder.choice(call, ctx, platform, kernel, reason))


def record_traced_choice(call: str, aval: Any, reason: str) -> None:
    """Record that a call on arrays of a type is left to XLA when it is traced, and list it once."""
    recorder = _active()
    if recorder is None:
        return
    (operand,) = _types([aval])
    choice = Choice(
        call, (operand,), operand, recorder.platform, None, reason, depth=recorder.depth
    )
    if choice not in recorder.choices:
        recorder.choices.append(choice)


@contextlib.contextmanager
def listed_below() -> Iterator[None]:
    """List calls that are lowered inside the context below the last one, and equal ones once."""
    recorder = _active()
    if recorder is None:
        yield
        return
    before = len(recorder.choices)
    recorder.depth += 1
    try:
        yield
    finally:
        recorder.depth -= 1
    recorder.choices[before:] = dict.fromkeys(recorder.choices[before:])


def recorder_token() -> str:
    """Return the token that identifies the current recorder in the text of a call."""
    token: str = _token.value
    return token


def await_partition(text: str, call: str, ctx: Any, platform: str) -> None:
    """Record that XLA will partition a call, if a recorder is active."""
    recorder = _active()
    if recorder is not None:
        reason = "planned for each device when XLA has partitioned the program"
        recorder.awaited[text] = recorder.choice(call, ctx, platform, None, reason)


def record_partition(text: str, choices: Sequence[Choice]) -> None:
    """Record what a partitioned call became on each device, for the recorders that await it."""
    for recorder in list(_recorders.values()):
        if text in recorder.awaited:
            recorder.choices.extend(choices)


def _types(avals: Sequence[Any]) -> tuple[str, ...]:
    return tuple(aval.str_short(short_dtypes=True) for aval in avals)
