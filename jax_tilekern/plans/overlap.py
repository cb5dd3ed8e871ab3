"""Products in parts, while copies send parts between devices: whether, and the plan.

``ffi/cuda_overlap.cc`` runs such a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_tilekern import _core
from jax_tilekern.plans.launch import Buffer, Exchange, Launch, LaunchPlan
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.scope import Setting, scoped


class MeshAxis(NamedTuple):
    """A mesh axis along which devices exchange rows.

    Attributes
    ----------
    name
        Its name.
    size
        Number of devices along it.
    stride
        Distance between the numbers of two neighbours, in the row-major order of the mesh.
    """

    name: str
    size: int
    stride: int


# Measured on two H100 (docs/tuning-log.md, "Products that overlap with their communication"):
# operations of a 16-bit product and bytes over NVLink in a microsecond, what a collective takes
# besides its bytes, and what an overlapped product takes besides the longer one of the two.
_FLOPS = 740e6
_LINK_BYTES = 268e3
_COLLECTIVE = 45.0
_OVERHEAD = 90.0
# Smaller parts lose more than they hide.
_LEAST_PART_BYTES = 8 << 20
# Parts of a gather are larger, since each one's product has fewer tiles. The first part of a
# scatter is not hidden, nor is the last one of a gather.
_BYTES_OF_A_PART = {False: 16 << 20, True: 8 << 20}
_MOST_PARTS = {False: 4, True: 2}
# Copies and tensor maps begin at multiples of this many bytes.
_ALIGNMENT = 128

_parts: Setting[int | None] = Setting("parts of overlapped products", None)


@scoped
def in_parts(parts: int | None) -> Iterator[None]:
    """Overlap every product that can be, in this many parts; for tests and measurements."""
    with _parts(parts):
        yield


def current_parts() -> int | None:
    """Return the number of parts that :func:`in_parts` asks for."""
    return _parts.value


def parts_of_rows(
    *, scatters: bool, axis: MeshAxis, rows: int, sent: int, lhs: int, out: int, flops: float
) -> int | str:
    """Return in how many parts a device's rows are sent, or why a collective sends them.

    Parameters
    ----------
    scatters
        Whether terms of the result are sent, and not rows of the operand.
    axis
        The axis along which devices exchange them.
    rows
        Rows of a device: its shard's, or those of the result that it owns.
    sent, lhs, out
        Bytes of what a device sends to each other one, of the operand and of the result.
    flops
        Operations of a device's product with 16-bit operands; twice as many for 32-bit ones.
    """
    asked = current_parts()
    parts = asked or min(_MOST_PARTS[scatters], max(1, sent // _BYTES_OF_A_PART[scatters]))
    while parts > 1 and rows % parts:
        parts -= 1
    lhs_parts, out_parts = (axis.size * parts, parts) if scatters else (parts, axis.size * parts)
    if rows == 0 or lhs % (lhs_parts * _ALIGNMENT) or out % (out_parts * _ALIGNMENT):
        return f"parts of the rows are no multiples of {_ALIGNMENT} bytes"
    if asked:
        return parts
    # Only this policy takes it, because the handler has run on no GPU yet.
    if current_policy() != "kernels":
        return 'an overlapped product is taken by jax_tilekern.policy("kernels") only'
    if sent // parts < _LEAST_PART_BYTES:
        return f"{sent / 2**20:.3g} MiB are too few to overlap with a product"
    product, link = flops / _FLOPS, sent * (axis.size - 1) / _LINK_BYTES
    overlapped = max(product, link + product / (axis.size * parts)) + _OVERHEAD
    separate = product + link + _COLLECTIVE
    if overlapped > separate:
        return f"predicted {overlapped:.4g} us overlapped, {separate:.4g} us one after the other"
    return parts


def why_no_exchange() -> str:
    """Return why the GPUs of this process cannot send each other parts, or nothing."""
    return _core.why_no_peer_access()


def gather_plan(
    part: LaunchPlan, lhs: int, axis: MeshAxis, parts: int, *, keeps: bool
) -> LaunchPlan:
    """Return the plan of a product whose ``lhs`` is gathered.

    Its buffers are the operands of ``part``, the number of the device, the result and the gathered
    array.

    Parameters
    ----------
    part
        The plan of the product of a part of ``lhs``.
    lhs
        Which of its operands that is.
    axis, parts, keeps
        As in :class:`~jax_tilekern.plans.launch.Exchange`.
    """
    n = len(part.alignments) - 1
    launches, workspaces = _placed([part], [[*map(Buffer, range(n)), Buffer(n + 1)]], n + 3)
    *operands, out = part.alignments
    return dataclasses.replace(
        part,
        launches=launches,
        alignments=(*operands, 4, out, _ALIGNMENT),
        workspace_bytes=workspaces,
        reason=f"{part.reason}; rows gathered over {axis.name} in {parts} parts meanwhile",
        exchange=Exchange(
            False, axis.name, axis.size, axis.stride, parts, lhs,
            device=n, out=n + 1, receive=n + 2, send=n + 2, term_launches=0, keeps=keeps,
        ),
    )  # fmt: skip


def scatter_plan(
    term: LaunchPlan,
    total: LaunchPlan,
    lhs: int,
    read: Sequence[int],
    axis: MeshAxis,
    parts: int,
    part_bytes: int,
) -> LaunchPlan:
    """Return the plan of a product whose terms are scattered.

    Its buffers are the operands of ``term``, the number of the device, the result, the terms of the
    other devices and the terms for them.

    Parameters
    ----------
    term
        The plan of the product of a part of ``lhs``.
    total
        The plan of such a product to which an epilogue adds the terms of the other devices.
    lhs
        Which of the operands of ``term`` is ``lhs``.
    read
        For each operand of ``total``, which operand of ``term`` it is. The terms follow.
    axis, parts
        As in :class:`~jax_tilekern.plans.launch.Exchange`.
    part_bytes
        Bytes of a part of the result.
    """
    n = len(term.alignments) - 1
    terms = [Buffer(n + 2, i * parts * part_bytes) for i in range(axis.size - 1)]
    of_term = [*map(Buffer, range(n)), Buffer(n + 1)]
    of_total = [*map(Buffer, read), *terms, Buffer(n + 1)]
    launches, workspaces = _placed([term, total], [of_term, of_total], n + 4)
    alignments = list(term.alignments[:n])
    for i, alignment in zip(read, total.alignments, strict=False):
        alignments[i] = max(alignments[i], alignment)
    return dataclasses.replace(
        term,
        launches=launches,
        alignments=(*alignments, 4, *3 * [_ALIGNMENT]),
        workspace_bytes=workspaces,
        reason=f"{term.reason}; terms scattered over {axis.name} in {parts} parts meanwhile",
        exchange=Exchange(
            True, axis.name, axis.size, axis.stride, parts, lhs,
            device=n, out=n + 1, receive=n + 2, send=n + 3,
            term_launches=len(term.launches), keeps=False,
        ),
    )  # fmt: skip


def _placed(
    plans: Sequence[LaunchPlan], buffers: Sequence[Sequence[Buffer]], first_workspace: int
) -> tuple[tuple[Launch, ...], tuple[int, ...]]:
    """Return the launches of plans over common buffers, and the workspaces.

    Plans run one after the other, so they share the workspaces.
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
    return launches, sizes
