import dataclasses
import json
import math
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from benchmarks import operation_command
from benchmarks.calls import case
from benchmarks.calls.case import Case, Errors
from benchmarks.calls.operations import flops
from benchmarks.command_line import main
from benchmarks.measurement import measure, side_times, suite_run
from benchmarks.records import ceilings, record, record_file, report
from benchmarks.suites import suite
from jax_tilekern.cli import machine
from jax_tilekern.cli.timing import Pairs, Spread, interleaved
from jax_tilekern.tuning import device_time

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


def test_every_backend_has_a_suite():
    names = {suite.default_suite("matmul", backend) for backend in ("cpu", "gpu")}
    assert names <= set(suite.suite_names("matmul"))


def test_what_a_row_says():
    r = row(lhs="kbm", rhs="bnk", b=2, m=3, n=4, k=5, result="float64")
    assert r.out == "bmn"
    assert r.shape("kbm") == (5, 2, 3)
    assert flops(r) == 2 * 2 * 3 * 4 * 5
    assert r.bytes == 4 * (2 * 3 * 5 + 2 * 4 * 5) + 8 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": None}, "lacks type"),
        ({"n": None}, "need a size each"),
        ({"q": 3}, "need a size each"),
        ({"m": 0}, "positive integers"),
        ({"m": 1.5}, "positive integers"),
        ({"lhs": "m", "rhs": "n", "k": None}, "operand 'm'"),
        ({"lhs": "mnk"}, "operand 'mnk'"),
        ({"lhs": "mmk"}, "'mmk' has a dimension twice"),
        ({"type": "float33"}, "float33"),
        ({"rhs_type": "float33"}, "float33"),
    ],
)
def test_malformed_rows_are_named(changes, message):
    with pytest.raises(suite.SuiteError, match=message):
        row(**changes)


def test_malformed_suites():
    with pytest.raises(suite.SuiteError, match="rows"):
        suite.parse_suite("s", TINY.partition("rows = ")[0])
    with pytest.raises(suite.SuiteError, match="'product' is none of matmul, "):
        suite.parse_suite("s", TINY.replace('"matmul"', '"product"'))
    with pytest.raises(suite.SuiteError, match="Invalid"):
        suite.parse_suite("s", "rows = [")
    with pytest.raises(suite.SuiteError, match="one name"):
        suite.parse_suite("s", TINY.replace('"f64"', '"f32"'))
    with pytest.raises(suite.SuiteError, match=r"there are .*, matmul-cpu"):
        suite.load_suite("matmul-none")


def test_rows_are_picked_by_pattern_or_part():
    tiny = suite.parse_suite("tiny", TINY)
    assert [r.name for r in tiny.matching("f*").rows] == ["f32", "f64"]
    assert [r.name for r in tiny.matching("AtBt").rows] == ["int8 AtBt"]
    assert [r.name for r in tiny.matching("small").rows] == ["f32", "f64"]
    with pytest.raises(suite.SuiteError, match="there are f32, f64"):
        tiny.matching("f16")


# Errors against float64.


def test_errors_are_those_of_the_arithmetic():
    case = Case.of(row(m=200, n=100, k=50))
    errors = case.errors(case.operands())
    bound = 1e-3 if jax.default_backend() == "gpu" else 1e-6
    assert 0 < errors.ours < bound
    assert 0 < errors.peer < bound
    assert errors.deviation < 10 * bound
    assert record._wrong(case.row, errors) is None


@pytest.mark.parametrize(("precision", "allowed"), [(None, True), ("highest", False)])
def test_float8_may_have_the_error_of_the_tensor_cores_sums(precision, allowed):
    of_float8 = row(m=200, n=100, k=50, type="float8_e4m3fn", result="float32")
    of_float8 = dataclasses.replace(of_float8, precision=precision)
    wrong = record._wrong(of_float8, Errors(1.0e-3, 2.8e-8, 5e-3))
    assert (wrong is None) == allowed
    assert record._wrong(of_float8, Errors(3.0e-3, 2.8e-8, 5e-3))


