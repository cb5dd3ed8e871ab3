"""``jax.custom_jvp`` and ``jax.custom_vjp`` with rules that run under the settings of the call.

JAX traces such a rule when it differentiates a function, after the contexts in it are left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax

from jax_tilekern.scope import Settings, entered, traced_settings

R = TypeVar("R")


class _CustomRules(Generic[R]):
    """A function with rules, which JAX's function of the same name defines for each settings."""

    _transformation: Callable[..., Any]
    _method: str

    def __init__(self, function: Callable[..., R], **options: Any) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        self._rules: Sequence[Callable[..., Any]] = ()
        self._rule_options: dict[str, Any] = {}
        self._by_settings: dict[Settings, Callable[..., R]] = {}

    def __call__(self, *args: Any) -> R:
        """Call the function."""
        settings = traced_settings()
        if settings not in self._by_settings:
            function = type(self)._transformation(self._function, **self._options)
            rules = (_under(settings, rule) for rule in self._rules)
            getattr(function, self._method)(*rules, **self._rule_options)
            self._by_settings[settings] = function
        return self._by_settings[settings](*args)


class custom_jvp(_CustomRules[R]):
    """As :class:`jax.custom_jvp`."""

    _transformation, _method = jax.custom_jvp, "defjvp"

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the rule, and return it."""
        self._rules = (rule,)
        return rule


class custom_vjp(_CustomRules[R]):
    """As :class:`jax.custom_vjp`; ``nondiff_argnums`` is a keyword."""

    _transformation, _method = jax.custom_vjp, "defvjp"

    def defvjp(
        self, forward: Callable[..., Any], backward: Callable[..., Any], **options: Any
    ) -> None:
        """Set the rules, with the options of JAX's method."""
        self._rules, self._rule_options = (forward, backward), options


def _under(settings: Settings, rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def under(*args: Any) -> Any:
        with entered(settings):
            return rule(*args)

    return under
