"""Random choices among the dimensions of published models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")

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
# Experts of published mixtures: (hidden size, intermediate size of an expert, experts, experts that
# a token goes to).
MIXTURES: Mapping[str, tuple[int, int, int, int]] = {
    "Mixtral 8x7B": (4096, 14336, 8, 2),
    "Qwen1.5-MoE-A2.7B": (2048, 1408, 60, 4),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V2 Lite": (2048, 1408, 64, 6),
    "OLMoE 1B-7B": (2048, 1024, 64, 8),
    "Phi-3.5-MoE": (4096, 6400, 16, 2),
}
MOST_TOKENS = 16384
# Models generate for fewer tokens at a time, and train and read prompts with more.
_PREFILL = 256


class Draw:
    """The random numbers of one row of a sample, which its seed and its index determine.

    Parameters
    ----------
    seed, index
        Of the sample and of the row in it.
    device
        ``"cpu"`` or ``"gpu"``, which decides how large and of which types rows are.
    """

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

    def tokens(self, least: int = 1, most: int = MOST_TOKENS) -> int:
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