def test_a_wrong_product_is_found():
    right = Case.of(row(m=200, n=100, k=50))
    wrong = Case(right.row, lambda lhs, rhs: right.peer(lhs, rhs).at[-1].set(0), right.peer)
    errors = wrong.errors(wrong.operands())
    assert errors.ours > 0.05
    assert "relative error" in record._wrong(right.row, errors)
    assert "wrong" in record._wrong(right.row, errors._replace(ours=math.nan))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.one_in(3)
def test_one_wrong_element_outside_of_the_sample_is_found(kind):
    right = Case.of(row(m=200, type=kind, result="int32" if kind == "int8" else None))
    unseen = sorted(set(range(200)) - set(case.sampled_indices(200)))[0]
    wrong = Case(right.row, lambda lhs, rhs: right.peer(lhs, rhs).at[unseen, 3].add(3), right.peer)
    errors = wrong.errors(wrong.operands())
    assert errors.ours == errors.peer
    assert "an element" in record._wrong(right.row, errors)


def test_mixed_types_and_broadcast_batches():
    mixed = Case.of(row(type="float8_e4m3fn", rhs_type="float8_e5m2", result="float32"))
    assert [x.dtype for x in mixed.operands()] == [jnp.float8_e4m3fn, jnp.float8_e5m2]
    assert mixed.errors(mixed.operands()).ours < 1e-3
    one_lhs = Case.of(row(rhs="bkn", b=3))
    assert one_lhs.row.out == "mbn"
    assert one_lhs.row.bytes == 4 * (64 + 3 * 64 + 3 * 64)
    assert one_lhs.errors(one_lhs.operands()).ours < 1e-3


# Timing.


def test_pairs_alternate_who_goes_first():
    order = []
    pairs = interleaved(lambda: order.append("o"), lambda: order.append("p"), seconds=0, least=3)
    assert "".join(order) == "oppoop"
    assert len(pairs.ours) == len(pairs.peer) == 3


def test_the_ratio_is_of_pairs():
    pairs = Pairs(ours=(1.0, 2.0, 10.0), peer=(2.0, 4.0, 10.0))
    assert pairs.ratio.median == 2
    assert Spread.of(pairs.divided(2).ours).median == 1


def test_short_products_are_chained_and_long_ones_are_not(monkeypatch):
    case = Case.of(row(m=16, n=16, k=16))
    operands = case.operands()
    monkeypatch.setattr(measure, "_LONG_CALL", 1e6)
    chained = measure.measure_on_cpu(case, operands, 0, {})
    assert chained.products_per_call == measure._LONGEST_CHAIN
    assert "chains" in chained.method
    monkeypatch.setattr(measure, "_LONG_CALL", 1e-12)
    assert measure.measure_on_cpu(case, operands, 0, {}).products_per_call == 1
    # This result cannot be the next left operand.
    monkeypatch.undo()
    wide = Case.of(row(n=16))
    assert measure.measure_on_cpu(wide, wide.operands(), 0, {}).products_per_call == 1


def test_a_chain_keeps_the_size_of_the_numbers():
    case = Case.of(row(m=64, n=64, k=64))
    lhs, rhs = case.operands()
    result = np.asarray(measure._chain(case.peer, 100)(lhs, rhs / 8))
    assert 0.01 < np.linalg.norm(result) / np.linalg.norm(lhs) < 100


# Profiles. The names are those that XLA's CUPTI collector writes.


def profile(blocks, activities):
    """Make a profile: annotations of (side, start, end) and (start, end, stat), in us."""

    def event(kind, start, end, stat=""):
        stats = f"stats {{ metadata_id: {stat} str_value: 'x' }}" if stat else ""
        picoseconds = f"offset_ps: {start * 10**6} duration_ps: {(end - start) * 10**6}"
        return f"events {{ metadata_id: {kind} {picoseconds} {stats} }}"

    stats = {"kernel_details": 1, "memset_details": 2, "memalloc_details": 3}
    host = "\n".join(event(1, start, end) for _, start, end in blocks)
    device = "\n".join(event(1, start, end, stats[stat]) for start, end, stat in activities)
    stat_names = "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for name, i in stats.items()
    )
    text = f"""
      planes {{ name: "/host:CPU" lines {{ name: "python" {host} }}
        event_metadata {{ key: 1 value {{ id: 1 name: "{device_time.ANNOTATION}" }} }} }}
      planes {{ name: "/device:GPU:0" lines {{ name: "Stream #13(Kernel)" {device} }}
        event_metadata {{ key: 1 value {{ id: 1 name: "a_kernel" }} }}
        {stat_names} }}
    """
    return ProfileData.from_text_proto(text)


