"""Samples: calls drawn at random from what models do, which nothing is tuned for.

A row depends on the seed and on its index alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.rows import OPERATIONS, Row
from benchmarks.suites import Suite

_T = TypeVar("_T")
_Entry = dict[str, Any]

# (hidden size, intermediate size, query heads, key heads, head size, vocabulary).
MODELS: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "BERT-base": (768, 3072, 12, 12, 64, 30522),
    "BERT-large": (1024, 4096, 16, 16, 64, 30522),
    "GPT-2": (768, 3072, 12, 12, 64, 50257),
    "GPT-2 XL": (1600, 6400, 25, 25, 64, 50257),
    "T5-small": (512, 2048, 8, 8, 64, 32128),
    "ViT-L/16": (1024, 4096, 16, 16, 64, 1000),
    "Whisper large": (1280, 5120, 20, 20, 64, 51865),
    "Gemma 2B": (2048, 16384, 8, 1, 256, 256000),
    "Gemma 2 9B": (3584, 14336, 16, 8, 256, 256000),
    "Llama 3.2 1B": (2048, 8192, 32, 8, 64, 128256),
    "Llama 2 7B": (4096, 11008, 32, 32, 128, 32000),
    "Llama 3 8B": (4096, 14336, 32, 8, 128, 128256),
    "Llama 2 13B": (5120, 13824, 40, 40, 128, 32000),
    "Llama 3 70B": (8192, 28672, 64, 8, 128, 128256),
    "Mistral 7B": (4096, 14336, 32, 8, 128, 32000),
    "Phi-2": (2560, 10240, 32, 32, 80, 51200),
    "Phi-3 mini": (3072, 8192, 32, 32, 96, 32064),
    "Qwen2 0.5B": (896, 4864, 14, 2, 64, 151936),
    "Qwen2.5 7B": (3584, 18944, 28, 4, 128, 152064),
    "Qwen2.5 32B": (5120, 27648, 40, 8, 128, 152064),
    "Falcon 7B": (4544, 18176, 71, 1, 64, 65024),
    "DeepSeek-V2 Lite": (2048, 10944, 16, 16, 192, 102400),
}
# (hidden size, intermediate size of an expert, experts, experts that a token goes to).
_MIXTURES: Mapping[str, tuple[int, int, int, int]] = {
    "Mixtral 8x7B": (4096, 14336, 8, 2),
    "Qwen1.5-MoE-A2.7B": (2048, 1408, 60, 4),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V2 Lite": (2048, 1408, 64, 6),
    "OLMoE 1B-7B": (2048, 1024, 64, 8),
    "Phi-3.5-MoE": (4096, 6400, 16, 2),
}
# Models generate for fewer tokens at a time, and train and read prompts with more.
_PREFILL, _MOST_TOKENS = 256, 16384
# Types as a row's text has them, and how often each is drawn.
_PRODUCT_TYPES: Mapping[str, Mapping[str, float]] = {
    "gpu": {
        "bfloat16": 30, "bfloat16 to float32": 5, "float16": 13, "float16 to float32": 2,
        "float32": 15, "float32 highest": 8, "int8 to int32": 10, "float8_e4m3fn to bfloat16": 5,
        "float8_e4m3fn to float32": 3, "float8_e4m3fn float8_e5m2 to bfloat16": 2,
        "float8_e5m2 float8_e4m3fn to float16": 2, "float64": 5,
    },
    "cpu": {
        "float32": 45, "float64": 15, "bfloat16": 15, "bfloat16 to float32": 5, "float16": 8,
        "int8 to int32": 8, "float8_e4m3fn to float32": 4,
    },
}  # fmt: skip
_GROUPED_TYPES: Mapping[str, Mapping[str, float]] = {
    "gpu": {
        "bfloat16": 50, "float16": 15, "float32": 15, "int8 to int32": 8,
        "float8_e4m3fn to bfloat16": 12,
    },
    "cpu": {"float32": 60, "bfloat16": 20, "float16": 10, "int8 to int32": 10},
}  # fmt: skip
_MATVEC_TYPES = {"float32": 30, "bfloat16": 25, "float16": 15, "int8 to int32": 12, "float64": 10}
_VECTOR_TYPES = {"float32": 40, "bfloat16": 20, "float16": 10, "float64": 15, "complex64": 10}
_ARRAY_TYPES = {
    "float32": 35, "bfloat16": 25, "float16": 10, "int8": 8, "int32": 5, "float64": 10,
    "complex64": 5,
}  # fmt: skip
_ELEMENTS = {"cpu": (1_000, 10_000_000), "gpu": (100_000, 200_000_000)}
# Bytes of operands and results, and operations, of a product of float32, or of bfloat16 on a GPU.
LIMITS = {"gpu": (3 << 29, 2e12), "cpu": (1 << 26, 2e9)}
# How many operations of these types take about as long as one of the limit's.
_SLOWNESS = {
    "gpu": {"float32": 2.0, "float64": 15.0},
    "cpu": {"float64": 2.0, **dict.fromkeys(("bfloat16", "float16", "int8", "float8_e4m3fn"), 4.0)},
}
# Calls that exceed a limit are drawn again, and few do so often.
_ATTEMPTS = 1000


class _Draw:
    """The random numbers of one row."""

    def __init__(self, seed: int, index: int, device: str) -> None:
        self._generator = np.random.default_rng((seed, index))
        self.device = device

    def one(self, choices: Sequence[_T]) -> _T:
        """Return one of ``choices``, all as likely."""
        return choices[int(self._generator.integers(len(choices)))]

    def weighted(self, weights: Mapping[_T, float]) -> _T:
        """Return one of the keys, as often as its weight says."""
        keys, values = list(weights), np.array(list(weights.values()), float)
        return keys[int(self._generator.choice(len(keys), p=values / values.sum()))]

    def often(self, probability: float) -> bool:
        """Return true with a probability."""
        return bool(self._generator.random() < probability)

    def size(self, least: int, most: int) -> int:
        """Return any integer, each order of magnitude as likely as another."""
        return round(math.exp(self._generator.uniform(math.log(least), math.log(most))))

    def tokens(self, least: int = 1, most: int = _MOST_TOKENS) -> int:
        """Return a number of tokens: any, a power of two, or a multiple of 64, a third each.

        A third are fewer than 256, as where a model generates.
        """
        few = least < _PREFILL and self.often(1 / 3)
        size = self.size(least, _PREFILL) if few else self.size(max(least, _PREFILL), most)
        return min(most, self.one((size, 1 << round(math.log2(size)), -(-size // 64) * 64)))

    def shape(self, rank: int, least: int, most: int) -> list[int]:
        """Return sizes of about so many elements together, divided at random."""
        shares = self._generator.dirichlet(np.ones(rank))
        elements = self.size(least, most)
        sizes = (round(elements**share) for share in shares)
        # Half of the larger sizes are multiples of 8.
        return [max(1, s - s % 8 if s >= 32 and self.often(0.5) else s) for s in sizes]

    def shuffled(self, choices: Sequence[_T]) -> list[_T]:
        """Return ``choices`` in any order."""
        return [choices[i] for i in self._generator.permutation(len(choices))]

    def some(self, choices: Sequence[_T], most: int) -> list[_T]:
        """Return any of ``choices`` in their order, at most so many; perhaps none."""
        count = self.one(range(most + 1))
        picked = set(self._generator.permutation(len(choices))[:count].tolist())
        return [x for i, x in enumerate(choices) if i in picked]

    def weights(self) -> tuple[int, int]:
        """Return the features into and out of a layer of a model, in either order."""
        hidden, intermediate, heads, key_heads, head, vocabulary = self.one([*MODELS.values()])
        outputs = {
            intermediate: 4.0,
            2 * intermediate: 1.0,  # The gate and the up projection as one.
            heads * head: 2.0,
            key_heads * head: 1.0,
            (heads + 2 * key_heads) * head: 1.0,
            vocabulary: 0.7,
        }
        sizes = hidden, self.weighted(outputs)
        return sizes if self.often(0.6) else (sizes[1], sizes[0])

    def head(self) -> tuple[int, int]:
        """Return the query heads and the head size of a model."""
        _, _, heads, _, head, _ = self.one([*MODELS.values()])
        return heads, head


def _matmul(draw: _Draw) -> _Entry:
    """Draw a matrix product, in any of the major orders NN, NT, TN and TT."""
    group = draw.weighted({"layer": 4, "attention": 2, "small batch": 2, "odd": 2})
    sizes = _PRODUCTS[group](draw)
    lhs, rhs = draw.one(("mk", "km")), draw.one(("kn", "nk"))
    if "b" in sizes:
        # The batch is first or, as often as heads lie beside their tokens, second.
        lhs, rhs = (f"b{x}" if draw.often(0.75) else f"{x[0]}b{x[1]}" for x in (lhs, rhs))
    out = "bmn" if "b" in sizes else "mn"
    return _entry(group, draw.weighted(_PRODUCT_TYPES[draw.device]), f"{lhs},{rhs}->{out}", sizes)


def _layer(draw: _Draw) -> dict[str, int]:
    """Tokens are the rows of a layer's product, or contracted by its weights' gradient."""
    features, more = draw.weights()
    if draw.often(0.7):
        return {"m": draw.tokens(), "n": more, "k": features}
    return {"m": features, "n": more, "k": draw.tokens(least=64)}


def _attention(draw: _Draw) -> dict[str, int]:
    """Scores of queries and keys, or the values that they weigh."""
    heads, head = draw.head()
    batch = heads * draw.one((1, 1, 2, 4, 8))
    keys = draw.tokens(most=4096)
    queries = keys if draw.often(0.6) else draw.tokens(most=4096)
    n, k = (keys, head) if draw.often(0.5) else (head, keys)
    return {"b": batch, "m": queries, "n": n, "k": k}


_PRODUCTS: Mapping[str, Callable[[_Draw], dict[str, int]]] = {
    "layer": _layer,
    "attention": _attention,
    "small batch": lambda d: {"b": d.size(2, 4096)} | {x: d.size(4, 512) for x in "mnk"},
    "odd": lambda d: {x: d.size(8, 16384) for x in "mnk"},
}


def _decode(draw: _Draw) -> _Entry:
    """Draw a layer's product of 1 to 256 tokens, as where a model generates."""
    features, more = draw.weights()
    size = draw.size(1, 256)
    types = draw.weighted(_PRODUCT_TYPES[draw.device])
    dims = f"mk,{draw.one(('kn', 'nk'))}->mn"
    sizes = {"m": draw.one((size, 1 << round(math.log2(size)))), "n": more, "k": features}
    return _entry("decode", types, dims, sizes)


