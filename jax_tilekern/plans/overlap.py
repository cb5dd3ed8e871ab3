"""Products in parts, while copies send parts between devices: whether, and the plan.

``ffi/cuda_overlap.cc`` runs such a plan.
"""

from __future__ import annotations

import dataclasses
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
    part: LaunchPlan, lhs: int, axis: MeshAxis, parts: int, *, keeps: bool
) -> LaunchPlan:
    """Return the plan of a product whose ``lhs`` is gathered, given that of a part of it.

    Its buffers are the operands of ``part``, the number of the device, the result and the gathered
    array. See :class:`~jax_tilekern.plans.launch.Exchange`.
    """
    n = len(part.alignments) - 1
    launches, workspaces = _placed([part], [[*map(Buffer, range(n)), Buffer(n + 1)]], n + 3)
    *operands, out = part.alignments
    return dataclasses.replace(
        part,
        launches=launches,
        alignments=(*operands, 4, out, _ALIGNMENT),
        workspace_bytes=workspaces,
        reason=_reason(part, f"rows gathered over {axis.name}", parts),
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

    ``term`` is the plan of the product of a part of ``lhs``, and ``total`` that of such a product
    to which an epilogue adds the terms of the other devices; ``read`` has the operand of ``term``
    for each operand of ``total`` before the terms. The buffers are the operands of ``term``, the
    number of the device, the result, the terms of the other devices and the terms for them.
    """
    n = len(term.alignments) - 1
    terms = [Buffer(n + 2, i * parts * part_bytes) for i in range(axis.size - 1)]
    term_buffers = [*map(Buffer, range(n)), Buffer(n + 1)]
    total_buffers = [*map(Buffer, read), *terms, Buffer(n + 1)]
    launches, workspaces = _placed([term, total], [term_buffers, total_buffers], n + 4)
    alignments = list(term.alignments[:n])
    for i, alignment in zip(read, total.alignments, strict=False):
        alignments[i] = max(alignments[i], alignment)
    return dataclasses.replace(
        term,
        launches=launches,
        alignments=(*alignments, 4, *3 * [_ALIGNMENT]),
        workspace_bytes=workspaces,
        reason=_reason(term, f"terms scattered over {axis.name}", parts),
        exchange=Exchange(
            True, axis.name, axis.size, axis.stride, parts, lhs,
            device=n, out=n + 1, receive=n + 2, send=n + 3,
            term_launches=len(term.launches), keeps=False,
        ),
    )  # fmt: skip


def _reason(part: LaunchPlan, what: str, parts: int) -> str:
    # The text after the kernel's description compares one part with XLA's product of it.
    kernel, *_ = part.reason.partition("; ")
    return f"{kernel}; {what} in {parts} part{'s' * (parts > 1)} meanwhile"


def _placed(
    plans: Sequence[LaunchPlan], buffers: Sequence[Sequence[Buffer]], first_workspace: int
) -> tuple[tuple[Launch, ...], tuple[int, ...]]:
    """Return the launches of plans over common buffers, and the workspaces, which they share."""
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
