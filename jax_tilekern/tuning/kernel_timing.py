"""Times of a user's kernel with each choice of the parameters that are tuned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tilekern.ops.kernel_tuning import TunableCall
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.tuned import XLA
from jax_tilekern.tuning.product_timing import Measured, differences, require_device, timed
from jax_tilekern.tuning.random_operands import beyond_cache, random_array
from jax_tilekern.tuning.wall_time import ready

# The root mean square by which the results of two choices may differ.
_TOLERANCE = 1e-2


def measure_call(
    call: TunableCall, operands: Sequence[Any] | None, gpu: Gpu, seconds: float
) -> Measured:
    """Measure a call with each choice, and its reference, side by side.

    Parameters
    ----------
    call
        The call.
    operands
        Its operands; by default random floats, and integers that are 0, since they may be indices.
    gpu
        The GPU of this machine.
    seconds
        Time to spend on timing.

    Raises
    ------
    RuntimeError
        If the device no longer responds.
    """
    with jax.enable_x64(call.use.parameters.modes.x64):
        meant = {} if call.reference is None else {XLA: call.reference}
        sides = {key: jax.jit(side) for key, side in (meant | call.sides()).items()}
        given = _operands(call, 0) if operands is None else tuple(map(jnp.asarray, operands))

        def another(seed: int) -> tuple[Any, ...]:
            return _operands(call, seed) if operands is None else tuple(map(jnp.copy, given))

        failures = _failures(sides, given)
        rotation = itertools.cycle(
            beyond_cache(given, another, gpu.l2_bytes) if any(x.size for x in given) else [given]
        )
        calls = {
            key: lambda side=side: side(*next(rotation))
            for key, side in sides.items()
            if key not in failures
        }
        return timed(calls, failures, seconds)


def _operands(call: TunableCall, seed: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(seed), max(1, len(call.types)))
    return tuple(
        random_array(key, shape, dtype)
        if jnp.issubdtype(dtype, jnp.inexact)
        else jnp.zeros(shape, dtype)
        for key, (shape, dtype) in zip(keys, call.types, strict=False)
    )


def _failures(sides: Mapping[str, Callable[..., Any]], operands: Sequence[Any]) -> dict[str, str]:
    """Run each side once; return those that fail, or differ from the first that runs."""
    found: dict[str, str] = {}
    expected: Sequence[Any] | None = None
    for key, side in sides.items():
        try:
            results = ready(side(*operands))
            expected = results if expected is None else expected
            worst = max(map(_difference, results, expected), default=0.0)
        # A block may be too large, or its code may not compile.
        except (RuntimeError, ValueError, TypeError) as error:
            found[key] = f"failed: {error}"
            require_device()
            continue
        # A comparison with NaN is false.
        if not worst <= _TOLERANCE:
            found[key] = f"wrong: {worst:.1e} from the first result in root mean square"
    return found


def _difference(x: Any, y: Any) -> float:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return float(not np.array_equal(x, y))
    return float(differences(x, y)[0]) if x.size else 0.0
