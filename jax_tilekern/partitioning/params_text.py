"""The parameters of a call as text, and back.

XLA partitions a call when a program is compiled, possibly in another process than the one that
lowered it. So everything about the call travels as text. Equal calls have equal texts, which are
part of the key of JAX's persistent compilation cache.

A value without a text, such as a function that a user has set for a kernel, is identified within
this process alone: its text names the process, so no other process finds a program by it.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_tilekern.plans.cuda_kernel import Batch
from jax_tilekern.plans.gemm.contraction import Contraction
from jax_tilekern.plans.grouped_gemm.contraction import RaggedContraction

_DATACLASSES = {kind.__name__: kind for kind in (Contraction, RaggedContraction, Batch)}
_ENUMS = {kind.__name__: kind for kind in (lax.Precision, lax.DotAlgorithmPreset)}


def to_text(value: Any) -> str:
    """Return the text of a value that consists of the types of parameters."""
    return json.dumps(_encoded(value), sort_keys=True)


def from_text(text: str) -> Any:
    """Return the value of :func:`to_text`'s text."""
    return _decoded(json.loads(text))


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, lax.DotAlgorithm):
        return {"DotAlgorithm": [_encoded(x) for x in value]}
    if isinstance(value, tuple):
        return [_encoded(x) for x in value]
    if isinstance(value, dict):
        return {"dict": {key: _encoded(x) for key, x in value.items()}}
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return {"dtype": np.dtype(value).name}
    name = type(value).__name__
    if name in _ENUMS:
        return {name: value.name}
    if name in _DATACLASSES:
        fields = dataclasses.fields(value)
        return {name: {field.name: _encoded(getattr(value, field.name)) for field in fields}}
    return {"object": _token_of(value)}


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
    return _DATACLASSES[name](**{key: _decoded(x) for key, x in content.items()})


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
            "this program partitions a call of a cuda_kernel by its sharding_rule, and the kernel "
            "belongs to another process; call it inside jax.shard_map to export the program"
        )
    return _objects[token]
