"""Transformations of methods of ``flax.linen`` modules, and values that it takes for parameters.

A method may create parameters, draw keys and store values in the scope of its module. A
transformation must then be of a function of these variables and return them, as those of
``flax.linen`` are. Flax is not imported: a module exists only where it is.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any


def lifted_over_variables(
    evaluate: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``evaluate`` of a function, and of a method's variables if it is one of a module.

    ``evaluate(function, *args, **kwargs)`` returns the results of a function.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        linen = sys.modules.get("flax.linen")
        if linen is None or not args or not isinstance(args[0], linen.Module):
            return evaluate(function, *args, **kwargs)
        lifted = functools.partial(_lifted, evaluate)
        return linen.transforms.lift_transform(lifted, function)(*args, **kwargs)

    return call


def _lifted(evaluate: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``evaluate`` of a function of scopes."""
    from flax.core import lift

    def packed(
        scopes_of: Callable[..., Any],
        variables_of: Callable[..., Any],
        variables: Any,
        keys: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def pure(variables: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            scopes = scopes_of(variables, keys)
            return method(scopes, *args, **kwargs), variables_of(scopes)

        return evaluate(pure, variables, keys, *args, **kwargs)

    return lift.pack(packed, (True,), (True,), (True,), name="fuse", enable_kwargs=True)


def register_box(cls: type) -> None:
    """Let Flax, if it is there, take instances of a class for boxes of parameters."""
    metadata = sys.modules.get("flax.core.meta")
    if metadata is not None:
        metadata.AxisMetadata.register(cls)


def register_state(cls: type, names: Sequence[str]) -> None:
    """Let Flax, if it is there, store these fields of instances of a dataclass."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or serialization.is_serializable(cls):
        return

    def state_of(x: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(x, name)) for name in names}

    def restored(x: Any, state: dict[str, Any]) -> Any:
        if state.keys() != set(names):
            raise ValueError(
                f"{cls.__name__} have {', '.join(names)}, and the state at "
                f"{serialization.current_path()} has {', '.join(state)}"
            )
        fields = {
            name: serialization.from_state_dict(getattr(x, name), state[name], name)
            for name in names
        }
        return dataclasses.replace(x, **fields)

    serialization.register_serialization_state(cls, state_of, restored)
