"""Autotuned choices of kernels, which plans follow instead of the cost model.

They are stored in JSON files, one for each choice, in the user's data folder and not in a cache:
they cost minutes of a GPU, and nothing measures them again by itself. They are advice: an entry
that is no longer valid is ignored with one warning. An entry remains when the kernels change (it
has the digest of the measured kernels), until the product is tuned again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from jax_tilekern.compilation.nvrtc import CompileError
from jax_tilekern.files import replace_text
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu, current_gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.scope import Setting, scoped

# The winner where no kernel was faster than XLA's product. No candidate has this key.
XLA = "xla"
_SCHEMA = 1


@dataclass(frozen=True)
class TunedChoice:
    """The measurements of one product, or of one call of a user's kernel."""

    winner: str  # The ``key`` of the candidate to run, or :data:`XLA`.
    model: str  # the key of the cost model's choice at that time
    microseconds: Mapping[str, float] = field(hash=False)  # of everything that was measured, by key
    method: str  # the kind of the times, for example "device time"
    digest: str  # of the kernels and the planners that were measured

    def __post_init__(self) -> None:
        if not all(0 < time < math.inf for time in self.microseconds.values()):
            raise ValueError(f"times are positive, not {dict(self.microseconds)}")
        if self.winner not in self.microseconds:
            raise ValueError(f"{self.winner} has no time")


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
    """The tuned choices of every GPU model: the files of a folder, and the files that were loaded.

    Files are read when a product of their GPU is first planned, and once.

    Parameters
    ----------
    folder
        Where the files are; ``None`` keeps choices in memory alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._models: dict[str, dict[str, TunedChoice]] = {}
        # How often choices were added.
        self.changes = 0

    def find(self, what: Any, gpu: Gpu) -> TunedChoice | None:
        """Return the choice for a product or a call, if it has been tuned."""
        return self.of(gpu.name).get(text_of(what))

    def put(self, what: Any, gpu: Gpu, choice: TunedChoice) -> None:
        """Store a choice; one warning if its file cannot be written."""
        text = text_of(what)
        self.add(gpu.name, {text: choice})
        if self.folder is None:
            return
        name = f"{_slug(gpu.name)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        try:
            _write(self.folder / name, gpu.name, {text: choice})
        except OSError as error:
            warnings.warn(
                f"jax_tilekern cannot keep tuned choices in {self.folder} ({error}); this process "
                "has them alone",
                RuntimeWarning,
                stacklevel=2,
            )

    def digest(self, gpu: Gpu) -> str:
        """Return a digest of the choices of a GPU model."""
        winners = {name: choice.winner for name, choice in self.of(gpu.name).items()}
        return hashlib.sha256(json.dumps(winners, sort_keys=True).encode()).hexdigest()[:16]

    def add(self, model: str, new: Mapping[str, TunedChoice]) -> None:
        """Add choices of a GPU model, ahead of those in the folder, in memory alone."""
        with self._lock:
            self._models[model] = {**self.of(model), **new}
            self.changes += 1

    def of(self, model: str) -> Mapping[str, TunedChoice]:
        """Return the choices of a GPU model, by text."""
        with self._lock:
            if model not in self._models:
                self._models[model] = _read_folder(self.folder, model)
            return self._models[model]


@functools.cache
def _default_choices() -> TunedChoices:
    return TunedChoices(platformdirs.user_data_path("jax_tilekern", appauthor=False) / "tuned")


_current: Setting[TunedChoices | None] = Setting("tuned choices", None, is_traced=True)


def current_choices() -> TunedChoices:
    return _current.value or _default_choices()


@scoped
def using(choices: TunedChoices | str | os.PathLike[str]) -> Iterator[TunedChoices]:
    """Let plans consult these choices alone inside the context, in the current thread.

    A call that is traced inside has them wherever it is lowered.

    Parameters
    ----------
    choices
        Choices, or the path of a file that :func:`export` wrote.

    Raises
    ------
    TypeError
        When the context is entered: ``choices`` is neither.
    OSError, ValueError
        When the context is entered, as :func:`load`.
    """
    if not isinstance(choices, TunedChoices | str | os.PathLike):
        raise TypeError(f"using: choices is {choices!r}; it is TunedChoices or the path of a file")
    if not isinstance(choices, TunedChoices):
        choices = _file_choices(Path(choices), Path(choices).read_bytes())
    with _current(choices):
        yield choices


@functools.lru_cache(maxsize=64)
def _file_choices(path: Path, content: bytes) -> TunedChoices:
    """Return the choices of a file, the same object for one content: JAX's caches compare it."""
    choices = TunedChoices(None)
    choices.add(*_parsed(path, content))
    return choices


