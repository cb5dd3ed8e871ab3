"""Everything that differs between JAX versions, or that JAX does not export.

Each entry names the change it hides. Supported: jax 0.10.2 and later.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import mesh as _mesh
from jax._src import named_sharding as _named_sharding
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src import tree_util as _tree_util
from jax._src import util as _util
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.lax import special as _special
from jax._src.lib import mlir as _mlir_lib
from jax._src.lib.mlir.dialects import func as _func
from jax._src.lib.mlir.dialects import hlo as _hlo  # type: ignore[attr-defined]
from jax._src.nn import functions as _nn_functions
from jax._src.numpy import hijax as _hijax
from jax._src.numpy import reductions as _reductions
from jax._src.numpy import util as _numpy_util
from jax.interpreters import ad, batching, mlir

__all__ = [
    "ATTENTION",
    "QUANTILE",
    "SEARCHSORTED",
    "ClosedJaxpr",
    "Jaxpr",
    "Primitive",
    "ShardingTypeError",
    "Var",
    "abstract_results",
    "ad",
    "apply_primitive",
    "as_type",
    "batching_rule",
    "bind_equation",
    "broadcast_prefix",
    "cached",
    "canonicalize_dtype",
    "canonicalize_precision",
    "check_arraylike",
    "closed_jaxpr",
    "closed_with",
    "cotangent_sharding",
    "counted_dimension",
    "custom_jvp_rule",
    "dot_general_p",
    "equation_context",
    "eval_jaxpr",
    "eval_jaxpr_by",
    "explicit_sharding",
    "func",
    "hide_frames",
    "in_low_primitives",
    "in_pallas_kernel",
    "in_traced_program",
    "inlined_when_traced",
    "ir",
    "is_literal",
    "is_plain_jit",
    "is_split",
    "is_split_explicitly",
    "jaxpr_as_fun",
    "jaxpr_like",
    "jaxprs_of",
    "jvp_jaxpr",
    "key_functions",
    "leaf_equations",
    "lower_per_platform",
    "lowered_functions",
    "mlir",
    "name_p",
    "on_lowering",
    "one_element_axis",
    "partial_eval",
    "partition_id",
    "ragged_dot_general_p",
    "register_batching",
    "register_cache",
    "register_dead_code",
    "register_nan_check",
    "remat_case",
    "repeated",
    "result_type",
    "scan_parts",
    "sharding_under_vmap",
    "source_line",
    "splat_of",
    "staged",
    "traced_from",
    "transposed_from",
    "type_of_whole",
    "unify_varying",
    "varying_axes",
    "varying_axes_of_type",
    "with_automatic_axes",
    "with_leading_dims",
    "with_type",
    "without_casts_to_varying",
    "without_mesh",
    "without_varying_axes",
    "zero_tangent",
]

# jax.extend.core exports them, and imports all of Pallas on the way (60 ms).
Primitive = _core.Primitive
Var = _core.Var
Jaxpr = _core.Jaxpr
# Jaxprs hold their constants themselves from jax 0.11 on.
ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", _core.Jaxpr)
jaxpr_as_fun: Callable[..., Callable[..., list[Any]]] = _core.jaxpr_as_fun
eval_jaxpr: Callable[..., list[Any]] = _core.eval_jaxpr

# jax.extend.mlir exports them, and imports all of Pallas on the way (45 ms).
ir: Any = _mlir_lib.ir  # type: ignore[attr-defined]
func: Any = _func

# The value of jax.jit's ``inline`` that inlines a call when it is traced (True until 0.10).
inlined_when_traced: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True

# Not exported by jax.lax; gives the hashable form that lax.dot_general itself binds, with
# jax_default_matmul_precision applied.
canonicalize_precision: Callable[[Any], Any] = _lax.canonicalize_precision

# Warns of a truncated type, unlike jax.dtypes.canonicalize_dtype.
canonicalize_dtype: Callable[[Any, str], Any] = _dtypes.check_and_canonicalize_user_dtype

# Exported as jax.sharding.ShardingTypeError by some versions only.
ShardingTypeError: type[Exception] = _core.ShardingTypeError

# A functools.lru_cache that jax.clear_caches empties. Its key has JAX's settings and the contexts
# of the trace, unless trace_context_in_key is false. From 0.11 on it keeps 64 entries at least.
cached: Callable[..., Callable[[Any], Any]] = _util.cache

# Makes jax.clear_caches empty a functools.lru_cache.
register_cache: Callable[[Any, str], None] = _util.register_cache

# jax.interpreters.xla.apply_primitive is deprecated, and forwards to this.
apply_primitive: Callable[..., Any] = _dispatch.apply_primitive

# Not exported by jax.interpreters.ad.
jvp_jaxpr: Callable[..., tuple[Any, list[bool]]] = _ad.jvp_jaxpr

# jax.interpreters.partial_eval exports less of it in each version.
partial_eval: Any = _partial_eval

# Private functions that compute what has no primitive: jax.nn.dot_product_attention for all calls
# that do not ask for cuDNN, the quantiles and the binary searches of jax.numpy. The last one is
# another function from jax 0.12 on.
ATTENTION: tuple[Any, str] = _nn_functions, "_dot_product_attention_xla"
QUANTILE: tuple[Any, str] = _reductions, "_quantile"
SEARCHSORTED: tuple[Any, str] = (
    _hijax,
    "searchsorted_via_expand" if hasattr(_hijax, "searchsorted_via_expand") else "searchsorted",
)

# jax.lax exports only the other one.
dot_general_p = _lax.dot_general_p
name_p = _ad_checkpoint.name_p
ragged_dot_general_p = _lax.ragged_dot_general_p

# This makes profiles and HLO name the user's source lines, as for JAX's own functions.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_source_info_util.register_exclusion(_PACKAGE + os.sep)


def hide_frames(file: str) -> None:
    """Leave the frames of a file out of the tracebacks that JAX shows."""
    _traceback_util.register_exclusion(file)


def with_type(x: jax.Array, dtype: Any, weak_type: bool) -> jax.Array:
    """Cast, to a weak type if asked: ``lax.convert_element_type`` only makes strong ones."""
    result: jax.Array = _lax._convert_element_type(x, dtype, weak_type)
    return result


def as_type(x: Any, dtype: Any) -> jax.Array:
    """Return an array of a type, which may have 64 bits although x64 is off."""
    return with_type(jax.numpy.asarray(x), dtype, weak_type=False)


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which ``x`` varies inside ``shard_map``."""
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(aval: Any) -> frozenset[str]:
    """Mesh axes over which arrays of a type vary."""
    return frozenset(aval.manual_axis_type.varying)


