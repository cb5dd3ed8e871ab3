"""Internals of JAX and XLA that partitioning needs; they are the same in jax 0.10 to 0.12."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api as _api
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import linalg as _linalg
from jax._src.lib import gpu_solver as _gpu_solver  # type: ignore[attr-defined]
from jax._src.lib import xla_client as _xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir as _ir  # type: ignore[attr-defined]
from jax._src.lib.mlir.dialects import sdy as _sdy  # type: ignore[attr-defined]

from jax_tilekern.interop.ffi import PARTITIONED
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.partitioning.sharing import Sharing

# Further readers of an operand are not counted, and no earlier uses are searched for a call that
# gives it. So a program of many calls is lowered in a time that grows with their number.
_MOST_READERS = 8
_MOST_USES = 32
REPLICATED = _xla_client.OpSharding.Type.REPLICATED


class Place(enum.Enum):
    """The context in which a call is lowered."""

    LOCAL = "one device, or every mesh axis is manual"
    PARTITIONED = "a jit over several devices"
    PARTLY_MANUAL = "a shard_map that leaves other mesh axes to the partitioner"


def place(ctx: Any) -> Place:
    """Return the context of a lowering rule's call."""
    context = ctx.module_context.axis_context
    if isinstance(context, _sharding_impls.ShardingContext):
        return Place.PARTITIONED if context.num_devices > 1 else Place.LOCAL
    if isinstance(context, _sharding_impls.SPMDAxisContext):
        others = (n for name, n in context.mesh.shape.items() if name not in context.manual_axes)
        return Place.PARTLY_MANUAL if math.prod(others) > 1 else Place.LOCAL
    return Place.LOCAL


def is_traced_partly_manual() -> bool:
    """Return whether this is being traced in a ``shard_map`` that leaves other mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    others = (n for name, n in mesh.shape.items() if name not in mesh.manual_axes)
    return bool(mesh.manual_axes) and math.prod(others) > 1


def has_other_devices(ctx: Any) -> bool:
    """Return whether the program of a lowering rule's call runs on several devices."""
    context = ctx.module_context.axis_context
    if isinstance(context, _sharding_impls.SPMDAxisContext):
        return bool(context.mesh.size > 1)
    return isinstance(context, _sharding_impls.ShardingContext) and context.num_devices > 1


def devices_of(ctx: Any) -> int:
    """Return the number of devices of a ``jit``, or 1 elsewhere."""
    context = ctx.module_context.axis_context
    in_jit = isinstance(context, _sharding_impls.ShardingContext)
    return int(context.num_devices) if in_jit else 1


def uses_shardy() -> bool:
    """Return whether XLA propagates shardings by Shardy and not by GSPMD."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))


def adds_in_float32(platform: str, dtype: np.dtype[Any]) -> bool:
    """Return whether XLA adds partial results of its own products of this type in float32.

    CPUs before jax 0.11 do; otherwise XLA adds them in their own type.
    """
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2
    return narrow and platform == "cpu" and jax.__version_info__ < (0, 11)


def has_partial_sums(avals: Sequence[Any]) -> bool:
    """Return whether a type states that a sum over devices is pending."""
    specs = (getattr(getattr(aval, "sharding", None), "spec", None) for aval in avals)
    return any(spec is not None and (spec.unreduced or spec.reduced) for spec in specs)


# Shardings of XLA's partitioner.


def replicated() -> Any:
    """Return the sharding of an array that every device has whole."""
    return _xla_client.HloSharding.replicate()


def tiled(tiles: Sequence[int], copies: int, mesh: Sequence[int], order: Sequence[int]) -> Any:
    """Return a sharding by tiles, each on ``copies`` devices, numbered in an order of mesh axes."""
    last = ([copies], [REPLICATED]) if copies > 1 else ([], [])
    return _xla_client.HloSharding.iota_tile([*tiles, *last[0]], list(mesh), list(order), last[1])


def in_tuple(shape: Any, shardings: Sequence[Any]) -> Any:
    """Return the sharding of a call's result, which is a tuple if there are several."""
    if not shape.is_tuple():
        return shardings[0]
    return _xla_client.HloSharding.tuple_sharding(shape, list(shardings))


# The call that XLA partitions.


