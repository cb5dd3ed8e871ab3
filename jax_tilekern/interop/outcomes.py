"""What becomes of calls: the strict mode, the log, and the record of :mod:`jax_tilekern.explain`.

The logger ``jax_tilekern`` reports at INFO each call that falls back to XLA's own operation, and
each kernel that is compiled or read from the kernel cache (``compiler.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax_tilekern.plans.gpu import why_no_gpu
from jax_tilekern.plans.launch import NOT_PREDICTED, PredictedUs
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.scope import Setting, scoped

logger = logging.getLogger("jax_tilekern")


class FallbackError(RuntimeError):
    """Inside :func:`strict`: a call loses its kernel, and XLA's own operation would compute it."""


Mode = Literal["DEFAULT", "STRICT_COMPILATION", "STRICT"]

_mode: Setting[Mode] = Setting("mode", "DEFAULT", is_traced=True)


@scoped
def strict(*, allow_fallbacks: bool = False) -> Iterator[None]:
    """Raise an error where a call loses its kernel.

    A call loses its kernel where its operation has kernels on the platform, and

    - none of them covers the call's types, sizes, layout or place among devices, or
    - the function of a :func:`jax_tilekern.kernel` has no translation, or
    - the kernel cannot be compiled, or there is no NVRTC or no GPU to compile it for.

    Calls that are XLA's by choice are no error. :func:`jax_tilekern.explain` lists them, too:

    - The policy predicts that XLA is as fast. ``policy("kernels")`` takes the kernel, and inside
      ``policy("xla")`` nothing is lost.
    - The operation has no kernels on the platform: ``top_k``, ``kernel`` and ``cuda_kernel`` on a
      CPU, and every operation on a TPU or an AMD GPU.
    - There is nothing to compute, as for empty arrays.

    Outside of ``strict``, a kernel of the library that cannot be compiled is a warning, and XLA's
    own operation runs. The source of a :func:`jax_tilekern.cuda_kernel` that cannot be compiled is
    always an error where its call is lowered for CUDA. Inside ``strict`` it is compiled wherever
    its call is lowered, also where its ``reference`` runs: for the GPU of
    :func:`jax_tilekern.gpu_target`, that at hand, or an H100. Without NVRTC, or with
    ``policy("xla")``, it is not compiled there.

    Holds for the current thread, inside the context. A call that is traced inside raises the error
    wherever it is lowered, also where the context is in a function under ``jax.jit``.

    Parameters
    ----------
    allow_fallbacks
        Whether calls that no kernel covers may fall back to XLA's own operation. A kernel that
        cannot be compiled is an error in either case.

    Raises
    ------
    FallbackError
        While a function is traced or lowered: no kernel covers a call, for the reason in the
        message.
    CompileError
        While a function is lowered: a kernel cannot be compiled. The message has the compiler's
        log.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> with jtk.strict():
    ...     product = jax.jit(jtk.matmul)(jnp.ones((64, 64)), jnp.ones((64, 64)))
    """
    with _mode("STRICT_COMPILATION" if allow_fallbacks else "STRICT"):
        yield


def current() -> Mode:
    """Return the mode of the current thread."""
    return _mode.value


def entered(mode: Mode) -> contextlib.AbstractContextManager[None]:
    """Return a context in a mode; ``DEFAULT`` is the mode outside every context."""
    return _mode(mode)


def forbids_losses() -> bool:
    """Return whether a call that loses its kernel is an error."""
    return _mode.value == "STRICT" and current_policy() != "xla"


def note_loss(call: str, reason: str, platform: str | None = None) -> None:
    """Raise the error about a call that no kernel covers, where that is one."""
    if forbids_losses():
        where = "" if platform is None else f" on {platform}"
        raise FallbackError(
            f"{call} falls back to XLA{where}, which jax_tilekern.strict() forbids: {reason}"
        )


def note_fallback(call: str, reason: str, platform: str | None = None) -> None:
    """Report that XLA's own operation computes a call, on one platform or on all.

    A program for GPUs that has no kernel because there
    is no GPU to plan for is worth a warning, unless :func:`explain` shows the reason.
    """
    where = "" if platform is None else f" on {platform}"
    logger.info("%s%s falls back to XLA: %s", call, where, reason)
    missing = why_no_gpu() if platform == "cuda" else None
    if missing is not None and missing in reason and _active() is None:
        # With one text and one place in the code, Python shows it once.
        warnings.warn(
            f"jax_tilekern leaves a program for GPUs to XLA: {missing}",
            RuntimeWarning,
            stacklevel=2,
        )


