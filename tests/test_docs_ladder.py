"""The ladder's page: it is what the committed records make, and its rules decide as they should."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import ladder as command
from benchmarks.ladder import counters, report

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

DOCS = Path(__file__).parent.parent / "docs"
LADDERS = list(command._LADDERS)


def _import(*names):
    sys.path.insert(0, str(DOCS / "ladder"))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.pop(0)


records, tables, claim, claims_transpose, claims_products, expectations, figures, make_page = (
    _import(
        "records", "tables", "claim", "claims_transpose", "claims_products", "expectations",
        "figures", "make_page",
    )
)  # fmt: skip


def test_the_page_is_made_of_the_committed_records():
    # `python docs/ladder/make_page.py` fixes a failure.
    assert make_page.page(records.Records()) == (DOCS / "ladder.md").read_text()


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_are_as_drawn_and_shown(name):
    drawn = figures.FIGURES[name]()
    assert drawn == (DOCS / "ladder" / f"{name}.svg").read_text()
    assert f"(ladder/{name}.svg)" in (DOCS / "ladder.md").read_text()


def test_pictures_and_files_that_the_page_names_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", (DOCS / "ladder.md").read_text())
    assert len(links) > 40
    for link in links:
        assert (DOCS / link).exists(), link


@pytest.mark.parametrize("name", LADDERS)
def test_the_page_has_every_rung(name):
    page = (DOCS / "ladder.md").read_text()
    section = re.search(rf"^## {name}$(.*?)(^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]
    listed = re.findall(r"^\| \[\d\d\]\(.*\| (.+?) \|$", section, re.MULTILINE)
    names = {rung for rungs in listed for rung in rungs.split("; ")}
    assert names == {rung.name for rung in tables.all_rungs(name)}


# Records in which everything was measured.


def a_kernel(**changes):
    kernel = dict.fromkeys((*counters._METRICS, *counters._PER_REQUEST), 50.0)
    shape = {"name": "k", "grid": [4, 4, 1], "block": [32, 1, 1]}
    return kernel | shape | {"stalls": {"long_scoreboard": 9.5, "barrier": 2.0}} | changes


def a_rung(rung, **changes):
    return {
        "name": rung.name, "source": rung.source, "peer": rung.source is None, "on_host": False,
        "arithmetic": rung.arithmetic or "any", "tile": rung.tile, "kernels": [], "library": None,
        "skipped": None, "failure": None, "seconds": 1e-3, "method": "device time",
        "counters": {"kernels": [a_kernel()], "write_efficiency": 0.5},
    } | changes  # fmt: skip


def full_record(name):
    found = importlib.import_module(f"benchmarks.ladder.{name}").LADDER
    problems = [
        {
            "size": size, "title": problem.title, "sizes": problem.sizes, "bytes": problem.bytes,
            "flops": problem.flops, "bound": problem.bound,
            "rungs": [a_rung(rung) for rung in (*problem.rungs, *problem.peers)],
        }
        for size in found.defaults
        for problem in found.parse(size)
    ]  # fmt: skip
    return {
        "schema": 2, "ladder": name, "date": "2026-01-02T03:04:05+00:00", "device": "GPU",
        "driver": {"cuda": "13.0"}, "versions": {"jax": "0.11.2"}, "no_counters": None,
        "rungs_digest": "of then", "read_bytes_per_second": 3e12, "copy_bytes_per_second": 3e12,
        "problems": problems,
    }  # fmt: skip


@pytest.fixture
def full(tmp_path):
    """Return a function that writes full records, after changes to their rungs, and reads them."""

    def make(change=lambda ladder, size, rung: None):
        for name in LADDERS:
            record = full_record(name)
            for problem in record["problems"]:
                for rung in problem["rungs"]:
                    change(name, problem["size"], rung)
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        return records.Records(tmp_path)

    return make


def all_claims():
    sources = claims_transpose.T, claims_transpose.S, claims_products.D, claims_products.M
    return [one for some in (*sources, *expectations.EXPECTATIONS.values()) for one in some]


def test_every_claim_is_decided_where_everything_was_measured(full):
    found = full()
    for one in all_claims():
        decided = one.finding(found).verdict
        assert decided in (claim.CONFIRMED, claim.REFUTED, claim.THAT_GPU), one.text
    page = make_page.page(found)
    assert claim.NOT_MEASURED not in page
    assert "{{" not in page
    assert "GPU, CUDA 13.0, JAX 0.11.2, 2026-01-02" in page
    assert "have changed since they were recorded" in page
    for name in LADDERS:
        for rung in tables.all_rungs(name):
            assert f"| {rung.name} |" in page


def test_what_was_not_measured_is_said(full):
    def forget(ladder, size, rung):
        rung.pop("counters")

    found = full(forget)
    finding = claims_transpose.T[0].finding(found)
    assert finding.verdict == claim.NOT_MEASURED
    assert "counters of naive 64x8, along reads" in finding.why
    assert "No counters are recorded yet." in make_page.page(found)


def verdict(found, text):
    (one,) = (one for one in all_claims() if one.text.startswith(text))
    return one.finding(found).verdict


def with_kernel(wanted, **changes):
    """Return a change of one rung's counters, and of its time where that is given."""

    def change(ladder, size, rung):
        if rung["name"] == wanted:
            if "seconds" in changes:
                rung["seconds"] = changes["seconds"]
            rung["counters"]["kernels"] = [a_kernel(**changes)]

    return change


NAIVE = "naive 64x8, along reads"


