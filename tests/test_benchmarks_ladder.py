"""The ladders: what every rung compiles to, what is run, and what is shown of it."""

import dataclasses
import importlib
import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import compile_source
from numerics import on_gpu

import jax_tilekern as jtk
from benchmarks import ladder as command
from benchmarks.command_line import main
from benchmarks.ladder import climb, counted_launches, counters, ladder_run, ncu, report
from benchmarks.ladder.ncu import NoCounters
from benchmarks.ladder.rung import SOURCES, Ladder, LadderError, Problem, Rung
from jax_tilekern.compilation.cubin import _section
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc
from jax_tilekern.plans.gpu import known_gpu

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

try:
    nvrtc()
except NvrtcNotFound as error:
    pytest.skip(str(error), allow_module_level=True)

NAMES = list(command._LADDERS)
needs_gpu = pytest.mark.skipif(not on_gpu(), reason="runs kernels, and JAX has no GPU here")
no_gpu = pytest.mark.skipif(on_gpu(), reason="shows what is done without a GPU")


def ladder(name):
    return importlib.import_module(f"benchmarks.ladder.{name}").LADDER


def problems(name):
    """The problems of the default sizes of a ladder."""
    found = ladder(name)
    return [problem for size in found.defaults for problem in found.parse(size)]


# Rungs.


def _cases():
    for name in NAMES:
        rungs = {(p.title.split()[-1], r.name): (p, r) for p in problems(name) for r in p.rungs}
        for (dtype, label), (problem, rung) in rungs.items():
            for arch in ("sm_80", "sm_90a"):
                takes = known_gpu(arch).compute_capability >= rung.compute_capability
                if rung.source and takes:
                    yield pytest.param(problem, rung, arch, id=f"{name}-{dtype}-{label}-{arch}")


@pytest.mark.parametrize(("problem", "rung", "arch"), list(_cases()))
@pytest.mark.one_in(5)
def test_every_rung_compiles_without_spills_and_without_a_word(problem, rung, arch):
    with jtk.gpu_target(arch), problem.types_enabled():
        reports = list(rung.reports(problem.operands))
    assert reports
    for found in reports:
        call = found.call
        compiled = compile_source(
            call.source.text, (call.name,), arch=arch, file=call.source.file,
            options=call.options, headers=call.source.headers,
        )  # fmt: skip
        assert compiled.log == ""
        assert found.spill_bytes == 0
        assert found.arch == arch
        assert found.occupancy.blocks >= 1


def machine_code(problem, name, arch):
    """The instructions of a rung's only kernel, without what else its cubin holds."""
    (rung,) = (rung for rung in problem.rungs if rung.name == name)
    with jtk.gpu_target(arch):
        (found,) = rung.reports(problem.operands)
    entry = found.plan.launch.entry
    return _section(entry.cubin, f".text.{entry.symbol}")


# sm_120 is the GPU of the study that tells the forms apart by their times.
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120"])
def test_two_of_the_three_float4_forms_are_the_same_machine_code(arch):
    (problem,) = ladder("transpose").parse("2048x512")
    straight, row_by_row, rows_first = (
        machine_code(problem, f"float4{form}, 8x8", arch)
        for form in (" straight", "", " rows first")
    )
    assert row_by_row == rows_first
    assert straight != row_by_row
    assert len(row_by_row) >= 16 * 16  # At least as many instructions as elements.


@pytest.mark.parametrize("name", ["tile", "padded", "swizzled", "float4, 8x8"])
def test_loops_over_a_thread_s_elements_are_unrolled(name):
    (problem,) = ladder("transpose").parse("64x64")
    (rung,) = (rung for rung in problem.rungs if rung.name == name)
    with jtk.gpu_target("sm_90a"):
        (found,) = rung.reports(problem.operands)
    # A loop would have one load, or more than four with its remainder.
    assert [found.ptx().count(f"{what}.global") for what in ("ld", "st")] == [4, 4]


def test_sums_in_memory_are_read_and_written_for_every_k_tile():
    problem = ladder("matmul").parse("64x64x64")[0]
    (rung,) = (rung for rung in problem.rungs if rung.name == "sums in global memory")
    with jtk.gpu_target("sm_90a"):
        (found,) = rung.reports(problem.operands)
    # Inside the loop, which the compiler does not unroll around its barriers.
    loop = found.ptx().split("bar.sync")[-2]
    assert "ld.global" in loop
    assert "st.global" in loop


