"""What ``python -m benchmarks`` measures of rows: calls, errors, times, records and reports."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax
from jax.profiler import ProfileData
from numerics import on_gpu

from benchmarks import operations, record, row_programs, suites, timing
from benchmarks.command_line import main
from benchmarks.errors import BenchmarkError
from benchmarks.row_programs import program_of
from benchmarks.rows import OPERATIONS, OURS, XLA, Row, jitted
from benchmarks.samples import DRAWS, LIMITS, draw_sample
from jax_tilekern.tuning import device_time
from jax_tilekern.tuning.device_time import DELAY, CallBlock

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

# Rows.


@pytest.mark.parametrize(
    ("operation", "name"), [(x, name) for x in OPERATIONS for name in suites.suite_names(x)]
)
@pytest.mark.thorough
def test_the_suites_are_well_formed(operation, name):
    rows = suites.load_suite(operation, name).rows
    assert len({row.name for row in rows}) == len(rows) >= 8
    for row in rows:
        assert Row.of(row.text, operation).call == row.call
        program = program_of(row)
        assert program.peer in program.sides
        with row.types_enabled():
            for side in ("ours",) if row.split else ("ours", "XLA"):
                results = jax.tree.leaves(jax.eval_shape(program.sides[side], *row.structs))
                assert [x.shape for x in results] == list(map(row.shape, row.results)), row
                assert {x.dtype for x in results} == {row.result_type}, row


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("operation", list(DRAWS))
def test_drawn_rows_are_quick(operation, device):
    most_bytes, operations = LIMITS[device]
    rows = draw_sample(operation, device, 200, 5).rows
    assert all(row.lhs != row.out for row in rows if row.operation == "transpose")
    assert len({row.name for row in rows}) == 200
    assert all(row.bytes <= most_bytes and row.flops <= operations for row in rows)
    assert all(row.name.partition(": ")[2] == row.text for row in rows)


def test_what_is_no_call_is_refused():
    for text in ("float32", "float32 mk,kn->mn m8 n8", "float32 mk,kn->mnz m8 n8 k8"):
        with pytest.raises(BenchmarkError, match="float32"):
            Row.of(text, "matmul")


@pytest.mark.parametrize(
    ("operation", "dimensions"),
    [
        ("transpose", "abmn->nbam"), ("sum", "amb->ab"), ("vdot", "k,k->"),
        ("vdot", "abk,kba->ba"), ("matvec", "mk,k->m"), ("matvec", "km,k->m"),
        ("matvec", "k,kn->n"), ("matvec", "kmb,k->mb"), ("matvec", "bk,bkn->bn"),
        ("add", "n,mn->mn"), ("add", "m,n->mn"), ("add", "mn->mn"), ("matmul", "bmk,kbn->bmn"),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_rows_call_what_their_dimensions_say(operation, dimensions):
    sizes = {"a": 2, "b": 3, "k": 4, "m": 5, "n": 6}
    used = " ".join(f"{x}{sizes[x]}" for x in sizes if x in dimensions)
    row = Row.of(f"int16 {dimensions} {used}", operation)
    rng = np.random.default_rng(0)
    operands = [rng.integers(-9, 9, row.shape(x), np.int16) for x in row.operands]
    if operation == "add":
        ones = np.ones(row.shape(row.out), np.int16)
        expected = sum(
            np.einsum(f"{x},{row.out}->{row.out}", y, ones)
            for x, y in zip(row.operands, operands, strict=True)
        )
    else:
        expected = np.einsum(f"{','.join(row.operands)}->{row.out}", *operands)
    for side in program_of(row).sides.values():
        np.testing.assert_array_equal(side(*operands), expected)


@pytest.mark.parametrize("dimensions", ["mk,gkn->mn", "mn,gkn->mk", "mk,mn->gkn"])
@pytest.mark.thorough
def test_all_sides_compute_the_product_of_each_group(dimensions):
    # TF32 on a GPU; a sum of n products of normal numbers has the size of the root of n.
    bound = (1e-2 if on_gpu() else 1e-5) * np.sqrt(300)
    for split in ("balanced", "multinomial", "zipf", "one-hot"):
        row = Row.of(f"float32 {dimensions} g5 m300 k24 n40 {split}", "ragged_dot")
        operands = row.random_operands()
        lhs, rhs, sizes = (np.asarray(x, np.float64) for x in operands)
        ends = np.cumsum(sizes.astype(int))
        parts = [slice(int(end - size), end) for end, size in zip(ends, sizes, strict=True)]
        if row.out == "gkn":
            exact = np.stack([lhs[part].T @ rhs[part] for part in parts])
        else:
            rhs = rhs.mT if row.out == "mk" else rhs
            exact = np.concatenate([lhs[part] @ rhs[g] for g, part in enumerate(parts)])
        for side in (OURS, lax):
            found = jitted(row, side)(*operands)
            np.testing.assert_allclose(found, exact, rtol=0, atol=bound, err_msg=split)
        errors = row_programs.errors(row, operands, found, None)
        assert row_programs.fault(row, *errors) is None
        # A row, or a matrix, of the largest group.
        wrong = row.group_sizes.argmax()
        wrong = wrong if row.out == "gkn" else row.group_sizes[: wrong + 1].sum() - 1
        errors = row_programs.errors(row, operands, found.at[wrong, 3].add(100), None)
        assert row_programs.fault(row, *errors).startswith("wrong")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8 to int32"])
@pytest.mark.one_in(3)
def test_one_wrong_element_outside_of_the_sample_is_found(kind):
    row = Row.of(f"{kind} mk,kn->mn m200 n8 k8", "matmul")
    unseen = sorted(set(range(200)) - set(row_programs.sampled_indices(200)))[0]
    operands = row.random_operands()
    peer = jitted(row, XLA)(*operands)
    ours, theirs, deviation = row_programs.errors(row, operands, peer.at[unseen, 3].add(3), peer)
    assert ours == theirs
    assert "an element" in row_programs.fault(row, ours, theirs, deviation)


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
    times = timing.block_times(
        [CallBlock(*x) for x in zip(ORDER, (1, 2, 3, 4), found, strict=True)], CALLS
    )
    np.testing.assert_allclose(times.device["ours"], (100e-6, 200e-6))
    np.testing.assert_allclose(times.device["peer"], (450e-6, 600e-6))
    assert times.host == {"ours": (0.5, 2), "peer": (1, 1.5)}
    fields = times.fields()
    assert fields["ratio"]["peer"] == pytest.approx((4.5 + 3) / 2)
    assert fields["seconds"]["ours"] == pytest.approx(150e-6)


def test_no_side_finds_the_arguments_of_another_in_the_cache():
    called = []
    runs = timing.rotating(
        {"ours": lambda x: called.append(x), "peer": lambda x: called.append(-x)},
        {"ours": [(x,) for x in range(1, 6)], "peer": [(x,) for x in range(1, 6)]},
    )
    for name in ("ours", "peer", "peer", "ours"):
        for _ in range(3):
            runs[name]()
    # As many calls lie between two of the same arguments as there are sets.
    assert called == [1, 2, 3, -4, -5, -1, -2, -3, -4, 5, 1, 2]


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

TINY = {
    "small": {"mean": 0.001, "target": {"XLA": 0.0},
              "calls": ["{float32|float64} mk,kn->mn m8 n8 k8"]},
    "impossible": {"target": {"XLA": 1e9},
                   "calls": ["int8 to int32 km,nk->mn m5 n6 k7",
                             "bfloat16 bmk,kbn->bmn b3 m5 n6 k7",
                             "float16 highest mk,k->m m9 k4"]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Leave out what takes long and says nothing of rows."""
    monkeypatch.setattr(row_programs, "_LONGEST_CHAIN", 1)
    bandwidths = {"read_bytes_per_second": 1e10, "copy_bytes_per_second": 2e10}
    monkeypatch.setattr(operations, "bandwidths", lambda: bandwidths)