def _matvec(draw: _Draw) -> _Entry:
    """Draw a product of a matrix and a vector, of either major order, alone or of a batch."""
    group = draw.weighted({"layer": 4, "small batch": 3, "heads": 2, "odd": 3})
    types = draw.weighted(_MATVEC_TYPES)
    sizes = _MATRICES[group](draw)
    matrix, vector, out = draw.one(("mk", "km")), "k", "m"
    if "b" in sizes:
        matrix, vector, out = f"b{matrix}", f"b{vector}", f"b{out}"
    lhs, rhs = matrix, vector
    if draw.often(0.3):
        # From the left, where the matrix has columns and no rows.
        lhs, rhs, out = (x.replace("m", "n") for x in (vector, matrix, out))
        sizes["n"] = sizes.pop("m")
    return _entry(group, types, f"{lhs},{rhs}->{out}", sizes)


def _heads_of_matvec(draw: _Draw) -> dict[str, int]:
    """One query of each head against its keys, or what it makes of the values."""
    heads, head = draw.head()
    keys = draw.tokens()
    batch = heads * draw.one((1, 1, 2, 8, 32))
    m, k = (keys, head) if draw.often(0.5) else (head, keys)
    return {"b": batch, "m": m, "k": k}


_MATRICES: Mapping[str, Callable[[_Draw], dict[str, int]]] = {
    "layer": lambda draw: dict(zip("mk", draw.weights(), strict=True)),
    "heads": _heads_of_matvec,
    "small batch": lambda d: {"b": d.size(2, 16384), "m": d.size(2, 512), "k": d.size(2, 512)},
    "odd": lambda d: {"m": d.size(2, 65536), "k": d.size(2, 65536)},
}