def without_varying_axes(aval: Any) -> Any:
    """Return a type that varies over no manual axis."""
    if not varying_axes_of_type(aval):
        return aval
    return aval.update(manual_axis_type=type(aval.manual_axis_type)())


def unify_varying(*operands: Any, over: Sequence[str] = ()) -> tuple[Any, ...]:
    """Cast every operand to vary over the union of the operands' manual axes, and those given.

    Without this a primitive that mixes them has silently wrong gradients under ``shard_map``:
    the transpose of the cast is the sum over the axes that an operand did not vary over. Inside
    :func:`without_mesh` there is nothing to vary over.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return operands
    axes = [varying_axes(x) for x in operands]
    union = frozenset(over).union(*axes)
    return tuple(
        lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    )


def abstract_results(function: Callable[..., Any], *avals: _core.AbstractValue) -> list[Any]:
    """Abstract values of ``function`` at ``avals``: shape, dtype, weak type, sharding and all."""
    with _without_spmd_axes():
        return list(jax.make_jaxpr(function)(*avals).out_avals)


def staged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, traced by itself where a ``vmap`` around it has an ``spmd_axis_name``.

    A ``vmap`` inside the function would otherwise cast operands to vary over that axis, as the one
    around it does. JAX refuses to cast twice.
    """

    def call(*operands: Any) -> Any:
        if not _core.get_axis_env().spmd_axis_names:
            return function(*operands)
        with _without_spmd_axes():
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*map(jax.typeof, operands))
        results = jaxpr_as_fun(closed)(*operands)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


@contextlib.contextmanager
def _without_spmd_axes() -> Iterator[None]:
    context, environment = _core.trace_ctx, _core.get_axis_env()
    context.set_axis_env(
        _core.AxisEnv(
            environment.axis_sizes,
            explicit_mesh_axis_names=environment.explicit_mesh_axis_names,
        )
    )
    try:
        yield
    finally:
        context.set_axis_env(environment)


def result_type(function: Callable[..., Any], *args: Any) -> Any:
    """Abstract value of one of JAX's functions at the user's own arguments, or its exception.

    ``jax.eval_shape`` loses the sharding of a result on a mesh with explicit and other axes.
    """
    (result,) = jax.make_jaxpr(function)(*args).out_avals
    return result