@pytest.mark.thorough
def test_a_run_writes_a_record_and_a_report(monkeypatch, tmp_path, capsys):
    tiny = suites.suite_of("tiny", "matmul", TINY)
    monkeypatch.setattr(operations, "load_suite", lambda operation, name: tiny)
    file = tmp_path / "b.jsonl"
    assert main(["matmul", "--seconds", "0", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "3 of 5 rows below their target" in out
    assert "XLA / ours, 5 calls" in out
    assert "- small, 2 calls" in out
    assert out.count("(below 1e+09)") == 6  # while it runs, and in the table

    found = record.read(file)
    assert found["suite"] == "tiny"
    assert found["command"].startswith("python -m benchmarks matmul")
    assert {"versions", "cpu", "source_digests", "date", "device"} <= set(found)
    assert [row["name"] for row in found["rows"]] == [row.text for row in tiny.rows]
    for row in found["rows"]:
        assert "failure" not in row
        assert row["spread"]["XLA"][0] <= row["ratio"]["XLA"] <= row["spread"]["XLA"][1]
    assert found["rows"][1]["error"]["ours"] < 1e-14  # float64 was not made float32
    assert found["rows"][2]["error"]["ours"] == 0

    assert main(["report", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| float32 mk,kn->mn m8 n8 k8 | ")
    assert len({line.count("|") for line in lines[:7]}) == 1
    assert found["device"] in lines[-1]


@pytest.mark.skipif(on_gpu(), reason="measures on a CPU")
@pytest.mark.thorough
def test_a_sample_is_measured_and_continued(tmp_path, capsys):
    path = tmp_path / "sample.jsonl"
    arguments = ["add", "--seed", "2", "--seconds", "0.01", "--json", str(path)]
    assert main([*arguments, "--sample", "3", "--part", "0/2"]) == 0
    assert main([*arguments, "--sample", "5", "--resume"]) == 0
    found = record.read(path)
    assert found["sample"] == {"seed": 2, "purpose": "fit"}
    assert [row["name"].partition(":")[0] for row in found["rows"]] == [*"01234"]
    # The first run's rows stayed.
    assert [row.get("run") for row in found["rows"]].count(found["runs"][0]["date"]) == 2
    assert all("failure" not in row and row["seconds"] for row in found["rows"])
    assert "XLA / ours, 5 calls" in capsys.readouterr().out


def test_a_record_is_read_as_it_was_written(tmp_path):
    rows = [{"name": x, "group": "g", "seconds": {"ours": 1.23456789}} for x in "ab"]
    record.write(tmp_path / "r.jsonl", {"date": "today", "rows": rows})
    rounded = [{**row, "seconds": {"ours": 1.23457}} for row in rows]
    assert record.read(tmp_path / "r.jsonl") == {"date": "today", "rows": rounded}
    with pytest.raises(BenchmarkError, match="not a record"):
        record.read(Path(__file__))


@pytest.mark.parametrize(
    "file", sorted(x for x in RESULTS.rglob("*.jsonl") if "ladder" not in x.parts), ids=str
)
def test_the_committed_records_are_reports(file, capsys):
    found = record.read(file)
    assert found["rows"]
    if "suite" in found:
        assert main(["report", str(file)]) == 0
        assert "calls: geometric mean" in capsys.readouterr().out


def test_errors_beyond_the_rounding_are_faults():
    row = Row.of("float32 mk,kn->mn m8 n8 k8", "matmul")
    for ours in (1.0, float("nan")):
        assert row_programs.fault(row, ours, 1e-8, 0.0).startswith("wrong: relative error")
    assert row_programs.fault(row, 1e-8, 1e-8, 1e-7) is None