def _vdot(draw: _Draw) -> _Entry:
    """Draw a dot product of two vectors, or those of many."""
    least, most = _ELEMENTS[draw.device]
    kind = draw.weighted(_VECTOR_TYPES)
    if draw.often(0.5):
        return _entry("vectors", kind, "k,k->", {"k": draw.size(least, most)})
    b, k = draw.shape(2, least, most)
    operands = draw.one(("bk,bk", "bk,bk", "bk,k", "kb,kb"))
    return _entry("many", kind, f"{operands}->b", {"b": b, "k": k})


def _activations(draw: _Draw) -> dict[str, int]:
    return {"a": draw.tokens(), "b": draw.one(draw.weights())}


def _heads(draw: _Draw) -> dict[str, int]:
    heads, head = draw.head()
    return {"a": draw.one((1, 1, 2, 4, 8, 32)), "b": draw.tokens(most=4096), "c": heads, "d": head}


def _images(draw: _Draw) -> dict[str, int]:
    side, channels = draw.one((7, 14, 28, 32, 56, 112, 224)), draw.one((3, 16, 64, 256, 768))
    return {"a": draw.size(1, 256), "b": side, "c": side, "d": channels}


def _any(draw: _Draw) -> dict[str, int]:
    """Any array: its size, then how that divides among one to five dimensions."""
    rank = draw.one((1, 2, 2, 3, 3, 4, 5))
    return dict(zip("abcde", draw.shape(rank, *_ELEMENTS[draw.device]), strict=False))


