"""Autotuned choices of kernels, which plans follow instead of the cost model.

They are stored in one JSON file per GPU model, in the user's data folder and not in a cache: they
cost minutes of a GPU, and nothing measures them again by itself. They are advice: an entry that is
no longer valid is ignored with one warning. An entry remains when the kernels change (it has the
digest of those that were measured), until the product is tuned again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import ml_dtypes
import numpy as np
import platformdirs

from jax_tilekern.compilation.nvrtc import CompileError
from jax_tilekern.files import replace_text
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.scope import Setting, scoped

# The winner where no kernel was faster than XLA's product. No candidate has this key.
XLA = "xla"
_SCHEMA = 1


class Tunable(Protocol):
    """What has a choice besides products: a call of a user's kernel."""

    @property
    def text(self) -> str:
        """The text under which its choice is stored."""


@dataclass(frozen=True)
class TunedChoice:
    """What was measured of one product, or of one call of a user's kernel.

    Attributes
    ----------
    winner
        :attr:`Candidate.key <jax_tilekern.plans.policy.choice.Candidate.key>` of what to run, or
        :data:`XLA`.
    model
        Key of what the cost model chose at that time.
    microseconds
        The time of everything that was measured, by key.
    method
        What the times are, for example ``"device time"``.
    digest
        Of the kernels and the planners, which tells whether it was measured with these.
    versions
        Of this package and of JAX, for people.
    date
        When, in ISO format.
    """

    winner: str
    model: str
    microseconds: Mapping[str, float] = field(hash=False)
    method: str
    digest: str
    versions: str
    date: str

    def __post_init__(self) -> None:
        if not all(0 < time < math.inf for time in self.microseconds.values()):
            raise ValueError(f"times are positive, not {dict(self.microseconds)}")
        if self.winner not in self.microseconds:
            raise ValueError(f"{self.winner} has no time")

    @property
    def reach(self) -> float | None:
        """Speed of the model's choice in terms of the winner's; ``None`` if it did not run."""
        model = self.microseconds.get(self.model)
        return None if model is None else self.microseconds[self.winner] / model


def _text(what: Product | Tunable) -> str:
    return product_text(what) if isinstance(what, Product) else what.text


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


def product_of_text(text: str) -> Product:
    """Return the product of a text of :func:`product_text`."""
    head, _, arrays = text.partition(": ")
    arithmetic, _, sizes = head.partition(" ")
    *batch, m, n, k = map(int, sizes.split("x"))
    found = [re.fullmatch(r"\w+ (\w+)\[([\d,]+)\]", array) for array in arrays.split(", ")]
    lhs, rhs, out = (np.dtype(getattr(ml_dtypes, x[1], x[1])) for x in found if x)
    strides = (tuple(map(int, x[2].split(","))) for x in found if x)
    return Product(MatmulGeometry(tuple(batch), m, n, k, *strides), lhs, rhs, out, arithmetic)