BLOCKS = [("ours", 0, 5000), ("peer", 8000, 13000), ("peer", 16000, 21000), ("ours", 24000, 29000)]
KERNELS = [
    (100, 200, "kernel_details"),
    (300, 400, "kernel_details"),
    (8100, 8400, "kernel_details"),
    (8350, 8500, "memset_details"),  # overlaps the kernel for 50 us
    (9000, 9400, "kernel_details"),
    (9400, 9500, "memset_details"),
    (16100, 16600, "kernel_details"),
    (16600, 16700, "memset_details"),
    (17000, 17500, "kernel_details"),
    (17500, 17600, "memset_details"),
    (24100, 24200, "kernel_details"),
    (24300, 24600, "kernel_details"),
]


CALLS = {"ours": 2, "peer": 2}


def found_in(activities):
    """What is found of blocks of two calls each in a profile."""
    order = [side for side, *_ in BLOCKS]
    return device_time.blocks(profile(BLOCKS, activities), CALLS, order)


def test_device_time_of_a_call_is_a_span():
    found = found_in(KERNELS)
    assert [block.side for block in found] == ["ours", "peer", "peer", "ours"]
    times = side_times.of_blocks(found, CALLS)
    np.testing.assert_allclose(times.device["ours"], (100e-6, 200e-6))
    np.testing.assert_allclose(times.device["peer"], (450e-6, 600e-6))
    np.testing.assert_allclose(times.host["ours"], (2500e-6, 2500e-6))
    assert side_times.pairs(times.device, "peer") == Pairs(
        times.device["ours"], times.device["peer"]
    )
    assert times.kernels == {"ours": ["a_kernel"], "peer": ["a_kernel"]}


def test_allocations_are_not_device_time():
    extra = [*KERNELS, (2000, 4000, "memalloc_details")]
    busy = side_times.of_blocks(found_in(extra), CALLS).device
    np.testing.assert_allclose(busy["ours"], (100e-6, 200e-6))


def test_clocks_may_be_a_little_apart():
    shifted = [(start - 700, end - 700, stat) for start, end, stat in KERNELS[2:]]
    busy = side_times.of_blocks(found_in(KERNELS[:2] + shifted), CALLS).device
    np.testing.assert_allclose(busy["peer"], (450e-6, 600e-6))


@pytest.mark.parametrize(
    ("activities", "message"),
    [
        (KERNELS[:-1], "activities"),  # one was dropped
        (KERNELS[:2], "activities"),  # a side has none
        ([], "activities"),
        ([*KERNELS, (50000, 50100, "kernel_details")], "outside of every block"),
    ],
)
def test_profiles_that_do_not_add_up_are_refused(activities, message):
    with pytest.raises(device_time.Unattributed, match=message):
        found_in(activities)


def test_a_profile_without_a_block_is_refused():
    order = ["ours", "peer", "peer", "ours"]
    found = profile(BLOCKS[:3], KERNELS[:-2])
    with pytest.raises(device_time.Unattributed, match="shows 3 of 4 blocks"):
        device_time.blocks(found, {"ours": 2, "peer": 2}, order)


def test_the_profiler_records_the_blocks():
    """The annotations are found in a real profile; without a GPU nothing else is."""
    if jax.default_backend() == "gpu":
        pytest.skip("needs a profile without device activity")
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(8)
    with pytest.raises(device_time.Unattributed, match=r"blocks of 3 calls .*\[0\]"):
        side_times.device_times({side: side_times.Side(lambda: double(x), 3, 2) for side in CALLS})