_ARRAYS = {"activations": _activations, "heads": _heads, "images": _images, "any": _any}


def _array(draw: _Draw, least_rank: int = 1) -> tuple[str, dict[str, int]]:
    """Draw an array of at least a rank: its group, and its dimensions with their sizes."""
    while True:
        group = draw.weighted({"activations": 3.0, "heads": 2.0, "images": 2.0, "any": 3.0})
        sizes = _ARRAYS[group](draw)
        if len(sizes) >= least_rank:
            return group, sizes


def _sum(draw: _Draw) -> _Entry:
    """Draw a sum over some axes, at least one; 16-bit floats are often added up to float32."""
    group, sizes = _array(draw)
    dims = "".join(sizes)
    kept = "".join(draw.some(dims, most=len(dims) - 1))
    kind = draw.weighted(_ARRAY_TYPES)
    if kind == "int8":
        kind = "int8 to int32"
    elif kind in ("bfloat16", "float16") and draw.often(0.3):
        kind += " to float32"
    return _entry(group, kind, f"{dims}->{kept}", sizes)


def _transpose(draw: _Draw) -> _Entry:
    """Draw a permutation that moves something; half of them exchange two neighbours."""
    group, sizes = _array(draw, least_rank=2)
    dims = "".join(sizes)
    out = dims
    while out == dims:
        if draw.often(0.5):
            i = draw.one(range(len(dims) - 1))
            out = dims[:i] + dims[i + 1] + dims[i] + dims[i + 2 :]
        else:
            out = "".join(draw.shuffled(dims))
    return _entry(group, draw.weighted(_ARRAY_TYPES), f"{dims}->{out}", sizes)


