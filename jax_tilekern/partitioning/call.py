"""Calls that XLA partitions: a custom call with a sharding rule, and the answer to its partitioner.

A call of a ``jit`` over several devices is lowered before XLA propagates shardings. So it becomes a
custom call that carries a sharding rule, by which Shardy propagates shardings, and the call's
parameters as text. When XLA has settled the shardings it calls :func:`_partition`, which chooses a
partition and returns the program of each device. That program lowers the call's own primitive once
more, with local shapes, and plans a kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_tilekern.interop import outcomes
from jax_tilekern.interop.ffi import PARTITIONED
from jax_tilekern.interop.global_modes import by_types, by_xla
from jax_tilekern.interop.outcomes import (
    Choice,
    await_partition,
    record_partition,
    recorded_choices,
    recorder_token,
)
from jax_tilekern.partitioning import xla
from jax_tilekern.partitioning.choice import choose_partition
from jax_tilekern.partitioning.local_program import (
    FunctionOfSum,
    Shard,
    axis_names,
    local_program,
)
from jax_tilekern.partitioning.mesh import common_mesh, hlo_sharding, local_shape
from jax_tilekern.partitioning.params_text import from_text, to_text
from jax_tilekern.partitioning.partition import Partition
from jax_tilekern.partitioning.row_exchange import RowExchange, row_exchange
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.partitioning.shared_rows import giving, shared_rows, taking
from jax_tilekern.partitioning.sharing import Sharing
from jax_tilekern.plans.cpu import current_cpu
from jax_tilekern.plans.gpu import NoGpu, current_gpu, planning_beside_collectives
from jax_tilekern.plans.overlap import current_parts, in_parts
from jax_tilekern.plans.policy import current_policy, policy
from jax_tilekern.plans.policy.model import data_digest
from jax_tilekern.plans.tuned import tuned_digest, using_digest


@dataclass(frozen=True)
class PartitionedOperation:
    """An operation whose calls XLA can partition."""

    name: str
    rule: Callable[..., ShardingRule]  # rule(*avals, **params) returns the sharding rule of a call.
    # ``bind(*operands, **params)`` computes a call and returns its results.
    bind: Callable[..., Sequence[Any]]
    # ``localised(shard, *operands, **params)`` rewrites operands that hold indices along a label
    # that is split.
    localised: Callable[..., Sequence[Any]] | None = None
    # ``in_float32(**params)`` returns the parameters of the call with float32 results, those that
    # devices combine.
    in_float32: Callable[..., dict[str, Any]] | None = None
    terms_in_float32: bool = False
    # ``function_of_sum(**params)`` divides a call with an epilogue in two steps, for devices that
    # hold parts of the contracted dimensions.
    function_of_sum: Callable[..., FunctionOfSum] | None = None


AlongAxis = Callable[..., Callable[..., Sequence[Any]] | None]
_operations: dict[str, PartitionedOperation] = {}
_along_axis: dict[str, AlongAxis] = {}


def register(operation: PartitionedOperation) -> None:
    _operations[operation.name] = operation


def register_exchange(name: str, along_axis: AlongAxis) -> None:
    """Let devices exchange rows in calls of a registered operation.

    ``along_axis(exchange, *operands, **params)``, given the types of local operands, returns the
    function of them in which devices exchange rows, or ``None`` where a collective does it.
    """
    _along_axis[name] = along_axis


def _exchanges_rows(operation: PartitionedOperation, platform: str) -> bool:
    return platform == "cuda" and operation.name in _along_axis


def lower_partitioned(
    ctx: Any,
    operation: PartitionedOperation,
    platform: str,
    described: str,
    *values: Any,
    **params: Any,
) -> Sequence[Any]:
    """Lower a call of ``values`` to a custom call that XLA partitions.

    The program of each device is lowered for ``platform``; ``described`` is the call in words, for
    ``explain``.
    """
    rule = operation.rule(*ctx.avals_in, **params)
    # Devices may share work on arrays that all have, and XLA does not pass the number of devices.
    text = _text(operation, platform, params, xla.devices_of(ctx) if rule.shared else 1)
    await_partition(text, described, ctx, platform)
    if rule.results_follow is not None:
        values = _without_conflicts(ctx, platform, values, rule, rule.results_follow)
    if not _exchanges_rows(operation, platform):
        return xla.emit_call(ctx, values, rule, text)
    gives, takes = shared_rows(rule, ctx.avals_in, xla.devices_of(ctx))
    return xla.emit_call(ctx, values, rule, text, gives, takes)


def _without_conflicts(
    ctx: Any, platform: str, values: Sequence[Any], rule: ShardingRule, first: int
) -> tuple[Any, ...]:
    """Return the operands, without shardings that conflict with that of the operand ``first``.

    XLA propagates another operand's sharding through a call of ``_FOLLOWING`` unless it conflicts
    with the first one's. Then the call's result has the sharding that follows from the first.
    """
    text = _text(_FOLLOWING, platform, {})

    def followed(i: int) -> Any:
        if i == first:
            return values[i]
        pair_ctx = ctx.replace(
            avals_in=[ctx.avals_in[first], ctx.avals_in[i]], avals_out=[ctx.avals_in[i]]
        )
        own = rule.operands[i]
        common = tuple(label if label in own else None for label in rule.operands[first])
        sizes = {label: rule.sizes[label] for label in own if label is not None}
        both = ShardingRule((common, own), (own,), sizes, flops=0)
        (value,) = xla.emit_call(pair_ctx, (values[first], values[i]), both, text)
        return value

    return tuple(map(followed, range(len(values))))


def _rule_of_following(first: Any, x: Any) -> ShardingRule:
    """Return the rule by which a call of ``_FOLLOWING`` is partitioned: it reads ``x`` alone."""
    dims = tuple(range(x.ndim))
    sizes = sizes_of((dims, x.shape))
    return ShardingRule(((None,) * first.ndim, dims), (dims,), sizes, flops=0)


_FOLLOWING = PartitionedOperation("following", _rule_of_following, lambda _, x: [x])
register(_FOLLOWING)


def _text(
    operation: PartitionedOperation, platform: str, params: dict[str, Any], devices: int = 1
) -> str:
    """Return everything that decides the answer to XLA, as part of the program's cache key."""
    from jax_tilekern import __version__

    gpu, tuned, data = "", "", data_digest(current_cpu().name)
    if platform == "cuda":
        with contextlib.suppress(NoGpu):
            gpu, tuned = current_gpu().name, tuned_digest(current_gpu())
        data = data_digest(gpu)
    content = {
        "operation": operation.name,
        "params": to_text(params),
        "platform": platform,
        "devices": devices,
        "gpu": gpu,
        "tuned": tuned,
        "data": data,
        "mode": outcomes.current(),
        "policy": current_policy(),
        "parts": current_parts(),
        "version": __version__,
        "explain": recorder_token(),
    }
    return json.dumps(content, sort_keys=True)


