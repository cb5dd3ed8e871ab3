"""Products in parts, while copies send parts between devices: whether, and the plan.

``ffi/cuda_overlap.cc`` runs such a plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_tilekern import _core
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.launch import Buffer, Exchange, Launch, LaunchPlan
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.policy.model import model_of
from jax_tilekern.scope import Setting, scoped


class MeshAxis(NamedTuple):
    """A mesh axis along which devices exchange rows."""

    name: str
    size: int  # number of devices along it
    # Distance between the numbers of two neighbours, in the row-major order of the mesh.
    stride: int


# Measured on two H100 (docs/tuning-log.md, "Products that overlap with their communication"):
# operations of a 16-bit product and bytes over NVLink in a microsecond.
_FLOPS = 740e6
_LINK_BYTES = 268e3
# The least share of a product and its collective that is hidden. Large products, which hide less,
# are as fast one after the other (docs/tuning-log.md).
_LEAST_HIDDEN = 0.15
# The limits of the measurements, and therefore of the default: the devices of a mesh axis, and the
# bytes that a device sends to another one.
_MOST_DEVICES = 2
_LEAST_BYTES = 16 << 20
# Copies and tensor maps begin at multiples of this many bytes.
_ALIGNMENT = 128
# Rows are divided between tiles of so many. Parts of fewer bytes lose what they hide
# (docs/tuning-log.md).
_TILE_ROWS = 128
_LEAST_PART_BYTES = 8 << 20
_MOST_PARTS = 8

_parts: Setting[int | None] = Setting("parts of overlapped products", None, is_traced=True)


@scoped
def in_parts(parts: int | None) -> Iterator[None]:
    """Overlap every product that can be, in this many parts, or none in 0; for tests."""
    with _parts(parts):
        yield


def current_parts() -> int | None:
    return _parts.value


def is_asked_for() -> bool:
    """Return whether products overlap that are not known to be faster."""
    return bool(current_parts()) or current_policy() == "kernels"


def may_exchange(sent: float) -> bool:
    """Return whether products may overlap with sending so many bytes to each device."""
    asked = current_parts()
    return sent >= _LEAST_BYTES if asked is None else asked > 0


def parts_of_rows(
    *,
    scatters: bool,
    axis: MeshAxis,
    rows: int,
    sent: int,
    lhs: int,
    out: int,
    flops: float,
    dtype: np.dtype[Any],
) -> int | str:
    """Return in how many parts a device's rows are sent, or why a collective sends them.

    A device has ``rows`` of its shard, or of the result that it owns where terms are scattered, and
    its product takes ``flops``. It sends ``sent`` bytes to each other device; ``lhs`` and ``out``
    are the bytes of the operand and of the result.
    """
    asked = current_parts()
    if asked == 0:
        return "a collective is asked for"
    # More parts have fewer tiles each. A gather hides its copies behind the own rows' product, and
    # a scatter to several devices hides each term behind the next one's.
    parts = asked or (2 if scatters and axis.size == 2 else 1)
    while parts > 1 and rows % parts:
        parts -= 1
    lhs_parts, out_parts = (axis.size * parts, parts) if scatters else (parts, axis.size * parts)
    if rows == 0 or lhs % (lhs_parts * _ALIGNMENT) or out % (out_parts * _ALIGNMENT):
        return f"parts of the rows are no multiples of {_ALIGNMENT} bytes"
    if asked:
        return parts
    if not is_asked_for():
        why = _not_measured(axis, dtype)
        if why:
            return f'{why} (jax_tilekern.policy("kernels") takes an overlapped product)'
    if sent < _LEAST_BYTES:
        return f"{sent / 2**20:.3g} MiB are too few to overlap with a product"
    product = flops * dtype.itemsize / 2 / _FLOPS
    link = sent * (axis.size - 1) / _LINK_BYTES
    hidden = product + link - max(product, link + product / (axis.size * parts))
    if hidden < _LEAST_HIDDEN * (product + link):
        return f"overlapping is predicted to hide {hidden:.3g} of {product + link:.4g} us"
    return parts


def rows_of_parts(
    usual: Sequence[int],
    sent: int,
    *,
    scatters: bool,
    first_us: Callable[[int], float],
    then_us: Callable[[int], float],
) -> Sequence[int]:
    """Return the rows of the parts in which two devices are predicted to end first.

    ``usual`` are those of the parts that are measured. First a device computes products of so many
    rows by itself, then those whose kernels need what the other device sends: ``first_us`` and
    ``then_us`` predict their microseconds. A scatter sends what is computed first.
    """
    rows = sum(usual)
    link_us = sent / _LINK_BYTES / rows

    def end(parts: Sequence[int]) -> float:
        now, arrived, arrivals = 0.0, 0.0, []
        for part in parts:
            now += first_us(part)
            arrived = max(arrived, now if scatters else 0.0) + link_us * part
            arrivals.append(arrived)
        for part, arrived in zip(parts, arrivals, strict=True):
            now = max(now, arrived) + then_us(part)
        return now

    tiles, remainder = divmod(rows, _TILE_ROWS)
    most = min(_MOST_PARTS, tiles, sent // _LEAST_PART_BYTES)
    if remainder or most < 2:
        return usual
    bounds = [[i * tiles // count for i in range(count + 1)] for count in range(1, most + 1)]
    # Kernels have waves of tiles, and the last wave of a part may be small. So equal parts are
    # seldom the fastest.
    least = math.ceil(tiles * _LEAST_PART_BYTES / sent)
    bounds += [[0, first, tiles] for first in range(least, tiles - least + 1)]
    others = (
        [_TILE_ROWS * (last - first) for first, last in itertools.pairwise(x)] for x in bounds
    )
    return min([usual, *others], key=end)


def _not_measured(axis: MeshAxis, dtype: np.dtype[Any]) -> str:
    """Return why the default policy does not know that an overlapped product is faster."""
    try:
        gpu = current_gpu()
    except NoGpu as error:
        return str(error)
    if model_of(gpu.name) is None:
        return f"no times on {gpu.name} are recorded"
    if axis.size > _MOST_DEVICES:
        return f"no times of more than {_MOST_DEVICES} devices are recorded"
    if dtype.itemsize != 2:
        return f"no times of {dtype} are recorded"
    return ""


def why_no_exchange() -> str:
    """Return why the GPUs of this process cannot send each other parts, or nothing."""
    return _core.why_no_peer_access()


class Part(NamedTuple):
    """The products of a part of the rows.

    Attributes
    ----------
    rows
        How many these are.
    plans
        A gather has the plan of the product. A scatter has that of a term, and that of one to which
        an epilogue adds the terms of the other devices.
    reads
        For each plan, which array each of its operands is, but for the terms of the other devices.
        The first array has the rows.
    """

    rows: int
    plans: Sequence[LaunchPlan]
    reads: Sequence[Sequence[int]]


def gather_plan(parts: Sequence[Part], axis: MeshAxis, *, keeps: bool) -> LaunchPlan:
    """Return the plan of a product whose rows are gathered.

    Its buffers are the arrays that the products read, the number of the device, the result and the
    gathered array. See :class:`~jax_tilekern.plans.launch.Exchange`.
    """
    alignments = _alignments(parts)
    n = len(alignments)
    plans = [part.plans[0] for part in parts]
    buffers = [[*map(Buffer, part.reads[0]), Buffer(n + 1)] for part in parts]
    launches, ends, workspaces = _placed(plans, buffers, n + 3)
    rows = tuple(part.rows for part in parts)
    return dataclasses.replace(
        plans[0],
        launches=launches,
        alignments=(*alignments, 4, max(plan.alignments[-1] for plan in plans), _ALIGNMENT),
        workspace_bytes=workspaces,
        reason=_reason(plans[0], f"rows gathered over {axis.name}", rows),
        exchange=Exchange(
            False, axis.name, axis.size, axis.stride, rows,
            lhs=0, device=n, out=n + 1, receive=n + 2, send=n + 2, ends=ends, keeps=keeps,
        ),
    )  # fmt: skip


def scatter_plan(
    parts: Sequence[Part], addend: int | None, axis: MeshAxis, shard_bytes: int
) -> LaunchPlan:
    """Return the plan of a product whose terms are scattered.

    The buffers are the arrays that the products read, the number of the device, the result, the
    terms of the other devices and the terms for them. ``addend`` is the array that has a further
    term of all rows, if there is one. A device sends ``shard_bytes`` to another one.
    """
    alignments = _alignments(parts)
    n = len(alignments)
    terms = [Buffer(n + 2, i * shard_bytes) for i in range(axis.size - 1)]
    plans = [part.plans[i] for i in range(2) for part in parts]
    buffers = [[*map(Buffer, part.reads[0]), Buffer(n + 1)] for part in parts]
    buffers += [[*map(Buffer, part.reads[1]), *terms, Buffer(n + 1)] for part in parts]
    launches, ends, workspaces = _placed(plans, buffers, n + 4)
    rows = tuple(part.rows for part in parts)
    return dataclasses.replace(
        plans[0],
        launches=launches,
        alignments=(*alignments, 4, *3 * [_ALIGNMENT]),
        workspace_bytes=workspaces,
        reason=_reason(plans[0], f"terms scattered over {axis.name}", rows),
        exchange=Exchange(
            True, axis.name, axis.size, axis.stride, rows,
            lhs=0, device=n, out=n + 1, receive=n + 2, send=n + 3, ends=ends, addend=addend,
        ),
    )  # fmt: skip


def _alignments(parts: Sequence[Part]) -> list[int]:
    """Return the alignment of each array that products read."""
    found: dict[int, int] = {}
    for part in parts:
        for plan, reads in zip(part.plans, part.reads, strict=True):
            for i, alignment in zip(reads, plan.alignments, strict=False):
                found[i] = max(found.get(i, 1), alignment)
    return [found[i] for i in range(len(found))]


def _reason(part: LaunchPlan, what: str, rows: Sequence[int]) -> str:
    # The text after the kernel's description compares one part with XLA's product of it.
    kernel, *_ = part.reason.partition("; ")
    parts = f"{len(rows)} part{'s' * (len(rows) > 1)}"
    if len({*rows}) > 1:
        parts += f" of {', '.join(map(str, rows))} rows"
    return f"{kernel}; {what} in {parts} meanwhile"


def _placed(
    plans: Sequence[LaunchPlan], buffers: Sequence[Sequence[Buffer]], first_workspace: int
) -> tuple[tuple[Launch, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the launches of plans over common buffers, where each plan's end, and the workspaces.

    The plans share the workspaces.
    """
    counts = [len(plan.workspace_bytes) for plan in plans]
    sizes = tuple(
        max(plan.workspace_bytes[i] for plan in plans if i < len(plan.workspace_bytes))
        for i in range(max(counts))
    )
    shared = [Buffer(first_workspace + i) for i in range(len(sizes))]
    launches = tuple(
        launch.placed([*own, *shared])
        for plan, own in zip(plans, buffers, strict=True)
        for launch in plan.launches
    )
    ends = itertools.accumulate(len(plan.launches) for plan in plans)
    return launches, tuple(ends), sizes
