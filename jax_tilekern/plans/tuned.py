"""Tuned choices of kernels, which plans follow instead of the cost model.

A JSON file in the user's data folder stores them, and not a cache: they cost minutes of a GPU, and
nothing measures them again by itself. They are advice: a choice that is not valid is ignored with
one warning. A choice remains when the kernels change, until the product is tuned again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from jax_tilekern.compilation.nvrtc import CompileError
from jax_tilekern.files import replace_text
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.scope import Setting, scoped

# The winner where no kernel was faster than XLA's product. No candidate has this key.
XLA = "xla"
_SCHEMA = 2

# The key of the fastest candidate, by GPU model and by the text of a product or call.
_Winners = dict[str, dict[str, str]]


def text_of(what: Any) -> str:
    """Return the text under which the choice of a product, or of a call of a kernel, is stored."""
    text: str = product_text(what) if isinstance(what, Product) else what.text
    return text


def product_text(product: Product) -> str:
    """Return a product as the text under which its choice is stored.

    It has the arithmetic, the sizes (batch, m, n, k), and type and strides of each array, such as
    ``bf16 64x32x16: lhs bfloat16[16,1], rhs bfloat16[32,1], out bfloat16[32,1]``.
    """
    geometry = product.geometry
    arrays = (
        ("lhs", product.lhs_dtype, geometry.lhs_strides),
        ("rhs", product.rhs_dtype, geometry.rhs_strides),
        ("out", product.out_dtype, geometry.out_strides),
    )
    sizes = "x".join(map(str, (*geometry.batch, geometry.m, geometry.n, geometry.k)))
    described = (
        f"{name} {dtype}[{','.join(map(str, strides))}]" for name, dtype, strides in arrays
    )
    return f"{product.arithmetic} {sizes}: {', '.join(described)}"


class TunedChoices:
    """The tuned choices of a JSON file, for every GPU model.

    The file is read once, when a product is first planned.

    Parameters
    ----------
    path
        The file; ``None`` keeps choices in memory alone.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        # How often choices were added.
        self.changes = 0

    @functools.cached_property
    def _winners(self) -> _Winners:
        try:
            return self._read()
        except (OSError, ValueError) as error:
            warnings.warn(f"jax_tilekern ignores {error}", RuntimeWarning, stacklevel=2)
            return {}

    def find(self, what: Any, gpu: Gpu) -> str | None:
        """Return the key of the fastest candidate for a product or a call that has been tuned."""
        return self._winners.get(gpu.name, {}).get(text_of(what))

    def put(self, what: Any, gpu: Gpu, winner: str) -> None:
        """Add a choice, also to the file; OSError or ValueError if that is impossible."""
        with self._lock:
            self._winners = _added(self._winners, what, gpu, winner)
            self.changes += 1
            if self.path is not None:
                # Other processes may have added choices.
                winners = _added(self._read(), what, gpu, winner)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                whole = {"schema": _SCHEMA, "choices": winners}
                replace_text(self.path, json.dumps(whole, indent=1, sort_keys=True) + "\n")

    def digest(self, gpu: Gpu) -> str:
        """Return a digest of the choices for a GPU model."""
        text = json.dumps(self._winners.get(gpu.name, {}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _read(self) -> _Winners:
        """Return the choices of the file, none if it does not exist."""
        if self.path is None or not self.path.exists():
            return {}
        return _parsed(self.path, self.path.read_bytes())


def _added(winners: _Winners, what: Any, gpu: Gpu, winner: str) -> _Winners:
    return {**winners, gpu.name: {**winners.get(gpu.name, {}), text_of(what): winner}}


def _parsed(path: Path, content: bytes) -> _Winners:
    """Return the choices of a file; ValueError if it is another file."""
    try:
        whole = json.loads(content)
        if whole["schema"] != _SCHEMA:
            raise ValueError(f"it has schema {whole['schema']}, and this version reads {_SCHEMA}")
        return {model: dict(winners) for model, winners in whole["choices"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of tuned choices: {error!r}") from error


@functools.cache
def _default_choices() -> TunedChoices:
    folder = platformdirs.user_data_path("jax_tilekern", appauthor=False)
    return TunedChoices(folder / "tuned.json")


_current: Setting[TunedChoices | None] = Setting("tuned choices", None, is_traced=True)


def current_choices() -> TunedChoices:
    return _current.value or _default_choices()


@scoped
def using(choices: TunedChoices | str | os.PathLike[str]) -> Iterator[TunedChoices]:
    """Let plans consult these choices alone inside the context, in the current thread.

    A call that is traced inside has them wherever it is lowered. ``tune`` adds to them.

    Parameters
    ----------
    choices
        The path of a file that ``tune`` wrote, or choices.

    Raises
    ------
    OSError, ValueError
        When the context is entered: the file cannot be read, or has no tuned choices.
    """
    if not isinstance(choices, TunedChoices):
        choices = _file_choices(Path(choices), Path(choices).read_bytes())
    with _current(choices):
        yield choices


@functools.lru_cache(maxsize=64)
def _file_choices(path: Path, content: bytes) -> TunedChoices:
    """Return the choices of a file, the same object for one content: JAX's caches compare it."""
    choices = TunedChoices(path)
    choices._winners = _parsed(path, content)
    return choices


_by_digest: dict[str, TunedChoices] = {}


def tuned_digest(gpu: Gpu) -> str:
    """Return a digest of the current choices for a GPU, by which :func:`using_digest` finds them.

    A call that XLA partitions is planned when its program is compiled, perhaps in another context.
    """
    choices = current_choices()
    digest = choices.digest(gpu)
    _by_digest[digest] = choices
    return digest


@contextlib.contextmanager
def using_digest(digest: str) -> Iterator[None]:
    """Let plans consult the choices of a digest; those of another process are this one's own."""
    with _current(_by_digest.get(digest)):
        yield


class _RecordedProducts(TunedChoices):
    """Choices that collect what is planned, and leave all products to XLA."""

    def __init__(self) -> None:
        super().__init__(None)
        self.products: list[Any] = []

    def find(self, what: Any, gpu: Gpu) -> str:
        self.products.append(what)
        return XLA

    def digest(self, gpu: Gpu) -> str:
        # Unlike that of other choices that are empty, see tuned_digest().
        return f"recorded by {id(self)}"


@contextlib.contextmanager
def recorded_products() -> Iterator[list[Any]]:
    """Collect the products that are planned inside the context, and plan none of them.

    Calls of users' kernels that have parameters to tune are collected too.
    """
    recorded = _RecordedProducts()
    with using(recorded):
        yield recorded.products


def planning_state() -> Hashable:
    """Return what plans depend on beside what is planned."""
    choices = current_choices()
    return choices, choices.changes


def tuned_plan(
    product: Product, gpu: Gpu, candidates: Sequence[Candidate]
) -> LaunchPlan | NoKernel | None:
    """Return the plan that tuning chose, or ``None`` if the choice is the cost model's."""
    key = current_choices().find(product, gpu)
    if key is None:
        return None
    if key == XLA:
        return NoKernel("tuning found XLA's own product faster")
    winner = next((c for c in candidates if c.key == key), None)
    why = "is no kernel for it"
    if winner is not None:
        try:
            plan = winner.plan(gpu)
            return dataclasses.replace(plan, reason=f"{plan.reason}, tuned")
        except (CompileError, ValueError) as error:
            why = f"cannot be planned ({error})"
    warnings.warn(
        f"jax_tilekern ignores what tuning found for {product_text(product)}: "
        f"{key!r} {why}; tune it again",
        RuntimeWarning,
        stacklevel=2,
    )
    return None
