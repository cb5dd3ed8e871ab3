import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from jax_tilekern.cli import main
from jax_tilekern.cli.bench import device_time, measure, record, suite
from jax_tilekern.cli.bench.case import Case
from jax_tilekern.cli.timing import Pairs, Spread, interleaved

TINY = """
operation = "matmul"
about = "For tests"
rows = [
  { name = "f32", type = "float32", lhs = "mk", rhs = "kn", m = 8, n = 8, k = 8 },
  { name = "f64", type = "float64", lhs = "mk", rhs = "kn", m = 8, n = 8, k = 8 },
  { name = "int8 AtBt", type = "int8", result = "int32", lhs = "km", rhs = "nk", m=5, n=6, k=7 },
  { name = "batched", type = "bfloat16", lhs = "bmk", rhs = "kbn", b = 3, m = 5, n = 6, k = 7 },
  { name = "vector", type = "float16", lhs = "mk", rhs = "k", m = 9, k = 4, precision = "highest" },
]
"""


def row(**changes):
    entry = {"name": "x", "type": "float32", "lhs": "mk", "rhs": "kn", "m": 8, "n": 8, "k": 8}
    return suite._row({key: value for key, value in (entry | changes).items() if value is not None})


# Suites.


@pytest.mark.parametrize("name", suite.suite_names("matmul"))
def test_the_package_suites_are_well_formed(name):
    rows = suite.load_suite(name).rows
    assert len(rows) > 20
    for r in rows:
        lhs, rhs = (jax.ShapeDtypeStruct(r.shape(x), jnp.dtype(r.type)) for x in (r.lhs, r.rhs))
        with jax.enable_x64(True):
            result = jax.eval_shape(Case.of(r).peer, lhs, rhs)
        assert result.shape == r.shape(r.out)
        assert result.dtype == r.result_type


def test_every_backend_has_a_suite():
    assert set(suite.DEFAULT_SUITES.values()) <= set(suite.suite_names("matmul"))


def test_what_a_row_says():
    r = row(lhs="kbm", rhs="bnk", b=2, m=3, n=4, k=5, result="float64")
    assert r.out == "bmn"
    assert r.dimension_numbers == (((0,), (2,)), ((1,), (0,)))
    assert r.shape("kbm") == (5, 2, 3)
    assert r.flops == 2 * 2 * 3 * 4 * 5
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
        ({"lhs": "mmk"}, "operand 'mmk'"),
        ({"lhs": "bmk", "b": 2}, "both operands or of neither"),
        ({"type": "float33"}, "float33"),
    ],
)
def test_malformed_rows_are_named(changes, message):
    with pytest.raises(suite.SuiteError, match=message):
        row(**changes)


def test_malformed_suites():
    with pytest.raises(suite.SuiteError, match="rows"):
        suite.parse_suite("s", 'about = "none"')
    with pytest.raises(suite.SuiteError, match="Invalid"):
        suite.parse_suite("s", "rows = [")
    with pytest.raises(suite.SuiteError, match="one name"):
        suite.parse_suite("s", TINY.replace('"f64"', '"f32"'))
    with pytest.raises(suite.SuiteError, match="there are matmul-cpu"):
        suite.load_suite("matmul-none")


def test_rows_are_picked_by_pattern_or_part():
    tiny = suite.parse_suite("tiny", TINY)
    assert [r.name for r in tiny.matching("f*").rows] == ["f32", "f64"]
    assert [r.name for r in tiny.matching("AtBt").rows] == ["int8 AtBt"]
    with pytest.raises(suite.SuiteError, match="there are f32, f64"):
        tiny.matching("f16")


# Errors against float64.


def test_errors_are_those_of_the_arithmetic():
    case = Case.of(row(m=200, n=100, k=50))
    for error in case.errors(case.operands()):
        assert 0 < error < 1e-3 if jax.default_backend() == "gpu" else 1e-6