def type_of_whole(function: Callable[..., Any], *args: Any) -> Any:
    """Return types of one of JAX's functions at the user's own arguments, as if they were whole.

    Its exceptions are JAX's, but for those about shardings.
    """

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        # jax.ShapeDtypeStruct has no 64-bit types where x64 is off, but arrays do.
        return _core.ShapedArray(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type)

    with without_mesh():
        return jax.eval_shape(function, *map(whole, args))


def transposed_from(value: Any) -> tuple[Any, Sequence[int]] | None:
    """Operand and permutation of the ``stablehlo.transpose`` that makes ``value``, if one does."""
    operation = _operation_of(value)
    # On an explicit mesh this operation sets the type of a transposed array.
    while getattr(operation, "name", None) == "sdy.sharding_constraint":
        operation = _operation_of(operation.operands[0])
    if getattr(operation, "name", None) != "stablehlo.transpose":
        return None
    return operation.operands[0], list(operation.attributes["permutation"])


def partition_id() -> Any:
    """Return the MLIR value of the device's number in the program."""
    return _hlo.PartitionIdOp().result


def splat_of(value: Any) -> int | float | None:
    """Return the number that all elements of ``value`` are, if it is made of a constant."""
    operation = _operation_of(value)
    while getattr(operation, "name", None) in (
        "stablehlo.broadcast_in_dim",
        "sdy.sharding_constraint",
    ):
        operation = _operation_of(operation.operands[0])
    if getattr(operation, "name", None) != "stablehlo.constant":
        return None
    elements = ir.DenseElementsAttr(operation.attributes["value"])
    if not elements.is_splat:
        return None
    number: int | float = elements.get_splat_value().value
    return number


def counted_dimension(value: Any) -> int | None:
    """Return the dimension along which the elements of ``value`` are 0, 1, ..., if they are."""
    operation = _operation_of(value)
    name = getattr(operation, "name", None)
    if name == "stablehlo.iota":
        dimension: int = ir.IntegerAttr(operation.attributes["iota_dimension"]).value
        return dimension
    if name == "sdy.sharding_constraint":
        return counted_dimension(operation.operands[0])
    if name != "stablehlo.broadcast_in_dim":
        return None
    inner = counted_dimension(operation.operands[0])
    if inner is None:
        return None
    outer: int = operation.attributes["broadcast_dimensions"][inner]
    sizes = (ir.RankedTensorType(x.type).shape for x in (operation.operands[0], value))
    before, after = sizes
    return outer if before[inner] == after[outer] else None


def jaxprs_of(eqn: Any) -> list[Any]:
    """Return the jaxprs in an equation's parameters."""
    return list(_core.jaxprs_in_params(eqn.params))


def closed_jaxpr(jaxpr: Any) -> Any:
    """Return a jaxpr with constants; those of one that is apart from them become operands."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr
    return ClosedJaxpr(_partial_eval.convert_constvars_jaxpr(jaxpr), ())


def closed_with(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Return a jaxpr with constants."""
    return ClosedJaxpr(jaxpr, consts) if ClosedJaxpr is not Jaxpr else jaxpr


def in_low_primitives(jaxpr: Any) -> Any:
    """Return a jaxpr without the primitives that jax 0.12 makes of others, such as searchsorted."""
    return _partial_eval.lower_jaxpr2(jaxpr) if getattr(jaxpr, "is_high", False) else jaxpr


def jaxpr_like(closed: Any, other: Any) -> Any:
    """Return a jaxpr in the form that another has, ``other`` itself if constants forbid it."""
    if isinstance(other, ClosedJaxpr):
        return closed
    return other if closed.consts else closed.jaxpr


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number, and no variable."""
    return isinstance(atom, _core.Literal)


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Return those that are no literals."""
    return [x for x in atoms if not is_literal(x)]


def source_line(eqn: Any) -> str:
    """Return the file, line and function of the user's that an equation was traced from."""
    return _source_info_util.summarize(eqn.source_info)


def broadcast_prefix(prefix: Any, tree: Any) -> list[Any]:
    """Return what a prefix of a tree, whose leaves may be ``None``, has for each leaf of it."""
    leaves: list[Any] = _tree_util.broadcast_prefix(prefix, tree, is_leaf=lambda x: x is None)
    return leaves


