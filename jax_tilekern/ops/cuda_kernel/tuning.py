"""The parameters of a user's kernel that are chosen by measuring it (``tune``)."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Source
from jax_tilekern.ops.cuda_kernel.settings import KernelSettings, Parameters, Use
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.tuned import XLA, current_choices


@dataclass(frozen=True)
class TunableCall:
    """A call of a kernel whose parameters to tune are open."""

    settings: KernelSettings
    use: Use
    # Shapes and types of the operands, with batches.
    types: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    function: Callable[..., Any]  # function(*operands, parameters=...) makes the call.
    # reference(*operands) is what the call means, if there is a reference.
    reference: Callable[..., Any] | None

    @property
    def digest(self) -> str:
        """A digest of the source and of the values to choose from."""
        source = self.settings.source
        parts = (
            (source.text, *map(str, sorted(source.headers.items())))
            if isinstance(source, Source)
            else (source.content.hex(),)
        )
        text = repr((parts, sorted(self.settings.tune.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        """The text under which the choice is stored."""
        return f"{self} of {self.digest}"

    def __str__(self) -> str:
        batches = "".join(f", vmap of {batch.size}" for batch in self.use.batches)
        return f"cuda_kernel {self.settings.label}({self.use}){batches}"

    def candidates(self) -> dict[str, Parameters]:
        """Return the parameters to choose from, by their key; the first are the default."""
        return {
            key_of(values): self.use.parameters.with_values(values)
            for values in self.settings.candidates(self.use.parameters)
        }

    def sides(self) -> dict[str, Callable[..., Any]]:
        """Return functions of the operands that make the call with each choice."""
        return {
            key: functools.partial(self.function, parameters=parameters)
            for key, parameters in self.candidates().items()
        }


def key_of(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def chosen(call: TunableCall, gpu: Gpu) -> tuple[Parameters, str]:
    """Return the parameters that a call takes on a GPU, and what to say about them."""
    candidates = call.candidates()
    default = next(iter(candidates))
    winner = current_choices().find(call, gpu)
    if winner is None or winner == XLA:
        return candidates[default], f"; {default}, not tuned"
    if winner in candidates:
        return candidates[winner], f"; {winner}, tuned"
    warnings.warn(
        f"jax_tilekern ignores what tuning found for {call}: {winner} is no candidate; tune it "
        "again",
        RuntimeWarning,
        stacklevel=2,
    )
    return candidates[default], f"; {default}, not tuned"


def checked(label: str, tune: Any) -> dict[str, tuple[Any, ...]]:
    """Return the user's argument ``tune``, or raise an error."""
    if not isinstance(tune, Mapping):
        raise TypeError(
            f"kernel {label}: tune is {tune!r}, not a dict such as {{'block': (64, 128)}}"
        )
    found = {}
    for name, values in tune.items():
        if not isinstance(name, str) or not isinstance(values, Sequence) or isinstance(values, str):
            raise TypeError(
                f"kernel {label}: tune has {name!r}: {values!r}, not a name and a list of values"
            )
        if not values:
            raise ValueError(f"kernel {label}: tune has no value for {name}")
        found[name] = tuple(values)
        for value in values:
            Parameters(label, {name: value})
    return found
