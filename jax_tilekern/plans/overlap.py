"""Products in parts, while copies send parts between devices: whether, and the plan.

``ffi/cuda_overlap.cc`` runs such a plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
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
# Rows are divided between tiles of so many, and parts of fewer bytes lose what they hide. Two
# devices were timed with so many parts.
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
) -> tuple[int, ...] | str:
    """Return the rows of the parts that a device sends, or why a collective sends them.

    A device has ``rows`` of its shard, or of the result that it owns where terms are scattered, and
    its product takes ``flops``. It sends ``sent`` bytes to each other device; ``lhs`` and ``out``
    are the bytes of the operand and of the result.
    """
    asked = current_parts()
    if asked == 0:
        return "a collective is asked for"
    product = flops * dtype.itemsize / 2 / _FLOPS
    link = sent * (axis.size - 1) / _LINK_BYTES
    shards = axis.size if scatters else 1
    bytes_of_rows = [lhs // shards, out * shards // axis.size]
    most = min(rows, asked or _parts_of(scatters, axis, sent, link > product))
    divided = (
        tuple(parts)
        for parts in (_divided(rows, count) for count in range(most, 0, -1))
        if not any(size // rows * part % _ALIGNMENT for part in parts for size in bytes_of_rows)
    )
    parts = next(divided, None)
    if parts is None:
        return f"parts of the rows are no multiples of {_ALIGNMENT} bytes"
    if asked:
        return parts
    if not is_asked_for():
        why = _not_measured(axis, dtype)
        if why:
            return f'{why} (jax_tilekern.policy("kernels") takes an overlapped product)'
    if sent < _LEAST_BYTES:
        return f"{sent / 2**20:.3g} MiB are too few to overlap with a product"
    hidden = product + link - max(product, link + product / (axis.size * len(parts)))
    if hidden < _LEAST_HIDDEN * (product + link):
        return f"overlapping is predicted to hide {hidden:.3g} of {product + link:.4g} us"
    return parts


def _parts_of(scatters: bool, axis: MeshAxis, sent: int, takes_link: bool) -> int:
    """Return the number of parts. More parts have fewer tiles each.

    A gather hides its copies behind the own rows' product, and a scatter to several devices hides
    each term behind the next one's. Where copies take longer than the product, these hide all of it
    but the part before the first one, or behind the last one.
    """
    if axis.size != 2:
        return 1
    usual = 2 if scatters else 1
    return max(usual, min(_MOST_PARTS, sent // _LEAST_PART_BYTES)) if takes_link else usual


def _divided(rows: int, parts: int) -> list[int]:
    """Return the rows of parts that differ least, which are whole tiles where the rows are."""
    in_tiles = rows % parts > 0 and rows % _TILE_ROWS == 0 and rows >= _TILE_ROWS * parts
    unit = _TILE_ROWS if in_tiles else 1
    bounds = [i * (rows // unit) // parts * unit for i in range(parts + 1)]
    return [last - first for first, last in itertools.pairwise(bounds)]


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
