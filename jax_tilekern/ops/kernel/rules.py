"""The rules by which a call of lanes is differentiated and divided: each makes jaxprs of one lane.

A call evaluates ``jaxpr`` for every lane. ``operand_axes`` and ``result_axes`` say, for each
dimension of lanes, outermost first, which dimension of an array it is; ``None`` for an operand that
all lanes read. So a tangent, a cotangent or a part of a call is a call of another jaxpr, and only
its axes have to be found. Residuals have the lanes last, so that neighbouring lanes access
neighbouring elements; the kernel of a group of threads has them first in memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad, partial_eval
from jax_tilekern.interop.global_modes import by_types, mode_independent
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.kernel.checkpoints import Checkpoint, divided
from jax_tilekern.ops.kernel.translation.keys import raw_type
from jax_tilekern.scope import under_traced_settings, with_traced_settings

# A residual of up to so many elements is saved for every lane, even where it is the same for all.
_FEW_ELEMENTS = 64

# For each dimension of lanes, outermost first, the dimension of an array that it is.
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class LaneFunction:
    """How a call is named, differentiated and typed."""

    name: str  # of the user's function, or of a function derived from it
    checkpoint: Checkpoint  # the steps of loops that reverse mode saves
    threads: int | None  # that evaluate a lane, if the caller says so
    dtypes: tuple[np.dtype[Any], ...]  # of all values, which decide the modes of rules

    @classmethod
    def of(
        cls, name: str, checkpoint: Checkpoint, threads: int | None, closed: Any
    ) -> LaneFunction:
        """Return that of a jaxpr."""
        return cls(name, checkpoint, threads, tuple(sorted(_dtypes(closed), key=str)))

    def made(self, closed: Any, prefix: str = "") -> LaneFunction:
        """Return that of a jaxpr that is derived from the function's."""
        return LaneFunction.of(f"{prefix}{self.name}", self.checkpoint, self.threads, closed)

    def __str__(self) -> str:
        return self.name


def _dtypes(closed: Any) -> set[np.dtype[Any]]:
    found = {np.dtype(raw_type(x).dtype) for x in (*closed.in_avals, *closed.out_avals)}
    for eqn in closed.jaxpr.eqns:
        found |= {
            np.dtype(x.aval.dtype)
            for x in (*eqn.invars, *eqn.outvars)
            if isinstance(getattr(x.aval, "dtype", None), np.dtype)
        }
        for inner in compat.jaxprs_of(eqn):
            found |= _dtypes(compat.closed_jaxpr(inner))
    return found


def trailing(aval: Any, dims: int) -> Axes:
    """Return the axes of an array of one lane's type that has the lanes last."""
    return tuple(aval.ndim + k for k in range(dims))


def lane_sizes(operands: Sequence[Any], operand_axes: Sequence[Axes]) -> tuple[int, ...]:
    dims = len(operand_axes[0]) if operand_axes else 0
    return tuple(
        next(
            x.shape[axes[k]]
            for x, axes in zip(operands, operand_axes, strict=True)
            if axes[k] is not None
        )
        for k in range(dims)
    )


def type_of_lanes(aval: Any, axes: Axes, sizes: Sequence[int]) -> jax.core.ShapedArray:
    by_axis = {axis: size for axis, size in zip(axes, sizes, strict=True) if axis is not None}
    own = iter(aval.shape)
    shape = [by_axis[d] if d in by_axis else next(own) for d in range(aval.ndim + len(by_axis))]
    return jax.core.ShapedArray(tuple(shape), aval.dtype, weak_type=aval.weak_type)