def emit_call(
    ctx: Any,
    operands: Sequence[Any],
    rule: ShardingRule,
    text: str,
    gives: int | None = None,
    takes: Sequence[int] = (),
) -> list[Any]:
    """Emit a custom call that has a sharding rule; return its results.

    The call takes those of the operands ``takes`` that an earlier call gives, and it gives an
    operand that none does.
    """
    _load_lapack()
    taken = {i: given for i in takes if (given := _given(operands[i])) is not None}
    gives = None if gives in taken else gives
    sharing = Sharing(gives=gives, takes=tuple(taken))
    operands = [*operands, *taken.values()]
    results = [*ctx.avals_out, *([] if gives is None else [ctx.avals_in[gives]])]
    call = _mlir.custom_call(
        PARTITIONED,
        result_types=[
            _ir.RankedTensorType.get(aval.shape, _mlir.dtype_to_ir_type(aval.dtype))
            for aval in results
        ],
        operands=operands,
        backend_config=_with_sharing(text, sharing),
        api_version=2,
    )
    shapes = [tuple(value.type.shape) for value in operands]
    call.attributes["sdy.sharding_rule"] = _sharding_rule_attribute(
        rule, shapes, [tuple(aval.shape) for aval in results]
    )
    _count_readers(call)
    _split_alike(ctx, call, rule)
    return [
        _mlir.lower_with_sharding_in_types(ctx, result, aval)
        for result, aval in zip(call.results, ctx.avals_out, strict=False)
    ]


def _split_alike(ctx: Any, call: Any, rule: ShardingRule) -> None:
    """Let a product that only an epilogue reads be split as the epilogue's result is.

    Shardy propagates shardings through elementwise functions first, and an epilogue is part of a
    call. Without this a product of a pair may be split otherwise than what is computed of both.
    A function that the program calls several times may be split in several ways, so it is left.
    """
    if not _is_in_main(call):
        return
    for place in rule.epilogue_operands:
        value = call.operands[place]
        is_alone = not isinstance(value.owner, _ir.Block) and len(list(value.uses)) == 1
        if (
            is_alone
            and rule.operands[place] == rule.results[0]
            and _text_and_sharing_of(value.owner) is not None
        ):
            number = ctx.module_context.new_channel()  # one that the module has not used
            group = _ir.IntegerAttr.get(_ir.IntegerType.get_signless(64), number)
            for x in (value, call.results[0]):
                _sdy.ShardingGroupOp(x, group)


def _is_in_main(call: Any) -> bool:
    op = call.operation.parent
    while op.name != "func.func":
        op = op.operation.parent
    return bool(_ir.StringAttr(op.attributes["sym_name"]).value == "main")


def _given(value: Any) -> Any | None:
    """Return an operand as a call gives it that precedes what is emitted, if one does."""
    block = _ir.InsertionPoint.current.block
    for use in itertools.islice(value.uses, _MOST_USES):
        found = _text_and_sharing_of(use.owner)
        if found is None or use.owner.operation.block != block:
            continue
        text, sharing = found
        if sharing.gives == use.operand_number:
            _set_sharing(use.owner, text, dataclasses.replace(sharing, is_taken=True))
            return use.owner.results[len(use.owner.results) - 1]
    return None


def _count_readers(call: Any) -> None:
    """Write into the text of calls how many of the same text read each operand in its place.

    The counts end at ``_MOST_READERS``.
    """
    text, sharing = _text_and_sharing_of(call) or ("", Sharing())
    counts = []
    for place, value in enumerate(call.operands):
        others: list[Any] = []
        found = 1
        for use in value.uses:
            if use.operand_number != place or use.owner == call:
                continue
            other_text, other = _text_and_sharing_of(use.owner) or ("", sharing)
            if other_text != text:
                continue
            others.append(use.owner)
            found = max(found, other.readers[place] if other.readers else 1)
            if found == _MOST_READERS:
                break
        counts.append(min(_MOST_READERS, max(found, len(others) + 1)))
        for other in others:
            _set_readers(other, place, counts[-1])
    for place, count in enumerate(counts):
        _set_readers(call, place, count)


def _set_readers(call: Any, place: int, count: int) -> None:
    found = _text_and_sharing_of(call)
    assert found is not None
    text, sharing = found
    if count == (sharing.readers[place] if sharing.readers else 1):
        return
    readers = list(sharing.readers or [1] * len(call.operands))
    readers[place] = count
    _set_sharing(call, text, dataclasses.replace(sharing, readers=tuple(readers)))


def _set_sharing(call: Any, text: str, sharing: Sharing) -> None:
    call.attributes["backend_config"] = _ir.StringAttr.get(_with_sharing(text, sharing))


def _with_sharing(text: str, sharing: Sharing) -> str:
    return "\n".join(filter(None, [text, sharing.text()]))


