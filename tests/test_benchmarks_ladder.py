"""The ladders: what every rung compiles to, what is run, and what is shown of it."""

import pytest
from compiled_text import compile_source
from nvrtc_mark import needs_gpu, require_nvrtc

import jax_tilekern as jtk
from benchmarks import record
from benchmarks.command_line import main
from benchmarks.ladder import LADDERS as NAMES
from benchmarks.ladder import problems_of
from jax_tilekern.plans.gpu import known_gpu

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

require_nvrtc()

# Rungs.


def _cases():
    for name in NAMES:
        rungs = {(p.title.split()[-1], r.name): (p, r) for p in problems_of(name) for r in p.rungs}
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
    file = tmp_path / "l.jsonl"
    assert main(["ladder", name, "--check", "--size", size, "--json", str(file)]) == 0
    rungs = record.read(file)["rows"]
    assert not any({"failure", "seconds"} & set(rung) for rung in rungs)
    assert any("kernels" in rung for rung in rungs)
