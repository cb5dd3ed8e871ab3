"""The ladders: what every rung compiles to, what is run, and what is shown of it."""

import dataclasses
import importlib
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import compile_source
from numerics import on_gpu

import jax_tilekern as jtk
from benchmarks import ladder as command
from benchmarks.command_line import main
from benchmarks.ladder import climb, ladder_run, report
from benchmarks.ladder.rung import SOURCES, Ladder, Problem, Rung
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
@pytest.mark.parametrize("name", NAMES)
def test_a_ladder_is_timed(name, tmp_path, capsys):
    file = tmp_path / "l.json"
    size = SIZES[name][2]
    given = ["ladder", name, "--size", size, "--seconds", "0.05", "--json", file]
    assert main([*map(str, given)]) == 0
    out = capsys.readouterr().out
    assert "of ceiling" in out
    assert ("the host's time" in out) == (name == "dot")
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


# The report.


def shown(record):
    """The table of the only problem: headings, and entries by rung."""
    from rich.console import Console

    text = io.StringIO()
    Console(width=200, file=text).print(report.table(record, record["problems"][0]))
    rows = [re.split("[┃│]", line) for line in text.getvalue().splitlines()]
    entries = [[entry.strip() for entry in row[1:-1]] for row in rows if len(row) > 1]
    return entries[0][1:], {row[0]: row[1:] for row in entries[1:]}