def _add(draw: _Draw) -> _Entry:
    """Draw an addition: of equal shapes, of a bias, or of two arrays that lack any dimensions."""
    _, sizes = _array(draw)
    dims = "".join(sizes)
    group = draw.weighted({"same shape": 3, "bias": 3, "broadcast": 4})
    lhs = rhs = dims
    if group == "bias":
        rhs = dims[-1]
    elif group == "broadcast":
        rhs = "".join(draw.some(dims, most=len(dims)))
        lhs = dims if draw.often(0.7) else "".join(draw.some(dims, most=len(dims)))
        # What both lack is no dimension of the result.
        dims = "".join(x for x in dims if x in lhs + rhs)
        sizes = {x: sizes[x] for x in dims}
    if draw.often(0.5):
        lhs, rhs = rhs, lhs
    types = {kind: weight for kind, weight in _ARRAY_TYPES.items() if kind != "complex64"}
    operands = ",".join(filter(None, (lhs, rhs)))
    return _entry(group, draw.weighted(types), f"{operands}->{dims}", sizes)


def _ragged_dot(draw: _Draw) -> _Entry:
    """Draw a product of a mixture's experts, in either direction; narrower on a CPU."""
    hidden, intermediate, experts, chosen = draw.one([*_MIXTURES.values()])
    k, n = draw.one(((hidden, intermediate), (hidden, 2 * intermediate), (intermediate, hidden)))
    narrower = 1 if draw.device == "gpu" else 8
    dims, group = draw.one((
        ("mk,gkn->mn", "forward"), ("mn,gkn->mk", "rows' gradient"),
        ("mk,mn->gkn", "weights' gradient"),
    ))  # fmt: skip
    types = draw.weighted(_GROUPED_TYPES[draw.device])
    split = draw.one(("balanced", "multinomial", "multinomial", "zipf", "one-hot"))
    sizes = {"g": experts, "m": chosen * draw.tokens(), "k": k // narrower, "n": n // narrower}
    # The peer, one dense product, is a bound. What users have instead is JAX's own function.
    return _entry(group, types, dims, sizes, split) | {"target": {"dense": 0.0, "lax": 1.0}}


def _entry(group: str, types: str, dims: str, sizes: Mapping[str, int], split: str = "") -> _Entry:
    texts = (f"{name}{size}" for name, size in sizes.items())
    return {"group": group, "text": " ".join(filter(None, (types, dims, *texts, split)))}


DRAWS: Mapping[str, Callable[[_Draw], _Entry]] = {
    "matmul": _matmul,
    "matvec": _matvec,
    "vdot": _vdot,
    "sum": _sum,
    "transpose": _transpose,
    "add": _add,
    "ragged_dot": _ragged_dot,
    "decode": _decode,
}


def draw_sample(operation: str, device: str, count: int, seed: int) -> Suite:
    """Draw calls of an operation; even seeds are for fitting the library's choices.

    Parameters
    ----------
    operation
        A key of :data:`DRAWS`.
    device
        ``"cpu"`` or ``"gpu"``.
    count, seed
        How many, and which. The first rows of a larger sample of the same seed are the same.

    Raises
    ------
    BenchmarkError
        If there is no distribution of the operation's calls, or an argument is out of range.
    """
    if operation not in DRAWS:
        raise BenchmarkError(f"{operation} has no samples; {', '.join(DRAWS)} have")
    if count < 1 or seed < 0:
        raise BenchmarkError(f"at least 1 row and a seed of at least 0: {count}, {seed}")
    drawn = "matmul" if operation == "decode" else operation
    rows = tuple(_row(operation, drawn, device, seed, index) for index in range(count))
    sample = {"seed": seed, "purpose": "report" if seed % 2 else "fit"}
    return Suite(f"{operation}-{device}-sample-{seed}", drawn, rows, {"sample": sample})


def _row(operation: str, drawn: str, device: str, seed: int, index: int) -> Row:
    draw, (most_bytes, operations) = _Draw(seed, index, device), LIMITS[device]
    for _ in range(_ATTEMPTS):
        entry: _Entry = {"target": {OPERATIONS[drawn].peer: 0.97}} | DRAWS[operation](draw)
        text = entry.pop("text")
        row = Row.of(text, drawn, name=f"{index}: {text}", **entry)
        slowness = _SLOWNESS[device].get(row.type, 1.0)
        if row.bytes <= most_bytes and row.flops * slowness <= operations:
            return row
    raise BenchmarkError(f"row {index} of seed {seed} of {operation} exceeds every limit")
