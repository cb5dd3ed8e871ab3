"""Calls whose kernels are being compiled: they are lowered when the rest of their program is.

JAX lowers one call of a program after the other, and NVRTC takes up to two seconds for a kernel. A
call whose plan needs a kernel that no cache has is *deferred*: a thread makes the plan, and a
custom call without meaning stands for it in the module. When JAX has lowered the module, the rule
of each deferred call is asked again, in the order of the program, and what it emits takes the place
of the custom call. The module is the same as if nothing had been compiled.

JAX announces the beginning and the end of lowering to listeners (:mod:`jax.monitoring`). Where it
does not, as where a part of a program is lowered for XLA's partitioner, no call is deferred.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from jax_tilekern.compilation.compiler import NotCompiled, without_compiling
from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import func, ir, mlir
from jax_tilekern.interop.outcomes import is_recorded
from jax_tilekern.plans.launch import LaunchPlan
from jax_tilekern.scope import Settings, current_settings, entered

_NAME = "jax_tilekern_deferred"
_CUSTOM_CALL = "stablehlo.custom_call"
_CAST = "builtin.unrealized_conversion_cast"
# A rule of lowering: ``rule(ctx, *values)`` emits a call and returns its results.
Rule = Callable[..., Sequence[Any]]


class _Deferred(Exception):
    """The call that is lowered is deferred."""


def lower_or_defer(rule: Rule, ctx: Any, *values: Any) -> Sequence[Any]:
    """Lower a call by its rule, or defer it where a plan needs kernels that no cache has.

    A rule emits nothing before it plans. ``explain`` lists calls as they are lowered, so they are
    not deferred there.
    """
    module = _lowering.module
    if module is None or is_recorded():
        return rule(ctx, *values)
    outer, module.may_defer = module.may_defer, True
    try:
        return rule(ctx, *values)
    except _Deferred:
        pass
    finally:
        module.may_defer = outer
    return module.defer(rule, ctx, values)


def plan(planner: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``planner(*arguments)``, or leave the rule of a call that is deferred.

    The planner may run twice, the first time in another thread, under the settings of this one.
    """
    module = _lowering.module
    if module is None or not module.may_defer:
        return planner(*arguments)
    return module.plan(planner, *arguments)


@dataclass(frozen=True)
class _Call:
    """A deferred call: what lowers it, and what its rule needs."""

    rule: Rule
    ctx: Any
    settings: Settings
    # Which operands are arguments of the function that the call is in.
    are_arguments: Sequence[bool]
    # An empty function, before which belong those that the rule adds to the module.
    functions: Any

    def lower(self, stand_in: Any) -> None:
        module = self.ctx.module_context
        end, module.ip = module.ip, ir.InsertionPoint(self.functions)
        try:
            with (
                entered(self.settings),
                compat.equation_context(self.ctx),
                stand_in.location,
                ir.InsertionPoint(stand_in),
            ):
                casts = list(self._arguments_hidden(stand_in))
                # A rule may set the tokens of a context once.
                results = self.rule(self.ctx.replace(tokens_out=None), *stand_in.operands)
        finally:
            module.ip = end
        for old, new in zip(stand_in.results, results, strict=True):
            old.replace_all_uses_with(new)
        stand_in.erase()
        for cast in casts:
            cast.result.replace_all_uses_with(cast.operands[0])
            cast.erase()

    def _arguments_hidden(self, stand_in: Any) -> Iterator[Any]:
        """Replace arguments of a function that JAX has inlined by casts of what they are now.

        The rule must not see more of the program than it saw in the function.
        """
        for i, was_argument in enumerate(self.are_arguments):
            operand = stand_in.operands[i]
            is_argument = isinstance(operand.owner, ir.Block)
            if was_argument and not is_argument and operand.owner.name != _CAST:
                cast = ir.Operation.create(_CAST, [operand.type], [operand])
                operand.replace_all_uses_except(cast.result, cast)
                yield cast


