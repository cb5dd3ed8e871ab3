"""The verdicts on what the ladder's sources claim."""

import pytest

tables = pytest.importorskip("benchmarks.tables", reason="pandas and matplotlib are missing")
REFUTED, THAT_GPU = "refuted", "true of that GPU only"


def verdict(figures, measured, *, other=None, otherwise=THAT_GPU):
    """The verdict on a rung with the counters ``measured``, against another one with ``other``."""
    rows = {
        ("problem", name): {"seconds": counters.get("seconds"), "counters": counters}
        for name, counters in (("rung", measured), ("another", other or {}))
    }
    claim = {"source": "T", "problem": "problem", "text": "a claim", "otherwise": otherwise,
             "figures": figures, "rung": "rung", "against": "another" if other else ""}  # fmt: skip
    return tables.claim_cells(claim, rows, {"problem": None})[-1]


@pytest.mark.parametrize(
    ("claimed", "measured", "expected"),
    [(32, 31.8, "confirmed"), (32, 28, REFUTED), (0, 0.08, "confirmed"), (0, 0.2, REFUTED)],
)
def test_a_value(claimed, measured, expected):
    assert verdict({"x": claimed}, {"x": measured}, otherwise=REFUTED) == expected


@pytest.mark.parametrize(
    ("claimed", "seconds", "expected"),
    [
        (0.5, 1.26, "confirmed"), (0.5, 1.24, THAT_GPU), (0.5, 0.5, THAT_GPU),
        (-0.04, 0.96, "confirmed"), (-0.04, 0.98, THAT_GPU),
        ("less", 0.9, "confirmed"), ("less", 0.98, THAT_GPU), ("more", 1.1, "confirmed"),
        ("more", 0.9, THAT_GPU), (0, 1.05, "confirmed"), (0, 1.2, THAT_GPU),
    ],
)  # fmt: skip
def test_a_change(claimed, seconds, expected):
    assert verdict({"seconds": claimed}, {"seconds": seconds}, other={"seconds": 1.0}) == expected


def test_every_figure_of_a_claim_counts():
    figures = {"x": 4, "y": 8}
    assert verdict(figures, {"x": 4, "y": 8}) == "confirmed"
    assert verdict(figures, {"x": 4, "y": 4}) == THAT_GPU
