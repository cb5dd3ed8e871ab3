"""The ladders: what every rung compiles to, what is run, and what is shown of it."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import compile_source
from numerics import on_gpu

import jax_tilekern as jtk
from benchmarks import ladder as command
from benchmarks.command_line import main
from benchmarks.ladder import climb
from benchmarks.ladder.rung import Problem, Rung
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