def text_and_sharing(config: str) -> tuple[str, Sharing]:
    """Return the text of :func:`emit_call`, and what the call shares with others."""
    text, _, line = config.partition("\n")
    return text, Sharing.from_text(line)


def _text_and_sharing_of(call: Any) -> tuple[str, Sharing] | None:
    """Return the text of a partitioned call, or ``None`` for another operation."""
    if (
        call.name != "stablehlo.custom_call"
        or _ir.StringAttr(call.attributes["call_target_name"]).value != PARTITIONED
    ):
        return None
    return text_and_sharing(_ir.StringAttr(call.attributes["backend_config"]).value)


def _load_lapack() -> None:
    """Load LAPACK's functions, which the program of each device may call.

    JAX loads them when it lowers such a call. A process that finds a program in the persistent
    cache lowers no such call.
    """
    _linalg.initialize_lapack()
    _gpu_solver.initialize_hybrid_kernels()


def _sharding_rule_attribute(
    rule: ShardingRule, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> Any:
    """Return a rule for arrays of these shapes, of which further ones are whole."""
    factors = {label: i for i, label in enumerate(rule.sizes)}
    sizes = list(rule.sizes.values())

    def mapping(dims: Dims, shape: Sequence[int]) -> Any:
        own = []
        for label, size in zip(dims, shape, strict=True):
            dim_factors = [] if label is None else [factors[label]]
            # The dimension has a factor of its own for the rest of its size.
            rest = size if label is None else size // rule.sizes[label]
            if label is None or (label in rule.blocked and rest > 1):
                dim_factors.append(len(sizes))
                sizes.append(rest)
            own.append(dim_factors)
        return _sdy.TensorMappingAttr.get(
            dim_mappings=[_sdy.DimMappingAttr.get(factor_indices=x) for x in own]
        )

    def mappings(labels: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> list[Any]:
        whole = ((None,) * len(shape) for shape in shapes[len(labels) :])
        return [mapping(*array) for array in zip([*labels, *whole], shapes, strict=True)]

    operand_mappings = mappings(rule.operands, operands)
    result_mappings = mappings(rule.results, results)
    whole = [i for label, i in factors.items() if label not in rule.splittable]
    return _sdy.OpShardingRuleAttr.get(
        factor_sizes=sizes,
        operand_mappings=operand_mappings,
        result_mappings=result_mappings,
        reduction_factors=sorted(factors[label] for label in rule.reductions),
        need_replication_factors=sorted([*whole, *range(len(factors), len(sizes))]),
        is_custom=True,
    )


# XLA's partitioner.


def register_partitioner(target: str, partition: Callable[..., Any]) -> None:
    """Register ``partition`` as XLA's callback for calls of a target, on every platform."""
    callbacks = {
        "name": target,
        "partition": partition,
        # Only GSPMD calls these. An exception in them would end the process.
        "prop_user_sharding": lambda sharding, *_: sharding,
        "infer_sharding_from_operands": lambda *_: replicated(),
        "can_side_effecting_have_replicated_sharding": True,
    }
    _xla_client.register_custom_call_partitioner(**callbacks)
    _xla_bridge.register_plugin_callbacks(
        functools.partial(_xla_client.register_custom_call_partitioner, **callbacks)
    )


def local_module(
    program: Callable[..., Any],
    avals: Sequence[tuple[Sequence[int], np.dtype[Any]]],
    axes: Sequence[tuple[str, int]],
    platform: str,
) -> bytes:
    """Return the module that each device runs, as MLIR bytecode.

    ``avals`` has the shape and type of each operand of ``program``, whose collectives are over
    ``axes``: names and sizes, in the row-major order of device numbers.
    """
    axes = list(axes) or [("axis0", 1)]
    names = tuple(name for name, _ in axes)
    mesh = _mesh.AbstractMesh(tuple(size for _, size in axes), names)
    operands = [_core.ShapedArray(tuple(shape), dtype) for shape, dtype in avals]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_mesh.use_abstract_mesh(_mesh.empty_abstract_mesh))
        jaxpr = _api.make_jaxpr(program, axis_env=axes)(*operands)
        stack.enter_context(_core.extend_axis_env_nd(axes))
        module = _mlir.build_mlir_module_helper(
            jaxpr,
            name="local",
            platforms=[platform],
            backend=None,
            axis_context=_sharding_impls.SPMDAxisContext(mesh, frozenset(names)),  # type: ignore[arg-type]
        )
        bytecode: bytes = _mlir.module_to_bytecode(module)
    return bytecode
