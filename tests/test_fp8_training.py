"""Training in 8-bit floats: the losses of two models are within a band of those in bfloat16."""

import numpy as np
import pytest
from numerics import F8E4, roundoff

from benchmarks import record, training
from benchmarks.training import MODELS, PRODUCTS, last_losses

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

# By model, the steps, the least part of the first loss that they take off, and by how much the mean
# loss of the last tenth of the steps may differ from bfloat16's.
BANDS = {"digits": (240, 0.9, 0.1, 0.1), "transformer": (30, 0.3, 0.05, 0.05)}


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_within_the_band(model):
    steps, learned, *bands = BANDS[model]
    plain, *others = (MODELS[model](product, steps) for product in PRODUCTS.values())
    assert plain[-1] < (1 - learned) * plain[0]
    for losses, band in zip(others, bands, strict=True):
        assert np.isfinite(losses).all()
        assert (losses != plain).any()
        assert abs(last_losses(losses) / last_losses(plain) - 1) < band


def test_recorded_losses_are_within_the_band_of_the_guide():
    found = record.read(record.RESULTS / "amd-epyc/fp8_accuracy.jsonl")["rows"]
    rows = [row for row in found if row["kind"] == "training"]
    last = {(row["model"], row["product"]): row["last"] for row in rows}
    assert len(last) == len(MODELS) * len(PRODUCTS)
    for (model, product), loss in last.items():
        band = 0.5 if "e5m2" in product else 0.1
        assert abs(loss / last[model, "bfloat16"] - 1) < band


def test_errors_of_products():
    """Sums are those of float32 in blocks of 128; 8-bit floats have 3 bits behind the first."""
    found = list(training.errors(32, 48, 512))
    assert len(found) == 14
    for row in found:
        assert row["of_sums"] < max(1e-6, 4 * roundoff(F8E4))
        wide = row["operands"] == "spread" and row["product"] == "whole arrays"
        assert row["with_rounding"] < (1 if wide else 0.05)