def scan_parts(eqn: Any) -> tuple[int, int]:
    """Return how many constants and carried values a ``scan`` has (trees from jax 0.11 on)."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carries, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carries)


def key_functions(dtype: Any) -> Any:
    """Return the functions of raw keys (``split``, ``random_bits``, ...) of a type of keys."""
    return dtype._impl


def lowered_functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of arrays that JAX lowers primitives to."""

    def with_operand_type(function: Callable[..., Any], *operands: Any) -> Any:
        return function(*operands, dtype=operands[0].dtype)

    functions = ("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta")
    ciphers = ("philox2x32", "philox4x32", "threefry4x32")
    return {
        "bessel_i0e": _special.bessel_i0e_impl,
        **{
            x: functools.partial(with_operand_type, getattr(_special, f"{x}_impl"))
            for x in functions
        },
        **{x: getattr(sys.modules[f"jax._src.random.{x}"], f"_{x}_lowering") for x in ciphers},
    }


def traced_from(eqn: Any) -> AbstractContextManager[None]:
    """Return a context in which what is traced has the source of an equation.

    Equations inside JAX's own jitted functions have no line of the user's: they keep the source of
    the call around them.
    """
    names = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    own = eqn.source_info.traceback
    context: AbstractContextManager[None] = _source_info_util.user_context(
        own if source_line(eqn) else _source_info_util.current().traceback, name_stack=names
    )
    return context


def bind_equation(eqn: Any, operands: Sequence[Any], mesh: Any = None) -> list[Any]:
    """Evaluate an equation as :func:`eval_jaxpr` does, on its own mesh or on ``mesh``."""
    in_mesh = contextlib.nullcontext() if mesh is None else _mesh.use_abstract_mesh(mesh)
    with traced_from(eqn), eqn.ctx.manager, in_mesh:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def eval_jaxpr_by(
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    jaxpr: Any,
    consts: Sequence[Any],
    operands: Sequence[Any],
) -> list[Any]:
    """Evaluate a jaxpr, whose equations ``equation(eqn, operands)`` evaluates."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def value(atom: Any) -> Any:
        if not is_literal(atom):
            return values[atom]
        # The type of an array keeps the mesh where it was asked for; a view has none yet.
        return atom.val.view() if isinstance(atom.val, np.ndarray) else atom.val

    for eqn in jaxpr.eqns:
        results = equation(eqn, [value(x) for x in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [value(x) for x in jaxpr.outvars]


def leaf_equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of those inside it that have none inside themselves."""
    for eqn in jaxpr.eqns:
        inner = jaxprs_of(eqn)
        for each in inner:
            yield from leaf_equations(each)
        if not inner:
            yield eqn


_JIT_PARAMETERS = frozenset(
    {
        "jaxpr", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars",
        "ctx_mesh", "name", "keep_unused", "inline", "compiler_options_kvs",
    }
)  # fmt: skip


def is_plain_jit(eqn: Any) -> bool:
    """Whether an equation is a call of a jitted function that may as well be inlined."""
    params = eqn.params
    return (
        eqn.primitive.name == "jit"
        and params.keys() <= _JIT_PARAMETERS
        and all(
            isinstance(x, _named_sharding.UnspecifiedValue)
            for x in (*params["in_shardings"], *params["out_shardings"])
        )
        and not any(x is not None for x in (*params["in_layouts"], *params["out_layouts"]))
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
    )


def custom_jvp_rule(eqn: Any) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the derivative rule of a ``custom_jvp_call`` as a jaxpr and its constants.

    It takes primals and tangents, and returns results and their tangents. ``None`` if a tangent may
    be symbolically zero, which has no such form.
    """
    params = eqn.params
    if params["symbolic_zeros"] or params["num_consts"]:
        return None
    jaxpr, consts, zeros = params["jvp_jaxpr_fun"].call_wrapped(*(False for _ in eqn.invars))
    return None if any(zeros) else (jaxpr, consts)


def zero_tangent(primal: Any) -> Any:
    """Symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _operation_of(value: Any) -> Any:
    owner = value.owner
    return getattr(owner, "operation", owner)


def is_zeros(value: Any) -> bool:
    """Whether an MLIR value is known to be an array of zeros."""
    operation = _operation_of(value)
    if getattr(operation, "name", "") == "stablehlo.broadcast_in_dim":
        operation = _operation_of(operation.operands[0])
    if getattr(operation, "name", "") != "stablehlo.constant":
        return False
    return not np.asarray(operation.attributes["value"]).any()


