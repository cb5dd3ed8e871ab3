import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from benchmarks import operation_command
from benchmarks.calls import case
from benchmarks.calls.case import Case
from benchmarks.command_line import main
from benchmarks.measurement import side_times, suite_run
from benchmarks.records import record
from benchmarks.suites import suite
from jax_tilekern.cli.timing import Pairs
from jax_tilekern.tuning import device_time
from jax_tilekern.tuning.device_time import DELAY, CallBlock

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough


RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


TINY = """
operation = "matmul"
about = "For tests"

[[groups]]
name = "small"
target = 0.0
mean = 0.001
rows = [
  { name = "f32", type = "float32", lhs = "mk", rhs = "kn", m = 8, n = 8, k = 8 },
  { name = "f64", type = "float64", lhs = "mk", rhs = "kn", m = 8, n = 8, k = 8 },
]

[[groups]]
name = "impossible"
target = 1e9
rows = [
  { name = "int8 AtBt", type = "int8", result = "int32", lhs = "km", rhs = "nk", m=5, n=6, k=7 },
  { name = "batched", type = "bfloat16", lhs = "bmk", rhs = "kbn", b = 3, m = 5, n = 6, k = 7 },
  { name = "vector", type = "float16", lhs = "mk", rhs = "k", m = 9, k = 4, precision = "highest" },
]
"""


def row(**changes):
    entry = {"name": "x", "type": "float32", "lhs": "mk", "rhs": "kn", "m": 8, "n": 8, "k": 8}
    entry = {key: value for key, value in (entry | changes).items() if value is not None}
    return suite._row(entry, "matmul", {"name": "g", "target": 1.0})


# Suites.


@pytest.mark.parametrize("name", suite.suite_names("matmul"))
def test_the_package_suites_are_well_formed(name):
    rows = suite.load_suite(name).rows
    assert len(rows) > 20
    for r in rows:
        shapes = (r.shape(r.lhs), r.shape(r.rhs))
        lhs, rhs = map(jax.ShapeDtypeStruct, shapes, r.types)
        with jax.enable_x64(True):
            result = jax.eval_shape(Case.of(r).peer, lhs, rhs)
        assert result.shape == r.shape(r.out)
        assert result.dtype == r.result_type


# Errors against float64.


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.one_in(3)
def test_one_wrong_element_outside_of_the_sample_is_found(kind):
    right = Case.of(row(m=200, type=kind, result="int32" if kind == "int8" else None))
    unseen = sorted(set(range(200)) - set(case.sampled_indices(200)))[0]
    wrong = Case(right.row, lambda lhs, rhs: right.peer(lhs, rhs).at[unseen, 3].add(3), right.peer)
    errors = wrong.errors(wrong.operands())
    assert errors.ours == errors.peer
    assert "an element" in record._wrong(right.row, errors)


# Profiles. The names are those that XLA's CUPTI collector writes.


def profile(activities):
    """Make a profile of (start, end, stat), in us."""
    stats = {"kernel_details": 1, "memset_details": 2, "memalloc_details": 3}
    names = "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for name, i in stats.items()
    )
    events = "\n".join(
        f"events {{ metadata_id: {2 if stat == DELAY else 1} offset_ps: {start * 10**6} "
        f"duration_ps: {(end - start) * 10**6} "
        f"stats {{ metadata_id: {stats.get(stat, 1)} str_value: 'x' }} }}"
        for start, end, stat in activities
    )
    return ProfileData.from_text_proto(f"""
      planes {{ name: "/device:GPU:0" lines {{ name: "Stream #13(Kernel)" {events} }}
        event_metadata {{ key: 1 value {{ id: 1 name: "a_kernel" }} }}
        event_metadata {{ key: 2 value {{ id: 2 name: "{DELAY}" }} }}
        {names} }}
    """)