class Rules:
    """The rules of the primitive that ``bind`` binds."""

    def __init__(self) -> None:
        self.primitive: Any = None

    def bind(
        self,
        *operands: Any,
        jaxpr: Any,
        function: LaneFunction,
        operand_axes: tuple[Axes, ...],
        result_axes: tuple[Axes, ...],
    ) -> list[Any]:
        dims = len(result_axes[0]) if result_axes else 0
        if not jaxpr.out_avals:
            return []
        absent = [k for k in range(dims) if all(axes[k] is None for axes in operand_axes)]
        assert not absent, "a call of lanes has every dimension of lanes in an operand"
        results: list[Any] = self.primitive.bind(
            *compat.unify_varying(*operands),
            jaxpr=jaxpr,
            function=function,
            operand_axes=operand_axes,
            result_axes=result_axes,
        )
        return results

    def register(self, primitive: Any) -> None:
        """Register the rules that an operation does not declare."""
        self.primitive = primitive
        ad.primitive_transposes[primitive] = under_traced_settings(
            mode_independent(self._transpose)
        )
        partial_eval.custom_partial_eval_rules[primitive] = under_traced_settings(
            self._partial_eval
        )
        partial_eval.partial_eval_jaxpr_custom_rules[primitive] = self._partial_eval_of_equation
        compat.register_dead_code(primitive, self._without_unused)

    # -- Derivatives --------------------------------------------------------------------------

    def jvp(
        self,
        primals: Sequence[Any],
        tangents: Sequence[Any],
        *,
        jaxpr: Any,
        function: LaneFunction,
        operand_axes: tuple[Axes, ...],
        result_axes: tuple[Axes, ...],
    ) -> tuple[list[Any], list[Any]]:
        """Call the jaxpr of results and tangents."""
        moving = [type(t) is not ad.Zero for t in tangents]
        both, moved = compat.jvp_jaxpr(jaxpr, moving, instantiate=False)
        kept = [t for t, moves in zip(tangents, moving, strict=True) if moves]
        found = self.bind(
            *primals,
            *kept,
            jaxpr=both,
            function=function.made(both, "jvp_"),
            operand_axes=(*operand_axes, *_where(moving, operand_axes)),
            result_axes=(*result_axes, *_where(moved, result_axes)),
        )
        results, derived = found[: len(moved)], iter(found[len(moved) :])
        return results, [
            next(derived) if moves else compat.zero_tangent(x)
            for x, moves in zip(results, moved, strict=True)
        ]

    def _transpose(
        self,
        cotangents: Sequence[Any],
        *operands: Any,
        jaxpr: Any,
        function: LaneFunction,
        operand_axes: tuple[Axes, ...],
        result_axes: tuple[Axes, ...],
    ) -> list[Any]:
        """Call the transposed jaxpr; cotangents of what all lanes read are added up."""
        linear = [ad.is_undefined_primal(x) for x in operands]
        given = [type(x) is not ad.Zero for x in cotangents]
        zeros: list[Any] = [
            ad.Zero(x.aval.to_ct_aval()) if is_linear else None
            for x, is_linear in zip(operands, linear, strict=True)
        ]
        if not any(given):
            return zeros
        back = _transposed(jaxpr, tuple(linear), tuple(given))
        axes_of_linear = _where(linear, operand_axes)
        to_add, back_axes = [], []
        for axes in axes_of_linear:
            missing = [k for k, axis in enumerate(axes) if axis is None]
            to_add.append(tuple(range(len(missing))))
            back_axes.append(
                tuple(
                    missing.index(k) if axis is None else axis + len(missing)
                    for k, axis in enumerate(axes)
                )
            )
        found = self.bind(
            *_where(_not(linear), operands),
            *_where(given, cotangents),
            jaxpr=back,
            function=function.made(back, "transposed_"),
            operand_axes=(*_where(_not(linear), operand_axes), *_where(given, result_axes)),
            result_axes=tuple(back_axes),
        )
        sums = (jnp.sum(x, axes) if axes else x for x, axes in zip(found, to_add, strict=True))
        return [next(sums) if is_linear else None for is_linear in linear]

    # -- Parts of a call ----------------------------------------------------------------------

    def _partial_eval(
        self,
        trace: Any,
        *tracers: Any,
        jaxpr: Any,
        function: LaneFunction,
        operand_axes: tuple[Axes, ...],
        result_axes: tuple[Axes, ...],
    ) -> list[Any]:
        """Evaluate what depends on known operands alone, and stage the rest."""
        params: dict[str, Any] = {
            "function": function,
            "operand_axes": operand_axes,
            "result_axes": result_axes,
        }
        unknown = [not x.is_known() for x in tracers]
        if not any(unknown):
            known_operands = [x.pval.get_known() for x in tracers]
            return self.bind(*known_operands, jaxpr=jaxpr, **params)
        known_axes = _where(_not(unknown), operand_axes)
        dims = len(result_axes[0])
        if any(all(axes[k] is None for axes in known_axes) for k in range(dims)):
            # There are no lanes to evaluate anything for.
            staged: list[Any] = trace.default_process_primitive(
                self.primitive, tracers, with_traced_settings({"jaxpr": jaxpr, **params})
            )
            return staged
        known = _where(_not(unknown), [x.pval.get_known() for x in tracers])
        lanes = math.prod(lane_sizes(known, known_axes))
        with by_types(function):
            first, second, unknown_results, residuals, checkpoint = divided(
                jaxpr, unknown, function.checkpoint, lanes, _saved_bytes
            )
        second_function = dataclasses.replace(function, checkpoint=checkpoint)
        residual_axes = [trailing(aval, dims) for aval in residuals]
        first_axes = [*_where(_not(unknown_results), result_axes), *residual_axes]
        kept, forwarded = _forwarded(first, len(residuals))
        alike = _alike(first, known_axes, kept, len(residuals))
        own = [keep and not is_alike for keep, is_alike in zip(kept, alike, strict=True)]
        values = iter(
            self.bind(
                *known,
                jaxpr=partial_eval.prune_closed_jaxpr_outputs(first, own),
                function=function.made(first),
                operand_axes=tuple(known_axes),
                result_axes=tuple(_where(own, first_axes)),
            )
        )
        shared = iter(self._lane_invariant(alike, known, first, function) if any(alike) else ())
        evaluated = [
            next(shared) if is_alike else next(values) if is_own else None
            for is_alike, is_own in zip(alike, own, strict=True)
        ]
        outputs = evaluated[: len(evaluated) - len(residuals)]
        residual_axes = [
            (None,) * dims if is_alike else axes
            for axes, is_alike in zip(residual_axes, alike[len(outputs) :], strict=True)
        ]
        saved, saved_axes = [], []
        for value, source, axes in zip(
            evaluated[len(outputs) :], forwarded, residual_axes, strict=True
        ):
            saved.append(value if source is None else known[source])
            saved_axes.append(axes if source is None else known_axes[source])
        staged = (
            trace.default_process_primitive(
                self.primitive,
                [*map(trace.new_instantiated_const, saved), *_where(unknown, tracers)],
                with_traced_settings(
                    {
                        "jaxpr": second,
                        "function": second_function.made(second, "tangent_of_"),
                        "operand_axes": (*saved_axes, *_where(unknown, operand_axes)),
                        "result_axes": tuple(_where(unknown_results, result_axes)),
                    }
                ),
            )
            if any(unknown_results)
            else []
        )
        rest, first_outputs = iter(staged), iter(outputs)
        return [next(rest if is_unknown else first_outputs) for is_unknown in unknown_results]

    def _lane_invariant(
        self, used: Sequence[bool], operands: Sequence[Any], jaxpr: Any, function: LaneFunction
    ) -> list[Any]:
        """Compute results that are the same for all lanes."""
        call = {
            "jaxpr": jaxpr,
            "function": function,
            "operand_axes": ((),) * len(operands),
            "result_axes": ((),) * len(used),
        }
        needed, params = _pruned_call(used, call)
        return self.bind(*_where(needed, operands), **params)

    def _partial_eval_of_equation(
        self, saveable: Any, unknown: list[bool], instantiated: list[bool], eqn: Any
    ) -> Any:
        """Do the same to an equation, for ``jax.checkpoint``."""
        dims = len(eqn.params["result_axes"][0])
        sizes = lane_sizes([x.aval for x in eqn.invars], eqn.params["operand_axes"])

        def axes_of_parts(
            unks_in: Sequence[bool],
            inst_in: Sequence[bool],
            known_results: Any,
            staged_results: Any,
            new_residuals: int,
            residuals: int,
            first: dict[str, Any],
            second: dict[str, Any],
        ) -> tuple[dict[str, Any], dict[str, Any]]:
            operand_axes, result_axes = eqn.params["operand_axes"], eqn.params["result_axes"]
            first_axes = _where(_not(unks_in), operand_axes)
            kept = _where(list(known_results), result_axes)
            avals = first["jaxpr"].out_avals[len(kept) :]
            first = {
                **first,
                "function": eqn.params["function"].made(first["jaxpr"]),
                "operand_axes": tuple(first_axes),
                "result_axes": (*kept, *(trailing(x, dims) for x in avals)),
            }
            # A residual may be an operand or a result of the first part.
            found = [trailing(x, dims) for x in second["jaxpr"].in_avals[:residuals]]
            second = {
                **second,
                "function": eqn.params["function"].made(second["jaxpr"]),
                "operand_axes": (*found, *_where(inst_in, operand_axes)),
                "result_axes": tuple(_where(list(staged_results), result_axes)),
            }
            return first, second

        def residual_type(params: Any, aval: Any) -> Any:
            del params
            return type_of_lanes(aval, trailing(aval, dims), sizes)

        return partial_eval.closed_call_partial_eval_custom_rule(
            "jaxpr", axes_of_parts, saveable, unknown, instantiated, eqn, res_aval=residual_type
        )

    def _without_unused(self, used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
        """Remove results that nothing uses, and operands that no other result needs."""
        if not any(used):
            return [False] * len(eqn.invars), None
        needed, params = _pruned_call(used, eqn.params)
        return needed, eqn.replace(
            invars=_where(needed, eqn.invars), outvars=_where(used, eqn.outvars), params=params
        )

    # -- vmap ---------------------------------------------------------------------------------

    def batch(
        self, axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], **call: Any
    ) -> tuple[list[Any], list[int | None]]:
        """Add a dimension of lanes, for the results that depend on it."""
        del axis_data
        batched = [dim is not None for dim in dims]
        axes_of_others = _where(_not(batched), call["operand_axes"])
        if all(
            any(axes[k] is not None for axes in axes_of_others)
            for k in range(len(call["result_axes"][0]))
        ):
            _, _, depends, _ = partial_eval.partial_eval_jaxpr_nounits(
                call["jaxpr"], batched, instantiate=False
            )
        else:
            # Only operands of the batch have the lanes.
            depends = [True] * len(call["result_axes"])
        parts = []
        for is_batched in (False, True):
            used = [x == is_batched for x in depends]
            if not any(used):
                parts.append(iter(()))
                continue
            needed, params = _pruned_call(used, call, batched, is_batched)
            if is_batched:
                axes = zip(_where(needed, dims), params["operand_axes"], strict=True)
                params["operand_axes"] = tuple(
                    (dim, *(_shifted(axis, dim) for axis in own)) for dim, own in axes
                )
                params["result_axes"] = tuple(
                    (0, *(_shifted(axis, 0) for axis in own)) for own in params["result_axes"]
                )
            parts.append(iter(self.bind(*_where(needed, operands), **params)))
        unbatched, batched_results = parts
        return [next(batched_results if x else unbatched) for x in depends], [
            0 if x else None for x in depends
        ]