@needs_gpu
def test_sums_in_memory_add_to_what_was_there():
    problem = ladder("matmul").parse("70x45x33")[0]
    (rung,) = (rung for rung in problem.rungs if rung.name == "sums in global memory")
    a, b = climb._whole_numbers(problem.operands)
    _, product = rung.stages
    left_over = jnp.full((70, 45), 7, jnp.float32)
    np.testing.assert_array_equal(product(a, b, left_over), jnp.matmul(a, b) + 7)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_numbered_rungs_that_say_what_to_expect(name):
    files = sorted((SOURCES / name).iterdir())
    assert [file.name[:3] for file in files] == [f"{i:02}_" for i in range(1, len(files) + 1)]
    sources = [rung.source for problem in problems(name) for rung in problem.rungs if rung.source]
    assert {f"{name}/{file.name}" for file in files} == set(sources)
    for file in files:
        comment = re.match(r"(//[^\n]*\n)+", file.read_text())
        assert comment
        assert "\n// Expect: " in comment[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_last_rung_is_the_library_and_jnp_is_the_measure(name):
    for problem in problems(name):
        assert problem.rungs[-1].name.startswith("jax_tilekern.")
        assert all(peer.name.startswith("jnp.") for peer in problem.peers)
        lines = [rung.name for rung in (*problem.rungs, *problem.peers)]
        assert len(set(lines)) == len(lines)
        with problem.types_enabled():
            results = {
                (out.shape, out.dtype)
                for rung in (problem.rungs[-1], *problem.peers)
                for out in [jax.eval_shape(rung, *problem.operands)]
            }
        assert len(results) == 1


# Sizes with tiles that are cut off, for vectors of four or not.
SIZES = {
    "transpose": ("1x1", "70x45", "68x132", "130x8"),
    "dot": ("1", "1027", "300001"),
    # The last has more tiles than a GPU has SMs, and an odd number of k-tiles, so that
    # persistent blocks go from tile to tile with the ring at any stage.
    "matmul": ("1x1x1", "33x65x17", "136x72x40", "2200x2600x136"),
    "matvec": ("1x1", "70x45", "33x260"),
    "add": ("1", "1027", "33x45", "20x132"),
}


@needs_gpu
@pytest.mark.parametrize(("name", "size"), [(n, size) for n in NAMES for size in SIZES[n]])
def test_every_rung_is_right(name, size, tmp_path):
    file = tmp_path / "l.json"
    assert main(["ladder", name, "--check", "--size", size, "--json", str(file)]) == 0
    rungs = [r for problem in json.loads(file.read_text())["problems"] for r in problem["rungs"]]
    assert all(rung["failure"] is None for rung in rungs)
    assert not any("seconds" in rung for rung in rungs)
    assert any(rung["source"] and not rung["skipped"] for rung in rungs)


@needs_gpu
def test_rungs_are_launched_after_markers_outside_of_ncu_too():
    wanted = [
        counters.Wanted("1027", problem.title, rung.name, None)
        for problem in ladder("add").parse("1027")
        for rung in (*problem.rungs, *problem.peers)
    ]
    marked = []

    def mark(index):
        marked.append(int(counted_launches._marker(index=index)))

    counted_launches.launch(ladder("add"), wanted, until=float("inf"), mark=mark)
    # A marker's result is its grid.
    assert marked == list(range(1, len(wanted) + 1))


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_ladder_is_timed(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "l.json", tmp_path / "l.png"
    size = SIZES[name][2]
    given = ["ladder", name, "--size", size, "--seconds", "0.05", "--json", file, "--plot", plot]
    assert main([*map(str, given)]) == 0
    out = capsys.readouterr().out
    assert "of ceiling" in out
    assert ("the host's time" in out) == (name == "dot")
    assert plot.read_bytes().startswith(b"\x89PNG")
    for problem in json.loads(file.read_text())["problems"]:
        assert all(rung["seconds"] > 0 for rung in problem["rungs"] if not rung["skipped"])


# The command without a GPU.


# test_every_rung_compiles_without_spills_and_without_a_word compiles representatives.
@pytest.mark.thorough
@no_gpu
@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_rungs_are_compiled_and_shown(name, tmp_path, capsys):
    file = tmp_path / "l.json"
    assert main(["ladder", name, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "JAX has no GPU here: the rungs are compiled for sm_90a" in out
    record = json.loads(file.read_text())
    assert record["ladder"] == name
    assert {"versions", "nvrtc", "driver", "source_digests"} <= set(record)
    assert [p["title"] for p in record["problems"]] == [p.title for p in problems(name)]
    for rung in (rung for problem in record["problems"] for rung in problem["rungs"]):
        assert rung["name"] in out
        assert rung["failure"] is None
        assert not rung["skipped"] or rung["name"] == "serial"
        assert "seconds" not in rung
        assert bool(rung["kernels"]) == bool(rung["source"] and not rung["skipped"])
        assert bool(rung["library"]) == rung["name"].startswith("jax_tilekern.")
        assert all(kernel["registers"] > 0 for kernel in rung["kernels"])


@no_gpu
def test_what_a_rung_cannot_take_is_said(capsys):
    assert main(["ladder", "transpose", "--size", "70x44", "--rungs", "float4*"]) == 0
    out = capsys.readouterr().out
    assert out.count("takes multiples of 4, not rows 70.") == 6
    assert "skipped" in out
    assert "naive" not in out


@no_gpu
def test_a_launch_that_breaks_a_limit_fails_and_the_others_do_not(capsys):
    assert main(["ladder", "transpose", "--size", "1000000x8", "--rungs", "naive 8x8*"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"along reads FAILED: .*grid \(1, 125000, 1\) exceeds", out)
    assert out.count("FAILED: ") == 1


@no_gpu
def test_an_older_gpu_has_no_tma():
    (problem,) = ladder("transpose").parse("64x64")
    tma = next(rung for rung in problem.rungs if rung.name == "TMA")
    with jtk.gpu_target("sm_80"):
        assert "capability 9.0, which NVIDIA A100" in climb.compiled(problem, tma)["skipped"]
    with jtk.gpu_target("sm_90a"):
        assert climb.compiled(problem, tma)["skipped"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transpose", "--size", "64"], "'64' is not ROWSxCOLUMNS"),
        (["transpose", "--size", "64x64x64"], "is not ROWSxCOLUMNS"),
        (["transpose", "--size", "64x-1"], "is not ROWSxCOLUMNS"),
        (["transpose", "--size", "0x64"], "of positive numbers"),
        (["dot", "--size", ""], "is not SIZE"),
        (["dot", "--size", "64", "1e6"], "'1e6' is not SIZE"),
        (["add", "--size", "1x1x1"], "is not SIZE or ROWSxCOLUMNS"),
        (["matmul", "--size", "1x1x2147483648"], "too large"),
        (["dot", "--size", "1099511627776"], "too large"),
        (["dot", "--rungs", "none"], "no rung matches 'none'; there are serial sum of a block"),
        (["dot", "--seconds", "0"], "--seconds is positive, not 0"),
        (["dot", "--seconds", "nan"], "--seconds is positive"),
        (["dot", "--resume"], "--resume goes on with the record of --json FILE"),
    ],
)
def test_arguments_are_checked(arguments, message, capsys):
    assert main(["ladder", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_there_is_no_such_ladder(capsys):
    with pytest.raises(SystemExit):
        main(["ladder", "sort"])
    assert "sort" in capsys.readouterr().err


def test_rungs_are_picked_by_name_before_they_are_matched():
    def picked(pattern):
        found = ladder("add").parse("4096"), ladder("add").parse("64x64")
        found = ladder_run._picked([("s", problem) for (problem,) in found], pattern)
        return [[rung.name for rung in problem.rungs] for _, problem in found]

    # The problem of vectors has no rung called matrix, and goes.
    assert picked("matrix") == [["matrix"]]
    assert picked("vector, float4") == [["vector, float4"]]
    assert picked("*float4") == [
        ["vector, float4"],
        ["matrix, float4", "matrix as a vector, float4"],
    ]
    with pytest.raises(LadderError, match="no rung matches"):
        picked("float8")


def test_a_missing_matplotlib_or_ncu_is_said_before_anything_is_run(capsys, monkeypatch):
    monkeypatch.setattr(command, "run_ladder", lambda *_: pytest.fail("was run"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["ladder", "dot", "--plot", "x.png"]) == 2
    assert "pip install" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(ncu, "_TOOLKIT", "")
    assert main(["ladder", "dot", "--counters"]) == 2
    assert "no ncu on the PATH" in capsys.readouterr().err


# Checking and timing. JAX functions climb as kernels do, and on any backend.


def problem_of(*rungs, dtype=np.float32, sums=False, bound="copy", **rest):
    operand = jax.ShapeDtypeStruct((64, 32), np.dtype(dtype))
    return Problem(
        "doubling", {"rows": 64, "columns": 32}, (operand,),
        tuple(dataclasses.replace(rung, source="x/01_y.cu") for rung in rungs),
        (Rung("jnp", (lambda x: 2 * x,)),), bytes=2**14, bound=bound, sums=sums, **rest,
    )  # fmt: skip


def climbed(problem, seconds=None):
    rungs = {rung.name: rung for rung in (*problem.rungs, *problem.peers)}
    with jtk.gpu_target("sm_90a"), problem.types_enabled():
        records = {name: climb.compiled(problem, rung) for name, rung in rungs.items()}
        climb.climb(problem, rungs, records, seconds=seconds)
    return records


def _broken(x):
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


def test_a_wrong_rung_is_found_and_not_timed():
    records = climbed(
        problem_of(
            Rung("right", (lambda x: (x, x), lambda x, y: x + y)),
            Rung("one off", (lambda x: (2 * x).at[63, 31].add(1),)),
            Rung("not a number", (lambda x: (2 * x).at[1, 1].set(jnp.nan),)),
            Rung("flat", (lambda x: 2 * x.ravel(),)),
            Rung("of another type", (lambda x: (2 * x).astype(jnp.bfloat16),)),
            Rung("broken", (lambda x: jax.pure_callback(_broken, x, x),)),
            Rung("not for this", (lambda x: x,), cannot=lambda rows, columns: f"not {rows}"),
        ),
        seconds=0.01,
    )
    assert records["right"]["failure"] is None
    assert records["right"]["seconds"] > 0
    assert records["one off"]["failure"] == "wrong: 1 of 2048 elements are not jnp's"
    assert records["not a number"]["failure"] == "wrong: 1 of 2048 elements are not jnp's"
    assert "(2048,), not float32(64, 32)" in records["flat"]["failure"]
    assert "bfloat16" in records["of another type"]["failure"]
    assert "ILLEGAL_ADDRESS" in records["broken"]["failure"]
    assert records["not for this"]["skipped"] == "not 64"
    timed = {name for name, record in records.items() if "seconds" in record}
    assert timed == {"right", "jnp"}


def test_what_is_left_for_the_host_is_timed_with_it():
    times = []

    def on_host(x):
        times.append(None)
        return np.asarray(x) * 2

    host = Rung("host", (lambda x: x,), on_host=on_host)
    record = climbed(problem_of(host), seconds=0.01)["host"]
    assert record["failure"] is None
    assert "host" in record["method"]
    assert record["on_host"]
    assert len(times) == 1 + climb._HOST_RUNS


def test_memory_that_does_not_suffice_fails_the_rungs(monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(climb, "beyond_cache", full)
    records = climbed(problem_of(Rung("right", (lambda x: 2 * x,))), seconds=0.01)
    assert all(record["failure"] == "RESOURCE_EXHAUSTED" for record in records.values())


@pytest.mark.parametrize("name", ["dot", "matmul", "matvec"])
@pytest.mark.one_in(3)
def test_sums_are_checked_on_whole_numbers_whose_sums_are_exact(name):
    size = {"dot": "100000", "matmul": "3x4x1000", "matvec": "40x1000"}[name]
    for problem in ladder(name).parse(size):
        with problem.types_enabled():
            numbers = climb._whole_numbers(problem.operands)
            assert [(x.shape, x.dtype) for x in numbers] == [
                (operand.shape, operand.dtype) for operand in problem.operands
            ]
            lhs, rhs = (np.asarray(x, np.float64) for x in numbers)
            assert set(np.unique(lhs)) | set(np.unique(rhs)) == set(range(-4, 5))
            assert not np.array_equal(lhs.ravel()[:1000], rhs.ravel()[:1000])
            exact = lhs @ rhs
            for compute in (problem.truth or problem.peers[0], *problem.peers):
                result = compute(*numbers)
                np.testing.assert_array_equal(result, exact.astype(result.dtype))


@pytest.fixture
def doubling(monkeypatch):
    """A ladder of JAX functions in the place of add's, on what is taken for a GPU."""
    host = Rung("from the host", (lambda x: x + x,), on_host=np.asarray)
    problem = problem_of(host, Rung("right", (lambda x: x + x,)), Rung("wrong", (lambda x: x,)))
    found = Ladder((("size",),), ("64",), lambda sizes: (problem,))
    monkeypatch.setattr(importlib.import_module("benchmarks.ladder.add"), "LADDER", found)
    bandwidths = {"read_bytes_per_second": 1e12, "copy_bytes_per_second": 1e12}
    monkeypatch.setattr(ladder_run, "bandwidths", lambda: bandwidths)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jtk.gpu_target("sm_90a"):
        yield


def test_a_climbed_ladder_is_recorded_drawn_and_shown(doubling, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "l.json", tmp_path / "l.png"
    given = ["ladder", "add", "--seconds", "0.01", "--json", file, "--plot", plot]
    assert main([*map(str, given)]) == 1
    out = capsys.readouterr().out
    assert "of ceiling" in out
    assert "doubling: wrong FAILED: wrong: 2048 of 2048 elements are not jnp's" in out
    assert "the host's time from call to result" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    (problem,) = json.loads(file.read_text())["problems"]
    timed = {rung["name"] for rung in problem["rungs"] if "seconds" in rung}
    assert timed == {"from the host", "right", "jnp"}
    assert main(["ladder", "add", "--rungs", "right", "--check"]) == 0
    out = capsys.readouterr().out
    assert "of ceiling" not in out
    assert "Ceiling" not in out


def test_a_run_is_resumed_where_it_was_cut(doubling, tmp_path, monkeypatch):
    file = tmp_path / "l.json"
    given = ["ladder", "add", "--seconds", "0.01", "--json", str(file), "--size"]
    assert main([*given, "64"]) == 1
    first = json.loads(file.read_text())
    # The same rungs at another size are measured; those of the file are not.
    climbed = []
    climb_one = ladder_run._climbed

    def climb_and_note(problem, *rest, **more):
        climbed.append(problem.title)
        return climb_one(problem, *rest, **more)

    monkeypatch.setattr(ladder_run, "_climbed", climb_and_note)
    assert main([*given, "64", "65", "--resume"]) == 1
    second = json.loads(file.read_text())
    assert climbed == ["doubling"]
    assert [p["size"] for p in second["problems"]] == ["64", "65"]
    assert second["problems"][0] == first["problems"][0]
    # Rungs that have changed since are measured again.
    file.write_text(json.dumps(second | {"rungs_digest": "another"}))
    assert main([*given, "64", "65", "--resume"]) == 1
    assert climbed == ["doubling"] * 3


def test_counters_that_may_not_be_read_cost_no_times(doubling, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.ladder.ncu.require_ncu", lambda: "ncu")

    def refused(*_):
        raise NoCounters("ERR_NVGPUCTRPERM")

    monkeypatch.setattr(ladder_run, "_put_counters", refused)
    arguments = ["ladder", "add", "--rungs", "right", "--seconds", "0.01", "--counters"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "of ceiling" in out
    assert "ERR_NVGPUCTRPERM" in out


def test_counters_come_with_the_times_and_are_shown(doubling, tmp_path, capsys, monkeypatch):
    def profile(program, metrics, log, *, environment, seconds):
        order = json.loads(Path(program[-1]).read_text())
        assert [name for _, _, name, _ in order["wanted"]] == ["from the host", "right", "jnp"]
        assert order["seconds"] == 45
        kernel = {"gpu__time_duration.sum": 1500.0, "launch__registers_per_thread": 40.0}
        return [
            launch
            for index in range(len(order["wanted"]))
            for launch in (
                ncu.Launch(counters.MARKER, (index + 1,), (1,), {}),
                ncu.Launch("doubling_kernel", (8, 1, 1), (32, 1, 1), kernel),
            )
        ]

    monkeypatch.setattr(ncu, "require_ncu", lambda: "ncu")
    monkeypatch.setattr(ncu, "profile", profile)
    file = tmp_path / "l.json"
    given = ["ladder", "add", "--seconds", "0.01", "--counters", "45", "--json", str(file)]
    assert main(given) == 1
    assert "stalled" in capsys.readouterr().out
    (problem,) = json.loads(file.read_text())["problems"]
    counted = {rung["name"]: rung.get("counters") for rung in problem["rungs"]}
    assert counted.pop("wrong") is None
    for found in counted.values():
        (kernel,) = found["kernels"]
        assert kernel["name"] == "doubling_kernel"
        assert (kernel["nanoseconds"], kernel["registers"]) == (1500, 40)
    # A second run has nothing left to count.
    monkeypatch.setattr(counters, "count", lambda *_: pytest.fail("counted again"))
    assert main([*given, "--resume"]) == 1


# The report.


def a_rung(name, seconds, **changes):
    return {
        "name": name, "source": "x/01_y.cu", "peer": False, "on_host": False,
        "arithmetic": "float32", "kernels": [], "library": None, "skipped": None, "failure": None,
        "seconds": seconds, "method": "device time",
    } | changes  # fmt: skip


def a_record(*rungs, bound="read", **changes):
    problem = {"title": "it", "bytes": 1e9, "flops": 1e12, "bound": bound, "rungs": list(rungs)}
    return {
        "device": "GPU", "read_bytes_per_second": 2e12, "copy_bytes_per_second": 1e12,
        "no_counters": None, "problems": [problem],
    } | changes  # fmt: skip


def shown(record):
    """The table of the only problem: headings, and entries by rung."""
    from rich.console import Console

    text = io.StringIO()
    Console(width=200, file=text).print(report.table(record, record["problems"][0]))
    rows = [re.split("[┃│]", line) for line in text.getvalue().splitlines()]
    entries = [[entry.strip() for entry in row[1:-1]] for row in rows if len(row) > 1]
    return entries[0][1:], {row[0]: row[1:] for row in entries[1:]}


def test_speeds_shares_and_factors():
    kernel = {"registers": 32, "spill_bytes": 0, "shared_memory_bytes": 7, "warps_held": 0.5}
    record = a_record(
        a_rung("slow", 4e-3, kernels=[kernel], on_host=True),
        a_rung("odd", None, skipped="takes even sizes"),
        a_rung("fast", 1e-3, kernels=[kernel, kernel | {"registers": 40}]),
        a_rung("ours", 1e-3, library="transpose_boxes"),
        a_rung("jnp", 2e-3, peer=True),
    )
    del record["problems"][0]["rungs"][1]["seconds"]
    headings, lines = shown(record)
    assert headings == [*report._TIMES, *report._RESOURCES]
    assert lines["slow"] == ["4 ms *", "250 GB/s", "12%", "", "32", "0", "7", "50%"]
    assert lines["odd"] == ["skipped", *[""] * 7]
    assert lines["fast"] == [
        "1 ms", "1 TB/s", "50%", "4.00", "32, 40", "0, 0", "7, 7", "50%, 50%",
    ]  # fmt: skip
    assert lines["jnp"] == ["2 ms", "500 GB/s", "25%", *[""] * 5]
    notes = "\n".join(report.notes(record))
    assert "it: odd skipped: takes even sizes." in notes
    assert "it: ours is transpose_boxes." in notes
    assert "Ceiling: 2 TB/s, the memory's bandwidth as measured by a long read." in notes
    assert "* Part of it is done on the host" in notes
    assert "Times are device time." in notes


def test_arithmetic_is_held_against_the_fastest_of_its_kind():
    rungs = a_rung("a", 4.0), a_rung("b", 2.0), a_rung("t", 1.0, arithmetic="TF32")
    record = a_record(*rungs, bound="arithmetic")
    (problem,) = record["problems"]
    shares = [report.speed(problem, r) / report.ceiling(record, problem, r) for r in rungs]
    assert shares == [0.5, 1, 1]
    assert "In TF32: t." in report.notes(record)


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "l.png"
    report.plot(a_record(a_rung("a", 4e-3), a_rung("jnp", 1e-3, peer=True)), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_sizes_of_a_ladder():
    one = Ladder((("n",), ("m", "n")), ("1",), lambda sizes: sizes)
    assert one.parse("12") == (12,)
    assert one.parse("3x4") == (3, 4)
    assert one.size_form == "N or MxN"
