"""Products in parts, while copies send parts between devices: whether, and the plan.

``ffi/cuda_overlap.cc`` runs such a plan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
# Rows are divided between tiles, at one of so many places.
_TILE_ROWS = 128
_MOST_SPLITS = 16

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


def split_rows(rows: int, sent: int, product_us: Callable[[int], float]) -> tuple[int, int]:
    """Return the rows of the two parts of a scatter to one device that are predicted to end first.

    ``product_us`` predicts the product of so many rows. Kernels have waves of tiles, and the last
    one of a part may be small, so that equal parts are seldom the fastest.
    """
    predicted = functools.cache(product_us)
    link_us = sent / _LINK_BYTES / rows

    def end(first: int) -> float:
        """Return when both parts of the device's own rows are computed."""
        second = rows - first
        terms = predicted(first) + predicted(second)
        first_comes = predicted(first) + link_us * first
        second_comes = max(terms, first_comes) + link_us * second
        own = max(terms, first_comes) + predicted(first)
        return max(own, second_comes) + predicted(second)

    step = _TILE_ROWS * max(1, rows // (_MOST_SPLITS * _TILE_ROWS))
    first = min([rows // 2, *range(step, rows, step)], key=end)
    return first, rows - first


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


def gather_plan(
    part: LaunchPlan, lhs: int, axis: MeshAxis, rows: Sequence[int], *, keeps: bool
) -> LaunchPlan:
    """Return the plan of a product whose ``lhs`` is gathered, given that of a part of it.

    Its buffers are the operands of ``part``, the number of the device, the result and the gathered
    array. Parts have equal numbers of rows. See :class:`~jax_tilekern.plans.launch.Exchange`.
    """
    n = len(part.alignments) - 1
    plans, buffers = [part] * len(rows), [[*map(Buffer, range(n)), Buffer(n + 1)]] * len(rows)
    launches, ends, workspaces = _placed(plans, buffers, n + 3)
    *operands, out = part.alignments
    return dataclasses.replace(
        part,
        launches=launches,
        alignments=(*operands, 4, out, _ALIGNMENT),
        workspace_bytes=workspaces,
        reason=_reason(part, f"rows gathered over {axis.name}", rows),
        exchange=Exchange(
            False, axis.name, axis.size, axis.stride, tuple(rows), lhs,
            device=n, out=n + 1, receive=n + 2, send=n + 2, ends=ends, keeps=keeps,
        ),
    )  # fmt: skip


class PartOfScatter(NamedTuple):
    """The products of a part of the rows of a scatter.

    Attributes
    ----------
    rows
        How many these are.
    term, total
        The plan of a term, and of one to which an epilogue adds the terms of the other devices.
    term_reads, total_reads
        Which array each operand of the plans is, but for the terms of the other devices.
    """

    rows: int
    term: LaunchPlan
    total: LaunchPlan
    term_reads: Sequence[int]
    total_reads: Sequence[int]


def scatter_plan(
    parts: Sequence[PartOfScatter],
    lhs: int,
    addend: int | None,
    axis: MeshAxis,
    shard_bytes: int,
) -> LaunchPlan:
    """Return the plan of a product whose terms are scattered.

    The buffers are the arrays that the products read, the number of the device, the result, the
    terms of the other devices and the terms for them. A device sends ``shard_bytes`` to another
    one.
    """
    alignments: dict[int, int] = {}
    for part in parts:
        for plan, reads in ((part.term, part.term_reads), (part.total, part.total_reads)):
            for i, alignment in zip(reads, plan.alignments, strict=False):
                alignments[i] = max(alignments.get(i, 1), alignment)
    n = 1 + max(alignments)
    terms = [Buffer(n + 2, i * shard_bytes) for i in range(axis.size - 1)]
    plans = [part.term for part in parts] + [part.total for part in parts]
    buffers = [[*map(Buffer, part.term_reads), Buffer(n + 1)] for part in parts]
    buffers += [[*map(Buffer, part.total_reads), *terms, Buffer(n + 1)] for part in parts]
    launches, ends, workspaces = _placed(plans, buffers, n + 4)
    rows = tuple(part.rows for part in parts)
    return dataclasses.replace(
        plans[0],
        launches=launches,
        alignments=(*(alignments[i] for i in range(n)), 4, *3 * [_ALIGNMENT]),
        workspace_bytes=workspaces,
        reason=_reason(plans[0], f"terms scattered over {axis.name}", rows),
        exchange=Exchange(
            True, axis.name, axis.size, axis.stride, rows, lhs,
            device=n, out=n + 1, receive=n + 2, send=n + 3, ends=ends, addend=addend,
        ),
    )  # fmt: skip


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