def test_a_profiler_that_fails_costs_no_row(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("CUPTI is not available")

    monkeypatch.setattr(measure, "device_times", broken)
    case = Case.of(row())
    result = measure.measure_on_gpu(
        case, case.operands(), seconds=0.01, l2_bytes=1 << 10, others={}
    )
    assert "CUPTI is not available" in result.method
    assert result.pairs == result.wall


def test_the_gpu_path_falls_back_to_wall_time():
    """On a CPU the profile shows no GPU, which is the least clear that a profile can be."""
    if jax.default_backend() == "gpu":
        pytest.skip("needs a profile without device activity")
    case = Case.of(row())
    result = measure.measure_on_gpu(
        case, case.operands(), seconds=0.01, l2_bytes=1 << 10, others={}
    )
    assert result.method.startswith("wall time of a call in a row of")
    assert "rotated among 8 copies" in result.method
    assert result.pairs == result.wall


# The command.


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(operation_command, "load_suite", lambda name: suite.parse_suite(name, TINY))
    bandwidths = {"read_bytes_per_second": 1e10, "copy_bytes_per_second": 2e10}
    monkeypatch.setattr(suite_run, "bandwidths", lambda: bandwidths)


def bench(*arguments):
    return main(["matmul", "--suite", "tiny", "--seconds", "0", *map(str, arguments)])


def test_a_run_writes_a_record_a_plot_and_tables(tiny, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "b.json", tmp_path / "b.png"
    assert bench("--json", file, "--plot", plot) == 0
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
    assert plot.read_bytes().startswith(b"\x89PNG")

    plot.unlink()
    assert main(["report", str(file), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| f32 | ")
    assert len({line.count("|") for line in lines[:7]}) == 1
    assert result["device"] in lines[-1]


def test_a_failing_row_does_not_end_the_run(tiny, tmp_path, capsys, monkeypatch):
    errors = Case.errors

    def fail_once(self, operands):
        if self.row.name == "f64":
            raise MemoryError("no room")
        return errors(self, operands)

    monkeypatch.setattr(Case, "errors", fail_once)
    file = tmp_path / "b.json"
    assert bench("--rows", "f*", "--json", file) == 1
    out = capsys.readouterr().out
    assert "MemoryError: no room" in out
    assert "FAILED: f64." in out
    good, bad = json.loads(file.read_text())["rows"]
    assert good["failure"] is None
    assert bad["failure"] == "MemoryError: no room"
    assert main(["report", str(file)]) == 0
    assert "MemoryError: no room" in capsys.readouterr().out


def test_a_wrong_row_has_no_times(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Case, "errors", lambda *_: case.Errors(1.0, 0.0, 1.0))
    file = tmp_path / "b.json"
    assert bench("--rows", "f32", "--json", file) == 1
    (wrong,) = json.loads(file.read_text())["rows"]
    assert "wrong" in wrong["failure"]
    assert "seconds" not in wrong


def test_parts_of_a_suite_add_up(tiny, tmp_path, capsys):
    file = tmp_path / "b.json"
    assert bench("--rows", "f64", "--json", file) == 0
    # As the record of an earlier day, with other kernels.
    first = json.loads(file.read_text())
    first["date"] = first["rows"][0]["run"] = "2020-01-01T00:00:00+00:00"
    first["source_digests"]["cuda"] = "other"
    file.write_text(json.dumps(first))
    assert bench("--rows", "f32", "--json", file) == 0
    both = json.loads(file.read_text())
    assert [r["name"] for r in both["rows"]] == ["f32", "f64"]  # the suite's order
    assert [r["run"] for r in both["rows"]] == [both["date"], first["date"]]
    assert [earlier["date"] for earlier in both["earlier_runs"]] == [first["date"]]
    assert both["rows"][1]["seconds"] == first["rows"][0]["seconds"]
    assert "with other kernels or another JAX: f64." in capsys.readouterr().out

    assert main(["report", str(file)]) == 0
    provenance = capsys.readouterr().out.splitlines()[-2:]
    assert "2020-01-01" in provenance[0]
    assert "--rows f32" in provenance[1]

    # Once nothing of it is left, it is no longer mentioned.
    assert bench("--rows", "f64", "--json", file) == 0
    runs = json.loads(file.read_text())["earlier_runs"]
    assert [earlier["date"] for earlier in runs] == [both["date"]]


def test_a_record_of_another_device_is_not_continued(tiny, tmp_path, capsys):
    file = tmp_path / "b.json"
    assert bench("--rows", "f32", "--json", file) == 0
    file.write_text(file.read_text().replace(record.device_name(), "another"))
    before = file.read_text()
    assert bench("--rows", "f32", "--json", file) == 2
    assert "is of device 'another'" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.thorough
def test_resuming_measures_what_is_missing_then_what_failed(tiny, tmp_path, monkeypatch):
    file = tmp_path / "b.json"

    def die(self, operands):
        raise SystemExit("killed")

    errors = Case.errors
    monkeypatch.setattr(Case, "errors", die)
    with pytest.raises(SystemExit):
        bench("--rows", "f32", "--json", file)
    (cut,) = json.loads(file.read_text())["rows"]
    assert cut["failure"] == "the run ended while this row was measured"

    measured = []

    def noted(self, operands):
        measured.append(self.row.name)
        return errors(self, operands)

    monkeypatch.setattr(Case, "errors", noted)
    assert bench("--rows", "f64", "--json", file) == 0
    measured.clear()
    assert bench("--resume", "--json", file) == 0
    assert measured == ["int8 AtBt", "batched", "vector", "f32"]
    measured.clear()
    assert bench("--resume", "--json", file) == 0
    assert measured == []
    assert len(json.loads(file.read_text())["rows"]) == 5


def test_an_interrupted_row_stays_as_it_was(tiny, tmp_path, monkeypatch):
    file = tmp_path / "b.json"

    def interrupt(self, operands):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Case, "errors", interrupt)
        assert bench("--rows", "f32", "--json", file) == 130
    assert json.loads(file.read_text())["rows"] == []

    assert bench("--rows", "f32", "--json", file) == 0
    before = json.loads(file.read_text())
    monkeypatch.setattr(Case, "errors", interrupt)
    assert bench("--rows", "f32", "--json", file) == 130
    after = json.loads(file.read_text())
    assert after["rows"] == before["rows"]
    # The run that the row is of, though it has no other.
    assert [run["date"] for run in after["earlier_runs"]] == [before["date"]]
    assert main(["report", str(file)]) == 0


def test_a_device_that_no_longer_answers_ends_the_run(tiny, tmp_path, capsys, monkeypatch):
    def fault(self, operands):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(Case, "errors", fault)
    monkeypatch.setattr(suite_run, "device_answers", lambda: False)
    file = tmp_path / "b.json"
    assert bench("--json", file) == 1
    assert "--resume" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["rows"]) == 1


def test_a_row_that_does_not_end_ends_the_run(capsys, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(suite_run.os, "_exit", lambda status: ended.set())
    with suite_run.deadline("slow", 0.01):
        assert ended.wait(60)
    assert "slow does not end" in capsys.readouterr().err


def test_thedevice_answers():
    assert suite_run.device_answers()


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/matmul*.json")), ids=str)
def test_the_committed_records_are_tables(file, capsys):
    assert main(["report", str(file)]) == 0
    assert "Geometric means" in capsys.readouterr().out


def test_targets_of_earlier_records_were_called_floors(tmp_path):
    file = tmp_path / "record.json"
    row = {"name": "x", "floor": 0.9, "others": {"lax": {"floor": 2.0, "failure": None}}}
    fields = {"schema": record.SCHEMA, "date": "today", "rows": [row, {"name": "y"}]}
    file.write_text(json.dumps(fields))
    x, y = record_file.load_record(file)["rows"]
    assert (x["target"], x["others"]["lax"]) == (0.9, {"target": 2.0, "failure": None})
    assert (y["target"], y["others"]) == (0.97, {})


def timed_row(name, **changes):
    spreads = {side: {"median": 1e-3} for side in ("ours", "peer")}
    fields = {"type": "float32", "rhs_type": None, "precision": None, "failure": None}
    fields |= {"name": name, "flops": 1e9, "bytes": 1e6, "seconds": spreads}
    return fields | changes


def test_geometric_means():
    rows = [
        timed_row(kind, seconds={"ratio": {"median": ratio}})
        for kind, ratio in (("f32", 2.0), ("f32", 8.0), ("f64", 0.5))
    ]
    means = record.geometric_means(rows, lambda r: r["name"])
    assert means == pytest.approx({"f32": 4.0, "f64": 0.5})


def test_ceilings_are_of_the_same_arithmetic():
    fast = timed_row("fast", flops=4e9)
    slow = timed_row("slow")
    highest = timed_row("highest", precision="highest")
    moving = timed_row("moving", bytes=2e6)
    broken = {"name": "broken", "failure": "it broke"}
    bounds = {"read_bytes_per_second": 3e9, "copy_bytes_per_second": 4e9}
    rows = [fast, slow, highest, moving, broken]
    found = ceilings.Ceilings.of({"operation": "matmul", **bounds, "rows": rows})
    assert found.bytes_per_second == 4e9
    assert found.operations_per_second == {"float32": 4e12, "float32 highest": 1e12}
    assert found.share(fast) == 1
    assert found.share(slow) == 0.25
    assert found.share(highest) == 1
    assert found.share(moving) == 0.5


def test_the_clocks_are_compared_where_calls_are_long():
    device, wall = "device time by the profiler", "wall time of a call"
    long = timed_row("long", method=device)
    long["wall_seconds"] = {"ours": {"median": 1.02e-3}, "peer": {"median": 1.04e-3}}
    short = timed_row(
        "short", method=device, seconds={s: {"median": 1e-5} for s in long["seconds"]}
    )
    lines = list(report._host_clock([long, short, timed_row("unclear", method=wall)]))
    assert len(lines) == 1
    assert "of 2 calls" in lines[0]
    assert "median 1.030, at most 1.040 (long peer)" in lines[0]


def test_sm_clocks():
    rows = [{"clocks": {"clocks.sm": text}} for text in ("1980 MHz", "1755 MHz", "[N/A]")]
    assert report._sm_clocks([*rows, {"clocks": {}}, {}]) == [1980, 1755]


def test_clocks_are_read_while_the_gpu_works(monkeypatch):
    fields = {name: name.upper() for name in measure._CLOCKS}
    calls = []

    def nvidia_smi():
        before = len(calls)
        while len(calls) == before:
            time.sleep(1e-3)
        return [fields | {"name": "H100"}]

    monkeypatch.setitem(machine.PROBES, "nvidia_smi", nvidia_smi)
    assert measure._clocks_during(lambda: calls.append(0)) == fields
    monkeypatch.setitem(machine.PROBES, "nvidia_smi", lambda: [])
    assert measure._clocks_during(lambda: None) == {}
    monkeypatch.setitem(machine.PROBES, "nvidia_smi", lambda: 1 / 0)
    assert measure._clocks_during(lambda: None) == {}


def test_bandwidths(monkeypatch):
    monkeypatch.setattr(measure, "_BANDWIDTH_CALLS", 1)
    found = measure.bandwidths()
    assert set(found) == {"read_bytes_per_second", "copy_bytes_per_second"}
    assert min(found.values()) > 1e6


def test_listing_and_bad_arguments(tmp_path, capsys):
    assert main(["matmul", "--list"]) == 0
    out = capsys.readouterr().out
    assert "matmul-cpu" in out
    assert "bf16 4095x4097x4093" in out
    assert main(["matmul", "--suite", "none"]) == 2
    assert "no suite 'none'" in capsys.readouterr().err
    (tmp_path / "other.json").write_text('{"schema": 99, "rows": []}')
    assert main(["report", str(tmp_path / "other.json")]) == 2
    assert "schema 99" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing.json")]) == 2