# XLA's callback.

_Answer = tuple[bytes, list[Any], Any]
# Equal layers need equal answers, and lowering an answer takes milliseconds.
_answers: dict[tuple[str, ...], tuple[_Answer, list[Choice]]] = {}
_MAX_ANSWERS = 4096
_lock = threading.Lock()


def _partition(
    operand_shapes: Sequence[Any],
    operand_shardings: Sequence[Any],
    result_shape: Any,
    result_sharding: Any,
    config: bytes | str,
) -> _Answer:
    """Return the module of each device, and the shardings of its operands and results."""
    config = config.decode() if isinstance(config, bytes) else config
    text, sharing = xla.text_and_sharing(config)
    question = (*operand_shapes, result_shape, *operand_shardings, result_sharding)
    key = (config, *map(str, question))
    with _lock:
        found = _answers.get(key)
    if found is None:
        found = _answer(
            operand_shapes, operand_shardings, result_shape, result_sharding, text, sharing
        )
        with _lock:
            if len(_answers) >= _MAX_ANSWERS:
                _answers.clear()
            _answers[key] = found
    answer, choices = found
    record_partition(text, choices)
    return answer


def _answer(
    operand_shapes: Sequence[Any],
    operand_shardings: Sequence[Any],
    result_shape: Any,
    result_sharding: Any,
    text: str,
    sharing: Sharing,
) -> tuple[_Answer, list[Choice]]:
    content = json.loads(text)
    operation = _operations[content["operation"]]
    params = from_text(content["params"])
    several = result_shape.is_tuple()
    result_shapes = result_shape.tuple_shapes() if several else [result_shape]
    result_shardings = result_sharding.tuple_elements() if several else [result_sharding]
    operands, results = (
        [jax.core.ShapedArray(tuple(x.dimensions()), np.dtype(x.numpy_dtype())) for x in shapes]
        for shapes in (operand_shapes, result_shapes)
    )
    n = len(operands) - len(sharing.takes)
    given = [] if sharing.gives is None else [sharing.gives]
    computed = results[: len(results) - len(given)]
    arrays = [*operands[:n], *computed]
    rule = operation.rule(*operands[:n], **params)
    shardings = [*operand_shardings[:n], *result_shardings[: len(computed)]]
    mesh, specs = common_mesh(shardings, [x.ndim for x in arrays], content["devices"])
    nbytes = [math.prod(x.shape) * x.dtype.itemsize for x in arrays]
    exchange_of = _row_exchanges(operation, operands[:n], params, content, sharing)
    partition = choose_partition(
        rule, mesh, specs[:n], specs[n:], nbytes[:n], nbytes[n:], sharing.readers[:n] or [1] * n,
        lambda partition: sum(x.bytes_sent for x, _ in exchange_of(partition)),
    )  # fmt: skip
    partition, given_specs, places = taking(partition, specs, sharing)
    described = ", ".join(
        [partition.described(), *(f"operand {i} as another call gathers it" for i in places)]
    )
    bind, keeps = operation.bind, False
    for exchange, function in exchange_of(partition):
        partition, bind, keeps = exchange.partition, function, exchange.keeps
    if sharing.gives is not None and not keeps:
        partition, bind = giving(partition, bind, sharing.gives)

    by_operands = _program(
        dataclasses.replace(operation, bind=bind), params, partition, [x.dtype for x in results],
        content["platform"],
    )  # fmt: skip

    def program(*operands: Any) -> list[Any]:
        return by_operands(*(operands[places.get(i, i)] for i in range(n)))

    operand_specs = [*(x.spec for x in partition.operands), *given_specs]
    local = [
        (local_shape(x.shape, spec, mesh), x.dtype)
        for x, spec in zip(operands, operand_specs, strict=True)
    ]
    axes = list(zip(axis_names(range(len(mesh))), mesh, strict=True))
    tuned, mode = using_digest(content["tuned"]), outcomes.entered(content["mode"])
    policy_then, parts_then = policy(content["policy"]), in_parts(content["parts"])
    # XLA calls on its own thread, or on one that has the contexts of the compiling code.
    types = by_types(operands, results, params)
    beside = planning_beside_collectives()
    with (
        recorded_choices(content["platform"]) as recorder,
        tuned, mode, policy_then, parts_then, types, beside,
    ):  # fmt: skip
        module = xla.local_module(by_xla(program), local, axes, content["platform"])
    choices = [dataclasses.replace(choice, partition=described) for choice in recorder.choices]
    taken = [hlo_sharding(spec, mesh) for spec in operand_specs]
    returned = [hlo_sharding(x.spec, mesh) for x in partition.results]
    return (module, taken, xla.in_tuple(result_shape, returned)), choices