def cudnn_attention(
    operands: Sequence[Any], *, scale: float, is_causal: bool, window: int, has_bias: bool,
    of_bias: bool = False,
) -> Sequence[Any]:  # fmt: skip
    """Return cuDNN's attention and the log of its sums of exponentials, or its gradients.

    ``operands`` are those of JAX's primitive, 10 or 13 for gradients, of which the fourth is the
    bias. ``window`` is the number of keys that a query sees, itself and those before it, or 0 for
    all. With ``of_bias`` the gradients end with that of the bias.
    """
    is_forward = len(operands) == 10
    function = (
        _cudnn._dot_product_attention_fwd_impl
        if is_forward
        else _cudnn._dot_product_attention_bwd_impl
    )
    masks = _cudnn.MaskType
    options = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (has_bias, of_bias),
        "mask_type": masks.CAUSAL if is_causal else masks.NO_MASK,
        "layout": _cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        "is_training": True,
        # From jax 0.12 on.
        "score_mod": None,
        "score_mod_args": (),
    }
    known = inspect.signature(function).parameters
    results: Sequence[Any] = function(
        *operands, **{name: x for name, x in options.items() if name in known}
    )
    return results


def passes_numbers(ctx: Any) -> bool:
    """Return whether functions of a module pass symbolic sizes, or the number of the platform."""
    state = ctx.module_context.shape_poly_state
    return bool(state.dim_vars) or bool(state.has_platform_index_argument)


def lower_per_platform(
    name: str,
    rules: Mapping[str, Callable[..., Any]],
    default: Callable[..., Any],
    ctx: Any,
    *values: Any,
    **params: Any,
) -> Sequence[Any]:
    """Lower by the rule of each platform that a program is lowered for.

    ``mlir.register_lowering(..., platform=..., cacheable=False)`` fails where a program is lowered
    for several platforms, since JAX adds a list to the tuple of the result types there.
    """
    ctx = ctx.replace(avals_out=list(ctx.avals_out))
    lowered: Sequence[Any] = _mlir.lower_per_platform(
        ctx, name, dict(rules), default, _core.no_effects, *values, **params
    )
    return lowered


def on_lowering(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Have ``begin()`` called before a thread lowers a module for a jit, and ``end()`` after it."""
    event = _dispatch.JAXPR_TO_MLIR_MODULE_EVENT

    def listener(function: Callable[[], None]) -> Callable[..., None]:
        return lambda name, *_, **__: function() if name == event else None

    jax.monitoring.register_scalar_listener(listener(begin))
    jax.monitoring.register_event_duration_secs_listener(listener(end))


@contextlib.contextmanager
def equation_context(ctx: Any) -> Iterator[None]:
    """Return the context in which JAX lowers the equation that a rule's context is of."""
    with _source_info_util.user_context(ctx.traceback), ctx.jaxpr_eqn_ctx.manager:
        yield


# Sharding in types.


def explicit_sharding(aval: Any) -> Any:
    """Return the sharding that a type has on a mesh with explicit axes, ``None`` on others."""
    sharding = aval.sharding
    return sharding if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types else None


def cotangent_sharding(like: Any) -> Any:
    """Return the sharding of an operand's cotangent, ``None`` on meshes without explicit axes.

    It is the operand's own. An operand whose type has no mesh has a whole cotangent on the mesh of
    the context, as in ``lax.dot_general``.
    """
    if not like.sharding.mesh.empty:
        return explicit_sharding(like)
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * like.ndim))


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Enter a context in which types have no shardings, in jitted functions neither.

    An operation may read a value of the program, which varies over axes of a ``shard_map``.
    """
    with (
        without_casts_to_varying(),
        _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh),
        _sharding_impls._internal_use_concrete_mesh(_mesh.empty_concrete_mesh),
    ):
        yield


def without_casts_to_varying() -> AbstractContextManager[None]:
    """Return a context in which operations of values that vary differently cast none of them."""
    context: AbstractContextManager[None] = _config._check_vma(False)
    return context


def with_automatic_axes(function: Callable[..., Any], out_sharding: Any) -> Callable[..., Any]:
    """Return a function that is traced without shardings in types, except its result's."""
    if out_sharding is None:
        return function
    mesh = jax.tree.leaves(out_sharding)[0].mesh
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    # Manual axes of a shard_map stay manual.
    explicit = tuple(name for name, kind in axes if kind == jax.sharding.AxisType.Explicit)
    wrapped: Callable[..., Any] = jax.sharding.auto_axes(
        function, axes=explicit, out_sharding=out_sharding
    )
    return wrapped