class _Module:
    """A module that a thread lowers."""

    def __init__(self) -> None:
        self.may_defer = False  # the call that is lowered
        # What is handled, if anything, when lowering begins.
        self._exception = sys.exc_info()[1]
        self._calls: list[_Call] = []
        # Plans that threads make, by their arguments.
        self._plans: dict[Hashable, Future[Any]] = {}

    def plan(self, planner: Callable[..., Any], *arguments: Any) -> Any:
        settings = current_settings()
        key = planner, arguments, settings
        try:
            hash(key)
        except TypeError:  # It has a structure of numbers, which is in no set of calls.
            return planner(*arguments)
        if key not in self._plans:
            try:
                with without_compiling():
                    found = planner(*arguments)
            except NotCompiled:
                try:
                    self._plans[key] = self._threads.submit(_under, settings, planner, *arguments)
                except RuntimeError:
                    # While the interpreter exits, no thread can be started.
                    return planner(*arguments)
            else:
                # The order of functions in the module must not depend on when kernels are compiled.
                if not self._calls or not isinstance(found, LaunchPlan):
                    return found
        raise _Deferred

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor()

    def defer(self, rule: Rule, ctx: Any, values: Sequence[Any]) -> Sequence[Any]:
        module = ctx.module_context
        types = [mlir.aval_to_ir_type(module, aval) for aval in ctx.avals_out]
        number = str(len(self._calls))
        attributes = {"call_target_name": _NAME, "backend_config": number}
        stand_in = ir.Operation.create(
            _CUSTOM_CALL, types, values, {k: ir.StringAttr.get(x) for k, x in attributes.items()}
        )
        # MLIR would number the names of all functions that follow one whose name is taken.
        functions = func.FuncOp(f"{_NAME}_{number}", ir.FunctionType.get([], []), ip=module.ip)
        with ir.InsertionPoint(functions.add_entry_block()):
            func.ReturnOp([])
        module.symbol_table.insert(functions)
        are_arguments = [isinstance(value.owner, ir.Block) for value in values]
        self._calls.append(_Call(rule, ctx, current_settings(), are_arguments, functions))
        results: Sequence[Any] = stand_in.results
        return results

    def end(self) -> None:
        """Lower the deferred calls, unless lowering the others has raised an exception."""
        try:
            if self._calls and sys.exc_info()[1] is self._exception:
                # The rules raise the exceptions of the plans.
                wait(self._plans.values())
                module = self._calls[0].ctx.module_context
                with module.context:
                    for number, stand_in in _stand_ins(module.module):
                        self._calls[number].lower(stand_in)
                    for call in self._calls:
                        module.symbol_table.erase(call.functions)
        finally:
            if self._plans:
                self._threads.shutdown(wait=False, cancel_futures=True)


def _under(settings: Settings, planner: Callable[..., Any], *arguments: Any) -> Any:
    with entered(settings):
        return planner(*arguments)


def _stand_ins(module: Any) -> list[tuple[int, Any]]:
    """Return the number of a deferred call, and what stands for it, for each place of one.

    JAX copies or drops what it has lowered where it inlines functions.
    """
    found: list[tuple[int, Any]] = []

    def visit(operation: Any) -> Any:
        if operation.name == _CUSTOM_CALL:
            attributes = operation.attributes
            if attributes["call_target_name"].value == _NAME:
                found.append((int(attributes["backend_config"].value), operation))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return sorted(found, key=itemgetter(0))


class _Lowering(threading.local):
    """What a thread lowers."""

    def __init__(self) -> None:
        # The last one is lowered while those before it are. ``None`` is one whose deferred calls
        # are lowered, while which nothing is deferred.
        self.modules: list[_Module | None] = []

    @property
    def module(self) -> _Module | None:
        """The module that is lowered now, if its calls may be deferred."""
        return self.modules[-1] if self.modules else None


_lowering = _Lowering()


def _begin() -> None:
    _lowering.modules.append(_Module())


def _end() -> None:
    module, modules = _lowering.module, _lowering.modules
    if module is None:
        return
    modules[-1] = None
    try:
        module.end()
    finally:
        modules.pop()


compat.on_lowering(_begin, _end)
