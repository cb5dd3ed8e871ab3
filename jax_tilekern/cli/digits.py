"""The handwritten digits that the package ships, split for training and testing."""

from __future__ import annotations

import importlib.resources
from typing import Any, NamedTuple

import numpy as np

_SEED = 1998
_TEST_IMAGES = 360


class Digits(NamedTuple):
    """Images as rows of 64 pixels between 0 and 1, with their labels."""

    images: np.ndarray[Any, np.dtype[np.float32]]
    labels: np.ndarray[Any, np.dtype[np.int32]]


def load_digits() -> tuple[Digits, Digits]:
    """Return the training images and the test images; the split is always the same."""
    file = importlib.resources.files("jax_tilekern.cli") / "digits.npz"
    with file.open("rb") as stream, np.load(stream) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    pixels = images.reshape(len(images), -1).astype(np.float32) / 16
    order = np.random.default_rng(_SEED).permutation(len(pixels))
    test, train = np.split(order, [_TEST_IMAGES])
    return tuple(  # type: ignore[return-value]
        Digits(pixels[part], labels[part].astype(np.int32)) for part in (train, test)
    )