class TunedChoices:
    """The tuned choices of every GPU model: those of a folder, and those that were loaded.

    Files are read when a product of their GPU is first planned, and once.

    Parameters
    ----------
    folder
        Where the files are, one a GPU model; ``None`` keeps choices in memory alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._models: dict[str, dict[str, TunedChoice]] = {}
        # How often choices were added.
        self.changes = 0

    def file(self, gpu: Gpu) -> Path | None:
        """Return the file of a GPU model, which need not exist."""
        return self._file(gpu.name)

    def find(self, what: Product | Tunable, gpu: Gpu) -> TunedChoice | None:
        """Return the choice for a product or a call, if it has been tuned."""
        return self._of(gpu.name).get(_text(what))

    def put(self, what: Product | Tunable, gpu: Gpu, choice: TunedChoice) -> None:
        """Store a choice, beside those that other processes have stored meanwhile."""
        new = {_text(what): choice}
        self._add(gpu.name, new)
        path = self.file(gpu)
        if path is not None:
            _merge(path, gpu.name, new)

    def digest(self, gpu: Gpu) -> str:
        """Return a digest of the choices of a GPU model."""
        winners = {name: choice.winner for name, choice in dict(self._of(gpu.name)).items()}
        return hashlib.sha256(json.dumps(winners, sort_keys=True).encode()).hexdigest()[:16]

    def load(self, path: Path) -> int:
        """Add the choices of a file, ahead of those in the folder; return their number.

        Raises
        ------
        OSError
            If it cannot be read.
        ValueError
            If it is not a file of tuned choices.
        """
        model, found = _read(path)
        self._add(model, found)
        return len(found)

    def export(self, path: Path, gpu: Gpu) -> int:
        """Write the choices of a GPU model to a file; return their number."""
        found = dict(self._of(gpu.name))
        _write(path, gpu.name, found)
        return len(found)

    def _add(self, model: str, new: Mapping[str, TunedChoice]) -> None:
        with self._lock:
            self._of(model).update(new)
            self.changes += 1

    def _of(self, model: str) -> dict[str, TunedChoice]:
        with self._lock:
            if model not in self._models:
                self._models[model] = _read_or_warn(self._file(model), model)
            return self._models[model]

    def _file(self, model: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{re.sub('[^A-Za-z0-9.]+', '-', model)}.json"


@functools.cache
def _default_choices() -> TunedChoices:
    return TunedChoices(platformdirs.user_data_path("jax_tilekern", appauthor=False) / "tuned")


_Choices = TypeVar("_Choices", bound=TunedChoices)

_current: Setting[TunedChoices | None] = Setting("tuned choices", None, is_traced=True)


def current_choices() -> TunedChoices:
    """Return the choices that plans consult."""
    return _current.value or _default_choices()


@scoped
def using(choices: _Choices) -> Iterator[_Choices]:
    """Let plans consult these choices inside the context, in the current thread.

    A call that is traced inside has them wherever it is lowered.
    """
    with _current(choices):
        yield choices


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
        self.products: list[Product | Tunable] = []

    def find(self, what: Product | Tunable, gpu: Gpu) -> TunedChoice:
        self.products.append(what)
        return TunedChoice(XLA, XLA, {XLA: 1.0}, method="", digest="", versions="", date="")

    def digest(self, gpu: Gpu) -> str:
        # Unlike that of other choices that are empty, see tuned_digest().
        return f"recorded by {id(self)}"


@contextlib.contextmanager
def recorded_products() -> Iterator[list[Product | Tunable]]:
    """Collect the products that are planned inside the context, and plan none of them.

    Calls of users' kernels that have parameters to tune are collected too.
    """
    with using(_RecordedProducts()) as recorded:
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


def _read(path: Path) -> tuple[str, dict[str, TunedChoice]]:
    """Return the GPU model of a file and its choices; OSError or ValueError if it is none."""
    content = path.read_bytes()
    try:
        whole = json.loads(content)
        if whole["schema"] != _SCHEMA:
            raise ValueError(f"it has schema {whole['schema']}, and this version reads {_SCHEMA}")
        choices = {name: TunedChoice(**entry) for name, entry in whole["choices"].items()}
        return str(whole["gpu"]), choices
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of tuned choices: {error!r}") from error


def _read_or_warn(path: Path | None, model: str) -> dict[str, TunedChoice]:
    """Return the choices of a file, or none where it is broken, which is worth one warning."""
    try:
        named, found = (model, {}) if path is None else _read(path)
        if named != model:
            raise ValueError(f"{path} is of {named}, not of {model}")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"jax_tilekern ignores {error}", RuntimeWarning, stacklevel=2)
        return {}


def _merge(path: Path, model: str, new: Mapping[str, TunedChoice]) -> None:
    """Put choices into a file, unless it cannot be written, which is worth one warning."""
    # Imported here, because only tuning writes, and importing the package must stay fast.
    import filelock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may not change the file between its reading and its writing.
        with filelock.FileLock(path.with_suffix(".lock")):
            found: dict[str, TunedChoice] = {}
            try:
                _, found = _read(path)
            except FileNotFoundError:
                pass
            except ValueError:
                # Perhaps of a newer version of this package; see _read_or_warn().
                path.replace(path.with_suffix(".json.unread"))
            _write(path, model, {**found, **new})
    except OSError as error:
        warnings.warn(
            f"jax_tilekern cannot keep tuned choices in {path} ({error}); this process has them "
            "alone",
            RuntimeWarning,
            stacklevel=2,
        )


def _write(path: Path, model: str, choices: Mapping[str, TunedChoice]) -> None:
    entries = {name: dataclasses.asdict(choices[name]) for name in sorted(choices)}
    whole = {"schema": _SCHEMA, "gpu": model, "choices": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(whole, indent=1) + "\n")