def note_failure(error: Exception) -> str:
    """Report that a kernel cannot be compiled or launched; return that in one line."""
    if _mode.value != "DEFAULT":
        raise error
    first_line, *_ = str(error).splitlines()
    reason = f"its kernel failed: {first_line.rstrip(':')}"
    logger.info("a kernel failed: %s", error)
    warnings.warn(
        f"jax_tilekern leaves a call to XLA, because {reason} "
        "(inside jax_tilekern.strict() this is an error, with the compiler's log)",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


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
    predicted_us
        Predicted microseconds of the best kernel (``ours``) and of XLA's operation (``xla``). Both
        are ``None`` where no prediction decides, or the device has no data.
    is_rewritten
        Whether other calls, of the library or of cuDNN, compute it in place of XLA's operation.
    """

    call: str
    operands: tuple[str, ...]
    result: str
    platform: str
    kernel: str | None
    reason: str
    partition: str = ""
    depth: int = 0
    predicted_us: PredictedUs = NOT_PREDICTED
    is_rewritten: bool = False


class Recorder:
    """The choices of one function: first those of tracing, then those of lowering, in order.

    A call that XLA partitions is planned when the program is compiled, perhaps on another thread.
    Its choices then replace the one that awaits them. The text of the custom call has the
    recorder's token.
    """

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.choices: list[Choice] = []
        self.awaited: dict[str, list[Choice]] = {}
        self.depth = 0
        # The token is new, so JAX's persistent cache misses and XLA partitions the call.
        self.token = uuid.uuid4().hex

    def add(
        self,
        call: str,
        ctx: Any,
        platform: str,
        kernel: str | None,
        reason: str,
        predicted_us: PredictedUs = NOT_PREDICTED,
        is_rewritten: bool = False,
    ) -> Choice:
        """Add what a call that is lowered in a context of JAX's becomes, and return it."""
        operands, results = _types(ctx.avals_in), ", ".join(_types(ctx.avals_out))
        choice = Choice(
            call, operands, results, platform, kernel, reason, "", self.depth, predicted_us,
            is_rewritten,
        )  # fmt: skip
        self.choices.append(choice)
        return choice


_recorders: dict[str, Recorder] = {}
# The token of the recorder that is active. JAX's caches have it in their keys, so no earlier
# lowering is reused without being recorded.
_token = Setting("recorder", "")


def _active() -> Recorder | None:
    return _recorders.get(_token.value)


def is_recorded() -> bool:
    """Return whether a recorder is active."""
    return _active() is not None


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


def record_choice(call: str, ctx: Any, platform: str, *outcome: Any) -> None:
    """Record what a call lowers to, if a recorder is active.

    ``outcome`` has the kernel, the reason, the predicted times and whether the call is rewritten,
    as for :meth:`Recorder.add`.
    """
    recorder = _active()
    if recorder is not None:
        recorder.add(call, ctx, platform, *outcome)


def record_elsewhere(call: str, ctx: Any) -> None:
    """Record a call that is lowered for a platform without kernels, if a recorder is active."""
    recorder = _active()
    if recorder is not None and recorder.platform not in ("cpu", "cuda"):
        recorder.add(call, ctx, recorder.platform, None, why_elsewhere(recorder.platform))


def why_elsewhere(platform: str) -> str:
    """Return why a call has no kernel on a platform without kernels."""
    return f"XLA computes every call on {platform}: kernels are for CPUs and CUDA"


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
    """List calls that are lowered inside the context below the last one."""
    recorder = _active()
    if recorder is None:
        yield
        return
    recorder.depth += 1
    try:
        yield
    finally:
        recorder.depth -= 1


def recorder_token() -> str:
    """Return the token that identifies the current recorder in the text of a call."""
    token: str = _token.value
    return token


def await_partition(text: str, call: str, ctx: Any, platform: str) -> None:
    """Record that XLA will partition a call, if a recorder is active."""
    recorder = _active()
    if recorder is not None:
        reason = "planned for each device when XLA has partitioned the program"
        choice = recorder.add(call, ctx, platform, None, reason)
        recorder.awaited.setdefault(text, []).append(choice)


def record_partition(text: str, choices: Sequence[Choice]) -> None:
    """Record what a partitioned call became on each device, for the recorders that await it."""
    for recorder in list(_recorders.values()):
        for awaited in recorder.awaited.pop(text, ()):
            place = next(i for i, choice in enumerate(recorder.choices) if choice is awaited)
            recorder.choices[place : place + 1] = [
                dataclasses.replace(choice, depth=awaited.depth + choice.depth)
                for choice in choices
            ]


def _types(avals: Sequence[Any]) -> tuple[str, ...]:
    return tuple(aval.str_short(short_dtypes=True) for aval in avals)
