"""The parameters of a call as text, and back.

XLA partitions a call when a program is compiled, possibly in another process than the one that
lowered it. So everything about the call travels as text. Equal calls have equal texts, which are
part of the key of JAX's persistent compilation cache.

Other layers register the types that they add. A value without a text, such as a function that a
user has set for a kernel, is identified within this process alone: its text names the process, so
no other process finds a program by it.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_tilekern.interop import compat
from jax_tilekern.plans.contraction import Contraction

_ENUMS = {
    kind.__name__: kind
    for kind in (lax.AccuracyMode, lax.DotAlgorithmPreset, lax.Precision, lax.RoundingMethod)
}


class _Codec(NamedTuple):
    to_data: Callable[[Any], Any]
    from_data: Callable[[Any], Any]


_codecs: dict[str, _Codec] = {}


def register(kind: type, to_data: Callable[[Any], Any], from_data: Callable[[Any], Any]) -> None:
    """Give values of a type a text.

    ``to_data`` returns a value as data of types that have a text, or ``None``; ``from_data`` is its
    inverse.
    """
    _codecs[kind.__name__] = _Codec(to_data, from_data)


def is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, names, types and enumerations."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return _is_number_or_name(value) or _is_dtype(value) or type(value).__name__ in _ENUMS


def to_text(value: Any) -> str:
    """Return the text of a value that consists of the types of parameters."""
    return json.dumps(_encoded(value), sort_keys=True)


@dataclasses.dataclass(frozen=True)
class _Keyed:
    text: str
    value: Any = dataclasses.field(compare=False)


@compat.cached(max_size=1024, trace_context_in_key=False)
def _first(keyed: _Keyed) -> Any:
    return keyed.value


def shared(value: Any) -> Any:
    """Return one value for all of a registered type that have the same plain data."""
    name = type(value).__name__
    data = _codecs[name].to_data(value) if name in _codecs else None
    if data is None or not is_plain(data):
        return value
    return _first(_Keyed(to_text({name: data}), value))


def from_text(text: str) -> Any:
    """Return the value of :func:`to_text`'s text."""
    return _decoded(json.loads(text))


def _encoded(value: Any) -> Any:
    if _is_number_or_name(value):
        return value
    if isinstance(value, lax.DotAlgorithm):
        return {"DotAlgorithm": [_encoded(x) for x in value]}
    if isinstance(value, tuple):
        return [_encoded(x) for x in value]
    if isinstance(value, dict):
        return {"dict": {key: _encoded(x) for key, x in value.items()}}
    if _is_dtype(value):
        return {"dtype": np.dtype(value).name}
    name = type(value).__name__
    if name in _ENUMS:
        return {name: value.name}
    if isinstance(value, Contraction):
        fields = dataclasses.fields(value)
        return {name: {field.name: _encoded(getattr(value, field.name)) for field in fields}}
    if name in _codecs and (data := _codecs[name].to_data(value)) is not None:
        return {name: _encoded(data)}
    return {"object": _token_of(value)}


def _is_number_or_name(value: Any) -> bool:
    # Some enumerations are integers too.
    return (value is None or isinstance(value, bool | int | float | str)) and (
        type(value).__name__ not in _ENUMS
    )


def _is_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype"))


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(x) for x in value)
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "dict":
        return {key: _decoded(x) for key, x in content.items()}
    if name == "dtype":
        return jnp.dtype(content)
    if name == "object":
        return _object_of(content)
    if name == "DotAlgorithm":
        return lax.DotAlgorithm(*map(_decoded, content))
    if name in _ENUMS:
        return _ENUMS[name][content]
    if name in _codecs:
        return _codecs[name].from_data(_decoded(content))
    return Contraction(**{key: _decoded(x) for key, x in content.items()})


# Objects of this process, and their tokens.

_PROCESS = uuid.uuid4().hex
_tokens: dict[Any, str] = {}
_objects: dict[str, Any] = {}


def _token_of(value: Any) -> str:
    token = _tokens.setdefault(value, f"{_PROCESS}-{len(_tokens)}")
    _objects[token] = value
    return token


def _object_of(token: str) -> Any:
    if token not in _objects:
        raise RuntimeError(
            "this program partitions a call of a cuda_kernel, or of a product or a moe with a "
            "function that has a loop, and the function belongs to another process; call it inside "
            "jax.shard_map to export the program"
        )
    return _objects[token]