def with_leading_dims(sharding: Any, count: int) -> Any:
    """Return the sharding of an array with leading dimensions that are not split."""
    if sharding is None:
        return None
    partitions = (None,) * count + tuple(sharding.spec.partitions)
    return sharding.update(spec=sharding.spec.update(partitions=partitions))


def register_dead_code(primitive: Any, rule: Callable[..., Any]) -> None:
    """Register ``rule(used_results, eqn)``, which returns the used operands and an equation.

    Jax 0.12 also says which operands are live.
    """
    _partial_eval.dce_rules[primitive] = lambda used, *others: rule(used, others[-1])


def register_nan_check(primitive: Any) -> None:
    """Make ``checkify.float_checks`` check a primitive's results for NaNs."""
    _checkify.error_checks[primitive] = functools.partial(_checkify.nan_error_check, primitive)


def batching_rule(primitive: Any) -> Callable[..., tuple[Any, Any]]:
    """Return ``rule(axis_data, operands, dims, **params)`` of a primitive of JAX."""
    rule: Callable[..., tuple[Any, Any]] = batching.fancy_primitive_batchers[primitive]
    return rule


def register_batching(primitive: Any, rule: Callable[..., Any]) -> None:
    """Register ``rule(axis_data, operands, dims, **params)``."""
    batching.fancy_primitive_batchers[primitive] = rule


def sharding_under_vmap(axis_data: Any, sharding: Any, dim: int) -> Any:
    """Return the sharding of a result that has the mapped axis at ``dim`` as well."""
    return None if sharding is None else _batching.get_sharding_for_vmap(axis_data, sharding, dim)


def repeated(axis_data: Any, x: Any, dim: int) -> Any:
    """Return an array that every element of a mapped axis has, with the axis at ``dim``."""
    return _batching.broadcast(x, axis_data.size, dim, axis_data.explicit_mesh_axis)


def one_element_axis(axis_data: Any) -> Any:
    """Return the data of an axis of one element, which devices do not share."""
    return _batching.AxisData(axis_data.name, 1, None, None)


def is_split_explicitly(axis_data: Any) -> bool:
    """Return whether explicit axes of a mesh split the axis that ``vmap`` maps."""
    return axis_data.explicit_mesh_axis is not None


def is_split(axis_data: Any) -> bool:
    """Return whether the axis that ``vmap`` maps is known to be split over devices."""
    return is_split_explicitly(axis_data) or axis_data.spmd_name is not None


# Tracing and checkpoint policies.


def in_pallas_kernel() -> bool:
    """Return whether a Pallas kernel is traced; its lowering supports only JAX's primitives."""
    # Code that traces a Pallas kernel has imported this module.
    pallas = sys.modules.get("jax._src.pallas.core")
    if pallas is None:
        return False
    try:
        return pallas.axis_frame() is not None
    except AssertionError:  # Outside of a kernel, unless Python runs with -O.
        return False


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not ``None``."""
    return {name: x for name, x in arguments.items() if x is not None}


def check_arraylike(function: str, *operands: Any, **named: Any) -> None:
    """Raise the exception of jax.numpy for operands such as lists, which jit takes as trees.

    The message has the position or the name of the operand.
    """
    places = [*(f"at position {i}" for i in range(len(operands))), *(f"as {n}" for n in named)]
    for place, x in zip(places, (*operands, *named.values()), strict=True):
        is_array = not isinstance(x, str)  # JAX takes it for a scalar.
        try:
            _numpy_util.check_arraylike(function, x)
        except TypeError:
            is_array = False
        if not is_array:
            raise TypeError(
                f"{function} requires ndarray or scalar arguments, got {type(x)} {place}."
            )


def in_traced_program() -> bool:
    """Return whether a program is traced, in which values of Python are constants."""
    trace: Any = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _partial_eval.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def remat_case(verdict: Any) -> Literal["save", "recompute"] | tuple[Any, Any]:
    """Read what a checkpoint policy returned: a tuple has the memories to fetch from and to."""
    case = _partial_eval.ensure_enum(verdict)
    if isinstance(case, _partial_eval.Offloadable):
        return _core.mem_kind_to_space(case.src), _core.mem_kind_to_space(case.dst)
    return "save" if isinstance(case, _partial_eval.SaveableType) else "recompute"