def export(path: str | os.PathLike[str], gpu: Gpu | None = None) -> int:
    """Write the tuned choices of a GPU model to a file, to ship them; return their number.

    Parameters
    ----------
    path
        The JSON file.
    gpu
        The GPU model; by default the one that plans are made for.
    """
    gpu = current_gpu() if gpu is None else gpu
    found = current_choices().of(gpu.name)
    _write(Path(path), gpu.name, found)
    return len(found)


def load(path: str | os.PathLike[str]) -> int:
    """Make plans of this process follow the choices that :func:`export` wrote; return their number.

    They take precedence over choices that were tuned on this machine, so that every process that
    loads a file makes the same plans. Choices for other GPU models have no effect.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is not a file of tuned choices.
    """
    model, found = _parsed(Path(path), Path(path).read_bytes())
    current_choices().add(model, found)
    return len(found)


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


# Planning


class _RecordedProducts(TunedChoices):
    """Choices that collect what is planned, and leave all products to XLA."""

    def __init__(self) -> None:
        super().__init__(None)
        self.products: list[Any] = []

    def find(self, what: Any, gpu: Gpu) -> TunedChoice:
        self.products.append(what)
        return TunedChoice(XLA, XLA, {XLA: 1.0}, method="", digest="")

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
    choice = current_choices().find(product, gpu)
    if choice is None:
        return None
    if choice.winner == XLA:
        return NoKernel("tuning found XLA's own product faster")
    winner = next((c for c in candidates if c.key == choice.winner), None)
    why = "is no kernel for it any more"
    if winner is not None:
        try:
            plan = winner.plan(gpu)
            return dataclasses.replace(plan, reason=f"{plan.reason}, tuned")
        except (CompileError, ValueError) as error:
            why = f"cannot be planned ({error})"
    warnings.warn(
        f"jax_tilekern ignores what tuning found for {product_text(product)}: "
        f"{choice.winner!r} {why}; tune it again",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


# Files


def _parsed(path: Path, content: bytes) -> tuple[str, dict[str, TunedChoice]]:
    """Return the GPU model of a file and its choices; ValueError if it is none."""
    try:
        whole = json.loads(content)
        if whole["schema"] != _SCHEMA:
            raise ValueError(f"it has schema {whole['schema']}, and this version reads {_SCHEMA}")
        choices = {name: TunedChoice(**entry) for name, entry in whole["choices"].items()}
        return str(whole["gpu"]), choices
    except (KeyError, TypeError, AttributeError) as error:
        why = "it does not have the fields that tuning.export writes"
        raise ValueError(f"{path} is not a file of tuned choices: {why}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a file of tuned choices: {error}") from error


def _read_folder(folder: Path | None, model: str) -> dict[str, TunedChoice]:
    """Return the choices of a GPU model; a broken file is worth one warning."""
    found: dict[str, TunedChoice] = {}
    for path in [] if folder is None else folder.glob(f"{_slug(model)}-*.json"):
        try:
            named, choices = _parsed(path, path.read_bytes())
        except (OSError, ValueError) as error:
            warnings.warn(f"jax_tilekern ignores {error}", RuntimeWarning, stacklevel=2)
            continue
        if named == model:
            found |= choices
    return found


def _slug(model: str) -> str:
    return re.sub("[^A-Za-z0-9.]+", "-", model)


def _write(path: Path, model: str, choices: Mapping[str, TunedChoice]) -> None:
    entries = {name: dataclasses.asdict(choices[name]) for name in sorted(choices)}
    whole = {"schema": _SCHEMA, "gpu": model, "choices": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(whole, indent=1) + "\n")