_Exchanges = list[tuple[RowExchange, Callable[..., Sequence[Any]]]]


def _row_exchanges(
    operation: PartitionedOperation,
    operands: Sequence[Any],
    params: dict[str, Any],
    content: dict[str, Any],
    sharing: Sharing,
) -> Callable[[Partition], _Exchanges]:
    """Return a function of a partition to the exchange that replaces its collective.

    It returns a list of the exchange and of the function of local operands, or an empty one.
    """

    def found(partition: Partition) -> _Exchanges:
        if not _exchanges_rows(operation, content["platform"]):
            return []
        exchange = row_exchange(partition, sharing)
        if exchange is None:
            return []
        local = [
            jax.core.ShapedArray(shape, x.dtype)
            for shape, x in zip(exchange.shapes, operands, strict=True)
        ]
        with policy(content["policy"]), in_parts(content["parts"]):
            function = _along_axis[operation.name](exchange, *local, **params)
        return [] if function is None else [(exchange, function)]

    return found


def _program(
    operation: PartitionedOperation,
    params: dict[str, Any],
    partition: Partition,
    dtypes: Sequence[np.dtype[Any]],
    platform: str,
) -> Callable[..., list[Any]]:
    """Return the function from one device's operands to its results."""
    wide = params if operation.in_float32 is None else operation.in_float32(**params)

    def term_params(dtype: np.dtype[Any]) -> dict[str, Any]:
        """Return the parameters by which a device computes its term of a sum."""
        return wide if xla.adds_in_float32(platform, dtype) else params

    def localised(shard: Shard, *local: Any) -> Sequence[Any]:
        return operation.localised(shard, *local, **params) if operation.localised else local

    if partition.sum is not None:
        assert operation.function_of_sum is not None
        whole = operation.function_of_sum(**params)
        term = operation.function_of_sum(**term_params(whole.dtype))
        parts = operation.function_of_sum(**wide)
        function = FunctionOfSum(term.sum, whole.dtype, parts.epilogue)
        return local_program(partition, dtypes, function, localised)
    local_params = params
    if partition.has_partial_results:
        # XLA reduces rows in float32, but adds products in their own type.
        has_epilogue = partition.rule.epilogue_from is not None
        in_float32 = operation.terms_in_float32 or has_epilogue
        local_params = wide if in_float32 else term_params(dtypes[0])

    bind = functools.partial(operation.bind, **local_params)
    return local_program(partition, dtypes, bind, localised)


xla.register_partitioner(PARTITIONED, _partition)
