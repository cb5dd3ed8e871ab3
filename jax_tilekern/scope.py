"""The library's contexts: settings, and the public context managers that enter them.

A :class:`Setting` is the library's only state that belongs to a context. A :class:`Scope` is a
context manager of the public interface, which decorates functions too.

A program is lowered after the contexts in its functions are left. So the equations of this library
have the settings that hold where they are traced as a parameter, and their rules run under these.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import jax

T = TypeVar("T")
P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])

# Settings by name, in the order of names.
Settings = tuple[tuple[str, Hashable], ...]

# The settings of this thread that contexts have changed. It is JAX's own kind of context: its value
# is part of the keys under which JAX keeps what it has traced and compiled, so a function that was
# compiled under some settings is compiled anew under others.
_settings: Any = jax.make_user_context(())


class Setting(Generic[T]):
    """A hashable value that contexts of a thread change, and that JAX's cache keys have.

    ``name`` is its own, and ``default`` its value outside of every context. If it ``is_traced``,
    the calls that are traced in a context have its value wherever they are lowered.
    """

    def __init__(self, name: str, default: T, *, is_traced: bool = False) -> None:
        self._name, self._default, self._is_traced = name, default, is_traced
        if is_traced:
            _traced_names.add(name)

    @property
    def value(self) -> T:
        """The value in this thread."""
        value: T = dict(_settings.value).get(self._name, self._default)
        return value

    @contextlib.contextmanager
    def __call__(self, value: T) -> Iterator[None]:
        """Return a context in which the setting has a value."""
        values = {**dict(_settings.value), self._name: value}
        # Equal settings have one key. Where a call is traced, a default overrides what holds where
        # the call is lowered.
        if value == self._default and not self._is_traced:
            del values[self._name]
        with _settings(tuple(sorted(values.items()))):
            yield


_traced_names: set[str] = set()
# The parameter of an equation that has the settings it was traced under.
_PARAMETER = "contexts"


def current_settings() -> Settings:
    """Return the settings of this thread that contexts have changed."""
    settings: Settings = _settings.value
    return settings


def traced_settings() -> Settings:
    """Return the settings of this thread that calls have which are traced now."""
    return tuple(item for item in _settings.value if item[0] in _traced_names)


def with_traced_settings(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of an equation that is traced now; those that it has remain."""
    now = traced_settings()
    if not now:
        return params
    return {**params, _PARAMETER: _updated(now, params.get(_PARAMETER, ()))}


def settings_of(params: Mapping[str, Any]) -> Settings:
    """Return the settings that an equation with these parameters was traced under."""
    settings: Settings = params.get(_PARAMETER, ())
    return settings


@contextlib.contextmanager
def entered(settings: Settings) -> Iterator[None]:
    """Return a context in which these settings have their values, and the others remain."""
    with _settings(_updated(_settings.value, settings)):
        yield


def under_traced_settings(rule: Callable[..., T]) -> Callable[..., T]:
    """Return a rule of equations that runs under the settings they were traced under.

    Its keywords are the other parameters of the equation.
    """

    @functools.wraps(rule)
    def under(*args: Any, **params: Any) -> T:
        if _PARAMETER not in params:
            return rule(*args, **params)
        with entered(params.pop(_PARAMETER)):
            return rule(*args, **params)

    return under


def _updated(settings: Settings, others: Settings) -> Settings:
    # Names differ, so values are not compared.
    return tuple(sorted({**dict(settings), **dict(others)}.items()))


class Scope(contextlib.ContextDecorator, Generic[T_co]):
    """A context that any thread may enter, any number of times, and a decorator.

    It can be pickled, and so can functions that it decorates.
    """

    def __init__(self, scope: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._scope, self._args, self._kwargs = scope, args, kwargs
        # Raises an error for wrong arguments; the function runs when the context is entered.
        self._generator()
        self._entered = threading.local()

    def __call__(self, function: Function) -> Function:
        """Return a function that runs inside the context."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{self._scope.__name__} around {function.__name__} would be left before any of it "
                "runs: enter the context inside of it, where it calls JAX"
            )
        return super().__call__(function)

    def __reduce__(self) -> Any:
        """Pickle it without the contexts that are entered."""
        return functools.partial(Scope, self._scope, *self._args, **self._kwargs), ()

    def __enter__(self) -> T_co:
        """Enter a new context of the generator function."""
        context = contextlib.contextmanager(self._generator)()
        value: T_co = context.__enter__()
        self._contexts.append(context)
        return value

    def __exit__(self, *exception: Any) -> bool | None:
        """Leave the context that this thread entered last."""
        return self._contexts.pop().__exit__(*exception)

    def _generator(self) -> Iterator[T_co]:
        generator: Iterator[T_co] = inspect.unwrap(self._scope)(*self._args, **self._kwargs)
        return generator

    @property
    def _contexts(self) -> list[contextlib.AbstractContextManager[Any]]:
        contexts: list[Any] = self._entered.__dict__.setdefault("contexts", [])
        return contexts


class ScopeFunction(Protocol[P, T_co]):
    """A function that returns a scope, or a decorator without arguments."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Scope[T_co]: ...

    @overload
    def __call__(self, function: Function, /) -> Function: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a scope, or the function with one around it."""


def scoped(generator: Callable[P, Iterator[T_co]]) -> ScopeFunction[P, T_co]:
    """Make a function that returns a :class:`Scope` of a generator function with one ``yield``.

    ``@f`` decorates a function as ``@f()`` does.
    """

    @functools.wraps(generator)
    def scope(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return Scope(scope)(args[0])
        return Scope(scope, *args, **kwargs)

    return scope