def test_mechanisms_are_confirmed_or_refuted_by_counters(full):
    sectors = {"load_sectors_per_request": 4.0, "store_sectors_per_request": 32.0}
    assert verdict(full(with_kernel(NAIVE, **sectors)), "naive 64x8 reads 4") == claim.CONFIRMED
    sectors["store_sectors_per_request"] = 31.0
    assert verdict(full(with_kernel(NAIVE, **sectors)), "naive 64x8 reads 4") == claim.REFUTED

    through = "pass-through 8x8"
    none = {"load_conflicts_per_request": 0.1, "store_conflicts_per_request": 0.0}
    some = none | {"load_conflicts_per_request": 60.0}
    assert verdict(full(with_kernel(through, **none)), "that is for bank") == claim.REFUTED
    assert verdict(full(with_kernel(through, **some)), "that is for bank") == claim.CONFIRMED


def test_writes_that_stay_in_l2_are_told_from_those_that_do_not(full):
    def writes(small, large):
        def change(ladder, size, rung):
            amount = {"2048x512": small, "8192x8192": large}.get(size, 0)
            rung["counters"]["kernels"][0]["dram_write_bytes"] = amount

        return verdict(full(change), "the same: no writes to DRAM")

    assert writes(1000, 250 << 20) == claim.CONFIRMED
    assert writes(4 << 20, 250 << 20) == claim.REFUTED
    assert writes(1000, 1000) == claim.REFUTED


@pytest.mark.parametrize(
    ("seconds", "memory", "wanted"),
    [
        # 63 % slower and 39 % less of the memory pipes, or half as much at least.
        (1.6e-3, 30.0, claim.CONFIRMED),
        (1.4e-3, 40.0, claim.CONFIRMED),
        (1.3e-3, 30.0, claim.THAT_GPU),
        (0.4e-3, 30.0, claim.THAT_GPU),
        (1.6e-3, 50.0, claim.THAT_GPU),
        (1.6e-3, 70.0, claim.THAT_GPU),
    ],
)
def test_numbers_of_another_gpu_are_confirmed_by_half_of_each(full, seconds, memory, wanted):
    counted = {"compute_percent": 56.0, "memory_pipe_percent": memory, "sm_active_cycles": 80.0}
    found = full(with_kernel("pass-through 32x32", seconds=seconds, **counted))
    assert verdict(found, "through shared memory, 32x32") == wanted


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(0.9e-3, claim.CONFIRMED), (0.99e-3, claim.THAT_GPU)]
)
def test_a_claim_without_numbers_is_confirmed_in_direction(full, seconds, wanted):
    def change(ladder, size, rung):
        if rung["name"] == "float4, 8x8":
            rung["seconds"] = seconds

    assert verdict(full(change), "float4: (2), all loads first") == wanted


@pytest.mark.parametrize(("blocks", "bound"), [(16384, True), (2048, False)])
def test_a_limit_by_the_launch_of_blocks_is_said_where_it_is_one(full, blocks, bound):
    def change(ladder, size, rung):
        rung["counters"]["kernels"] = [a_kernel(grid=[blocks, 1, 1], sm_active_cycles=17391.0)]

    (one,) = (one for one in all_claims() if one.text.startswith("at 8x8, without"))
    assert ("launches about one block a cycle" in one.finding(full(change)).why) == bound


def test_reuse_is_counted_against_the_formula(full):
    # 2 / (1/32 + 1/32) = 32 operations for each element of eight bytes.
    flops, tile = 2 * 4096**3, {"load_sectors": 2 * 4096**3 / 32 * 8 / 32}
    shared = "shared tiles"
    found = full(with_kernel(shared, **tile))
    measured = found.rung("matmul", claim.PRODUCT, shared, "float64")
    assert tables.predicted_reuse(measured) == 32
    assert measured.problem["flops"] == flops
    row = next(
        line for line in tables.reuse(found, claim.PRODUCT).splitlines()
        if line.startswith("| shared tiles | float64")
    )  # fmt: skip
    assert row.split(" | ")[2:5] == ["32x32", "32", "32"]


@pytest.mark.parametrize("name", LADDERS)
def test_what_the_text_says_of_the_gpu_is_in_the_records(name):
    record = records.Records()[name]
    (gpu,) = record["driver"]["gpus"]
    assert gpu["sm_count"] == 132
    assert gpu["l2_bytes"] == 50 << 20
    assert record["nvidia_smi"][0]["clocks.max.sm"] == "1980 MHz"


def test_what_the_text_says_of_the_last_rungs_is_in_the_records():
    found = records.Records()
    persistent, *later = (
        found.rung("matmul", claim.PRODUCT, name, "bfloat16")
        for name in ("persistent grid", "ping-pong", "overlapped epilogue")
    )
    for rung in later:
        assert rung.counter("tensor_percent") > persistent.counter("tensor_percent")
        assert rung.seconds > (1 - claim.NOISE) * persistent.seconds
        assert rung.tile == (128, 192)
        assert 4096 // 128 * -(-4096 // 192) % 132 < 132 / 2


def test_the_peaks_are_those_of_the_cuda_cores():
    assert claim.PEAK["float64"] == pytest.approx(33.5e12, rel=0.01)
    assert claim.PEAK["float32"] == pytest.approx(66.9e12, rel=0.01)


def test_plots_show_the_deciding_counters(full, tmp_path):
    pytest.importorskip("matplotlib")
    found = full()
    for name in ("dot", "matmul"):
        file = tmp_path / f"{name}.png"
        report.plot(found[name], file)
        assert file.read_bytes().startswith(b"\x89PNG")