def test_a_wrong_product_is_found():
    right = Case.of(row(m=200, n=100, k=50))
    wrong = Case(right.row, lambda lhs, rhs: right.peer(lhs, rhs).at[-1].set(0), right.peer)
    ours, peer = wrong.errors(wrong.operands())
    assert ours > 0.05
    assert "wrong" in record._wrong(right.row, ours, peer)
    assert "wrong" in record._wrong(right.row, math.nan, peer)
    assert record._wrong(right.row, peer, peer) is None


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
    chained = measure.measure_on_cpu(case, operands, seconds=0)
    assert chained.products_per_call > 1
    assert "chains" in chained.method
    monkeypatch.setattr(measure, "_LONG_CALL", 1e-12)
    assert measure.measure_on_cpu(case, operands, seconds=0).products_per_call == 1
    # This result cannot be the next left operand.
    monkeypatch.undo()
    wide = Case.of(row(n=16))
    assert measure.measure_on_cpu(wide, wide.operands(), seconds=0).products_per_call == 1


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

    sides = {"ours": 1, "peer": 2}
    stats = {"kernel_details": 1, "memset_details": 2, "memalloc_details": 3}
    names = (device_time._OURS, device_time._PEER)
    host = "\n".join(event(sides[side], start, end) for side, start, end in blocks)
    device = "\n".join(event(1, start, end, stats[stat]) for start, end, stat in activities)
    stat_names = "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for name, i in stats.items()
    )
    text = f"""
      planes {{ name: "/host:CPU" lines {{ name: "python" {host} }}
        event_metadata {{ key: 1 value {{ id: 1 name: "{names[0]}" }} }}
        event_metadata {{ key: 2 value {{ id: 2 name: "{names[1]}" }} }} }}
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


def test_device_time_is_busy_time_per_call():
    found = device_time.blocks(profile(BLOCKS, KERNELS))
    assert [block.side for block in found] == [
        device_time._OURS, device_time._PEER, device_time._PEER, device_time._OURS,
    ]  # fmt: skip
    pairs = device_time.paired(found, calls=2)
    np.testing.assert_allclose(pairs.ours, (100e-6, 200e-6))
    np.testing.assert_allclose(pairs.peer, (450e-6, 600e-6))


def test_allocations_are_not_device_time():
    extra = [*KERNELS, (2000, 4000, "memalloc_details")]
    found = device_time.blocks(profile(BLOCKS, extra))
    np.testing.assert_allclose(device_time.paired(found, calls=2).ours, (100e-6, 200e-6))


def test_clocks_may_be_a_little_apart():
    shifted = [(start - 700, end - 700, stat) for start, end, stat in KERNELS[2:]]
    found = device_time.blocks(profile(BLOCKS, KERNELS[:2] + shifted))
    np.testing.assert_allclose(device_time.paired(found, calls=2).peer, (450e-6, 600e-6))


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
        device_time.paired(device_time.blocks(profile(BLOCKS, activities)), calls=2)


def test_the_profiler_records_the_blocks():
    """The annotations are found in a real profile; without a GPU nothing else is."""
    if jax.default_backend() == "gpu":
        pytest.skip("needs a profile without device activity")
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(8)
    with pytest.raises(device_time.Unattributed, match=r"blocks of 3 calls .*\[0\]"):
        device_time.device_times(lambda: double(x), lambda: double(x), calls=3, pairs=2)


def test_a_profiler_that_fails_costs_no_row(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("CUPTI is not available")

    monkeypatch.setattr(measure, "device_times", broken)
    case = Case.of(row())
    result = measure.measure_on_gpu(case, case.operands(), seconds=0.01, l2_bytes=1 << 10)
    assert "CUPTI is not available" in result.method
    assert result.pairs == result.wall


def test_the_gpu_path_falls_back_to_wall_time():
    """On a CPU the profile shows no GPU, which is the least clear that a profile can be."""
    if jax.default_backend() == "gpu":
        pytest.skip("needs a profile without device activity")
    case = Case.of(row())
    result = measure.measure_on_gpu(case, case.operands(), seconds=0.01, l2_bytes=1 << 10)
    assert result.method.startswith("wall time of a call in a row of")
    assert "rotated among 8 copies" in result.method
    assert result.pairs == result.wall


# The command.


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(suite, "load_suite", lambda name: suite.parse_suite(name, TINY))
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 1e10)


def test_a_run_writes_a_record_a_plot_and_tables(tiny, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "device" / "b.json", tmp_path / "b.png"
    arguments = ["bench", "matmul", "--suite", "tiny", "--seconds", "0", "--json", str(file)]
    assert main([*arguments, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "Geometric means" in out

    result = json.loads(file.read_text())
    assert result["schema"] == record.SCHEMA
    assert result["suite"] == "tiny"
    assert result["command"].startswith("python -m jax_tilekern bench matmul --suite tiny")
    assert result["errors"] == {}
    assert {"versions", "cpu", "driver", "nvrtc", "nvidia_smi", "source_digests"} <= set(result)
    assert [r["name"] for r in result["rows"]] == ["f32", "f64", "int8 AtBt", "batched", "vector"]
    for r in result["rows"]:
        assert r["failure"] is None
        assert r["seconds"]["ours"]["p10"] <= r["seconds"]["ours"]["median"]
        assert r["pairs"] >= 5
    assert result["rows"][1]["error"]["ours"] < 1e-14  # float64 was not made float32
    assert result["rows"][2]["error"]["ours"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")

    assert main(["bench", "table", str(file)]) == 0
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
    arguments = ["bench", "matmul", "--rows", "f*", "--seconds", "0", "--json", str(file)]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "MemoryError: no room" in out
    assert "FAILED: f64." in out
    good, bad = json.loads(file.read_text())["rows"]
    assert good["failure"] is None
    assert bad["failure"] == "MemoryError: no room"
    assert main(["bench", "table", str(file)]) == 0
    assert "MemoryError: no room" in capsys.readouterr().out


def test_geometric_means():
    rows = [
        {"type": kind, "seconds": {"ratio": {"median": ratio}}}
        for kind, ratio in (("f32", 2.0), ("f32", 8.0), ("f64", 0.5))
    ]
    means = record.geometric_means([*rows, {"type": "f32", "failure": "it broke"}])
    assert means == pytest.approx({"all": 2.0, "f32": 4.0, "f64": 0.5})


def test_listing_and_bad_arguments(tmp_path, capsys):
    assert main(["bench", "matmul", "--list"]) == 0
    out = capsys.readouterr().out
    assert "matmul-cpu" in out
    assert "bf16 4095x4097x4093" in out
    assert main(["bench", "matmul", "--suite", "none"]) == 2
    assert "no suite 'none'" in capsys.readouterr().err
    (tmp_path / "other.json").write_text('{"schema": 99, "rows": []}')
    assert main(["bench", "table", str(tmp_path / "other.json")]) == 2
    assert "schema 99" in capsys.readouterr().err
    assert main(["bench", "table", str(tmp_path / "missing.json")]) == 2