# A gradient outside of a jit transposes a call each time. One jaxpr is one program.
@compat.cached(max_size=256)
def _transposed(jaxpr: Any, linear: tuple[bool, ...], given: tuple[bool, ...]) -> Any:
    """Return the jaxpr of the known operands and the given cotangents that transposes another."""
    in_avals, out_avals = jaxpr.in_avals, _where(given, jaxpr.out_avals)
    known_count = linear.count(False)

    def transposed(*values: Any) -> Any:
        known = values[:known_count]

        def linear_part(*unknown: Any) -> list[Any]:
            rest, others = iter(unknown), iter(known)
            merged = [next(rest if is_linear else others) for is_linear in linear]
            return _where(given, compat.jaxpr_as_fun(jaxpr)(*merged))

        types = [jax.core.ShapedArray(x.shape, x.dtype) for x in _where(linear, in_avals)]
        return jax.linear_transpose(linear_part, *types)(list(values[known_count:]))

    with compat.without_mesh():
        return jax.make_jaxpr(transposed)(
            *(_plain(x) for x in _where(_not(linear), in_avals)), *map(_plain, out_avals)
        )


def _pruned_call(
    used: Sequence[bool],
    params: dict[str, Any],
    batched: Sequence[bool] | None = None,
    is_batched: bool = False,
) -> tuple[list[bool], dict[str, Any]]:
    """Return which operands some of the results need, and the parameters of a call of these alone.

    Each dimension of lanes is a dimension of an operand that is kept. If some operands are
    ``batched``, the call has none of them as batches, or it ``is_batched`` and at least one of them
    is.
    """
    jaxpr, operand_axes = params["jaxpr"], params["operand_axes"]
    _, needed = partial_eval.dce_jaxpr(jaxpr.jaxpr, list(used))
    needed = list(needed)
    batched = [False] * len(needed) if batched is None else batched
    have = [
        [
            axes[k] is not None and (is_batched or not b)
            for axes, b in zip(operand_axes, batched, strict=True)
        ]
        for k in range(len(params["result_axes"][0]))
    ]
    for candidates in [*have, *([batched] if is_batched else [])]:
        found = [i for i, has in enumerate(candidates) if has]
        if found and not any(needed[i] for i in found):
            needed[found[0]] = True
    pruned, needed = partial_eval.dce_jaxpr(jaxpr.jaxpr, list(used), instantiate=needed)
    closed = compat.closed_with(pruned, jaxpr.consts)
    return list(needed), {
        **params,
        "jaxpr": closed,
        "function": params["function"].made(closed),
        "operand_axes": tuple(_where(needed, operand_axes)),
        "result_axes": tuple(_where(used, params["result_axes"])),
    }