ORDER = ["ours", "peer", "peer", "ours"]
KERNELS = [
    (0, 90, DELAY),
    (100, 200, "kernel_details"),
    (210, 290, "memalloc_details"),
    (300, 400, "kernel_details"),
    (8000, 8090, DELAY),
    (8100, 8400, "kernel_details"),
    (8350, 8500, "memset_details"),  # overlaps the kernel for 50 us
    (9000, 9400, "kernel_details"),
    (9400, 9500, "memset_details"),
    (16000, 16090, DELAY),
    (16100, 16600, "kernel_details"),
    (16600, 16700, "memset_details"),
    (17000, 17500, "kernel_details"),
    (17500, 17600, "memset_details"),
    (24000, 24090, DELAY),
    (24100, 24200, "kernel_details"),
    (24300, 24600, "kernel_details"),
]
CALLS = {"ours": 2, "peer": 2}


def test_device_time_of_a_call_is_a_span():
    found = device_time.activities_of_blocks(profile(KERNELS[::-1]), CALLS, ORDER)
    times = side_times.of_blocks(
        [CallBlock(*x) for x in zip(ORDER, (1, 2, 3, 4), found, strict=True)], CALLS
    )
    np.testing.assert_allclose(times.device["ours"], (100e-6, 200e-6))
    np.testing.assert_allclose(times.device["peer"], (450e-6, 600e-6))
    assert times.host == {"ours": (0.5, 2), "peer": (1, 1.5)}
    assert side_times.pairs(times.device, "peer") == Pairs(
        times.device["ours"], times.device["peer"]
    )
    assert times.kernels == {"ours": ["a_kernel"], "peer": ["a_kernel"]}


@pytest.mark.parametrize(
    ("activities", "message"),
    [
        (KERNELS[:-1], "activities"),  # one was dropped
        ([x for x in KERNELS if x[0] < 8000 or x[2] == DELAY], "activities"),  # a side has none
        ([], "shows 0 of 4 blocks"),
        ([(-50, -10, "kernel_details"), *KERNELS], "outside of every block"),
    ],
)
def test_profiles_that_do_not_add_up_are_refused(activities, message):
    with pytest.raises(device_time.Unattributed, match=message):
        device_time.activities_of_blocks(profile(activities), CALLS, ORDER)


# The command.


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(operation_command, "load_suite", lambda name: suite.parse_suite(name, TINY))
    bandwidths = {"read_bytes_per_second": 1e10, "copy_bytes_per_second": 2e10}
    monkeypatch.setattr(suite_run, "bandwidths", lambda: bandwidths)


def bench(*arguments):
    return main(["matmul", "--suite", "tiny", "--seconds", "0", *map(str, arguments)])


def test_a_run_writes_a_record_and_tables(tiny, tmp_path, capsys):
    file = tmp_path / "b.json"
    assert bench("--json", file) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "Geometric means" in out
    assert "By group: small" in out
    assert "3 of 5 rows below their target" in out
    assert out.count("(below 1e+09)") == 6  # while it runs, and in the table

    result = json.loads(file.read_text())
    assert result["schema"] == record.SCHEMA
    assert result["suite"] == "tiny"
    assert result["command"].startswith("python -m benchmarks matmul --suite tiny")
    assert result["errors"] == {}
    assert {"versions", "cpu", "driver", "nvrtc", "nvidia_smi", "source_digests"} <= set(result)
    assert [r["name"] for r in result["rows"]] == ["f32", "f64", "int8 AtBt", "batched", "vector"]
    for r in result["rows"]:
        assert r["failure"] is None
        assert r["seconds"]["ours"]["p10"] <= r["seconds"]["ours"]["median"]
        assert r["pairs"] >= 5
        assert r["run"] == result["date"]
        assert r["took_seconds"] >= 0
    assert result["rows"][1]["error"]["ours"] < 1e-14  # float64 was not made float32
    assert result["rows"][2]["error"]["ours"] == 0

    assert main(["report", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| f32 | ")
    assert len({line.count("|") for line in lines[:7]}) == 1
    assert result["device"] in lines[-1]


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/matmul*.json")), ids=str)
def test_the_committed_records_are_tables(file, capsys):
    assert main(["report", str(file)]) == 0
    assert "Geometric means" in capsys.readouterr().out