def _shifted(axis: int | None, inserted: int | None) -> int | None:
    return axis if axis is None or inserted is None else axis + (axis >= inserted)


def _alike(
    first: Any, operand_axes: Sequence[Axes], kept: Sequence[bool], residuals: int
) -> list[bool]:
    """Return which results are residuals of some size that are the same for all lanes."""
    mapped = [any(axis is not None for axis in axes) for axes in operand_axes]
    _, _, depends, _ = partial_eval.partial_eval_jaxpr_nounits(first, mapped, instantiate=False)
    outputs = len(kept) - residuals
    return [
        i >= outputs and keep and not differs and aval.size > _FEW_ELEMENTS
        for i, (keep, differs, aval) in enumerate(zip(kept, depends, first.out_avals, strict=True))
    ]


def _saved_bytes(first: Any, residuals: int) -> int:
    """Count the bytes of a lane's residuals that are no operands."""
    _, sources = _forwarded(first, residuals)
    avals = first.out_avals[len(first.out_avals) - residuals :]
    return sum(
        aval.size * aval.dtype.itemsize
        for aval, source in zip(avals, sources, strict=True)
        if source is None
    )


def _forwarded(first: Any, residuals: int) -> tuple[list[bool], list[int | None]]:
    """Return which results a part computes, and for each residual which operand it is."""
    jaxpr = first.jaxpr
    numbers = {x: i for i, x in enumerate(jaxpr.invars)}
    outputs = len(jaxpr.outvars) - residuals
    sources = [None if compat.is_literal(x) else numbers.get(x) for x in jaxpr.outvars[outputs:]]
    return [*([True] * outputs), *(source is None for source in sources)], sources


def _where(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for value, keep in zip(values, mask, strict=True) if keep]


def _not(mask: Sequence[bool]) -> list[bool]:
    return [not x for x in mask]


def _plain(aval: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(aval.shape, aval.dtype)
