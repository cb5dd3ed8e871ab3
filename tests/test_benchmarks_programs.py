"""Programs of the benchmarks run, and write records."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import compile_source
from nvrtc_mark import needs_gpu, needs_nvrtc

import jax_tilekern as jtk
from benchmarks import commands, first_calls, fit_policy, measure, moe, programs, record, sample
from benchmarks.command_line import main
from benchmarks.errors import BenchmarkError
from benchmarks.ladder import LADDERS as NAMES
from benchmarks.ladder import problems_of
from benchmarks.sample import DrawnCall
from benchmarks.samples import LIMITS
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.cpu import Cpu
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.policy.model import NearestCalls

pytestmark = pytest.mark.thorough

# The wheel does not hold what is tested here: see tests/README.md.


def program(**sides):
    def errors(_, results):
        return {name: float(np.abs(x - results["ours"]).max()) for name, x in results.items()}

    return programs.Program("p", lambda: (jnp.ones((8, 8)),), sides, errors)


def test_sides_that_fail_are_a_line():
    def absent(x):
        raise ModuleNotFoundError("no such package")

    def large(x):
        return jnp.sort(jnp.broadcast_to(x[:, :, None], (8, 8, 2**40)), 2)[:, :, 0]

    def wrong(x):
        raise ValueError("first line\nsecond line")

    def ours(x):
        return x + 1

    row = measure.measured(program(ours=ours, XLA=large, parts=ours, absent=absent), 0.01)
    assert set(row["seconds"]) == set(row["error"]) == {"ours", "parts"}
    assert list(row["ratio"]) == ["parts"]
    assert row["failures"]["absent"] == "not installed"
    assert row["failures"]["XLA"].startswith("out of memory: ")
    alone = measure.measured(program(ours=ours, XLA=wrong), 0.01)
    assert (alone["ratio"], alone["error"]) == ({}, {})
    assert alone["failures"] == {"XLA": "ValueError: first line"}
    with pytest.raises(ValueError, match="first line"):
        measure.measured(program(ours=wrong, XLA=ours), 0.01)


def test_calls_of_small_matrices_are_a_model(tmp_path, capsys):
    path, device = tmp_path / "linalg.jsonl", "NVIDIA H200"
    wanted = ["--operations", "lu_factor", "triangular_solve", "svd", "--sizes", "4", "5x2"]
    more = ["--count", "10", "30", "--types", "float64", "--seconds", "0.001", "--json", str(path)]
    assert main(["linalg", *wanted, *more]) == 0
    rows = record.read(path)["rows"]
    assert {row["name"].partition(" ")[0] for row in rows} == set(wanted[1:4])
    calls = [fit_policy.measured_call(x, known_gpu(device)) for x in fit_policy.read_times([path])]
    assert len(calls) == len(rows) == 8
    for call in calls:
        assert call.is_pair
        assert call.workload.operation.startswith("matrix ")
    own = [call for call in calls if call.workload.operation == "matrix svd"]
    model = NearestCalls.from_json(fit_policy.kept_calls(own, "matrix svd")["calls"])
    for call in own:
        # A measured call is near itself.
        predicted = model(call.workload.features)
        np.testing.assert_allclose(predicted, (call.ours[0], call.xla), rtol=0.3)


def test_layers_of_experts(tmp_path, monkeypatch, capsys):
    sizes = moe.Sizes(24, 16, 8, 4, 2)
    rows = {"small": sizes._replace(zipf=True), "decode of 1": sizes._replace(tokens=1)}
    for on_gpu in (False, True):
        monkeypatch.setitem(moe.SIZES, on_gpu, rows)
    assert main(["moe", "--seconds", "0.01", "--json", str(tmp_path / "moe.json")]) == 0
    found = record.read(tmp_path / "moe.json")["rows"]
    kinds = {"forward", "forward and backward", "routing"}
    assert {row["name"] for row in found} == {
        *(f"small, {kind}" for kind in kinds), "decode of 1, forward", "decode of 1, routing",
    }  # fmt: skip
    for row in found:
        assert all(error < 0.05 for error in row["error"].values()), row
    loads = jnp.bincount(moe.operands(sizes._replace(tokens=4000, zipf=True))[-1].ravel())
    assert (jnp.diff(loads) < 0).all()


def test_eight_bit_floats(tmp_path):
    file = tmp_path / "fp8.json"
    assert main(["fp8", "--seconds", "0.01", "--json", str(file)]) == 0
    rows = record.read(file)["rows"]
    assert {row["name"].split()[0] for row in rows} == {
        "product", "quantize", "layer", "epilogue", "quantised", "grouped",
    }  # fmt: skip
    for row in rows:
        kinds = {"quantize": 0, "quantised": 0.07, "layer of": 0.15}
        bound = next((b for kind, b in kinds.items() if row["name"].startswith(kind)), 0.05)
        assert all(error <= bound for error in row["error"].values()), row


def test_training_steps(tmp_path):
    file = tmp_path / "model.json"
    small = {"layers": 1, "hidden": 16, "experts": 4, "batch": 1, "sequence": 16, "seconds": 0.01}
    options = [f"--{name}={value}" for name, value in small.items()]
    assert main(["moe_model", *options, "--json", str(file)]) == 0
    (row,) = record.read(file)["rows"]
    assert set(row["seconds"]) | set(row["failures"]) == {"ours", "XLA", "parts", "tokamax"}
    for name in ("ours", "XLA", "parts"):
        assert row["seconds"][name] > 0
        assert row["bytes"][name] > row["temporaries"][name] > 0
        # Products of bfloat16 round differently by side.
        np.testing.assert_allclose(row["losses"][name], row["losses"]["ours"], rtol=0.01)


def test_symmetric_products(tmp_path):
    file = tmp_path / "symmetric.json"
    options = ["--types", "float32", "--seconds", "0.01", "--json", str(file)]
    assert main(["symmetric", *options]) == 0
    rows = record.read(file)["rows"]
    kinds = [row["name"].partition(" ")[0] for row in rows]
    assert set(kinds) == {"x", "2", "newton_schulz"}
    for row in rows:
        assert {"ours", "XLA"} < set(row["seconds"])
        assert all(error < 1e-4 for error in row["error"].values()), row


def test_functions_with_loops(tmp_path):
    file = tmp_path / "lanes.json"
    assert main(["jax_kernel", "--seconds", "0.01", "--json", str(file)]) == 0
    rows = record.read(file)["rows"]
    assert {row["name"].partition(" ")[0] for row in rows} >= {
        "Lorenz,", "HMC", "eigh", "RNN", "chains",
    }  # fmt: skip
    assert max(error for row in rows for error in row["error"].values()) < 1e-4
    # The fewest programs are those without other libraries.
    assert sum(len(row["error"]) for row in rows) >= 40


def test_samples_of_descriptions_are_measured_and_fitted(tmp_path):
    path = tmp_path / "sample.jsonl"
    drawn = ["--operations", "add", "top_k", "--count", "1", "--seed", "3"]
    assert main(["sample", *drawn, "--seconds", "0.01", "--json", str(path)]) == 0
    found = record.read(path)["rows"]
    assert [row["draw"][:3] for row in found] == [["add", 3, 0], ["top_k", 3, 0]]
    assert all(row["error"]["ours"] < 1e-5 for row in found)
    of_add, _ = fit_policy.read_times([path])
    assert of_add.row.name == of_add.name == found[0]["name"]
    assert of_add.microseconds["xla"] == pytest.approx(1e6 * found[0]["seconds"]["XLA"], abs=1e-3)
    call = fit_policy.measured_call(of_add, Cpu(""))
    assert call.workload.operation == "add"
    again = tmp_path / "again.jsonl"
    command = ["fit_policy", "CPU", str(path), "--again", "--times", str(again)]
    for minutes, calls in (("0", 0), ("1", 2), ("0", 2)):
        assert main([*command, "--minutes", minutes]) == 0
        timed = fit_policy.read_times([again])
        assert [x.name for x in timed] == [row["name"] for row in found][:calls]
        assert all({*x.microseconds} <= {"first", "xla"} for x in timed)
    other = record.read(path)
    other["rows"][0]["name"] = "a call that the catalog does not draw"
    record.write(path, other)
    with pytest.raises(BenchmarkError, match="the catalog draws add"):
        fit_policy.read_times([path])


def test_candidates_of_products_with_epilogues_are_fitted(tmp_path):
    row, gpu = DrawnCall("matmul, residual", 72, 1, "gpu"), known_gpu("H200")
    with gpu_target("H200"):
        keys = [*sample.choices_of_candidates(row, 3)]
    assert len(keys) == 3
    seconds = {"ours": 1e-6, "XLA": 9e-6} | dict.fromkeys(keys, 5e-6)
    entry = {"name": row.name, "seconds": seconds, "draw": [*dataclasses.astuple(row)]}
    path = tmp_path / "drawn.jsonl"
    record.write(path, {"rows": [entry | {"kernels": ["a kernel"]}]})
    (times,) = fit_policy.read_times([path])
    assert times.microseconds == {"xla": 9.0} | dict.fromkeys(keys, 5.0)
    call = fit_policy.measured_call(times, gpu)
    assert call.workload.operation == "fused product"
    assert call.workload.estimate > 0
    assert {call.candidates[i].key for i in call.ours} == {*keys}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "name", ["matmul", "linalg.inv", "quantize", "segment_sum", "take", "bincount"]
)
def test_samples_of_descriptions_have_sizes_of_the_device(name, device):
    most_bytes, _ = LIMITS[device]
    sizes = []
    for index in range(6):
        call = DrawnCall(name, 0, index, device).call
        bytes_of_call = sum(math.prod(x.shape) * x.dtype.itemsize for x in call.operands)
        assert 0 < bytes_of_call <= most_bytes, call
        sizes.append(bytes_of_call)
    assert max(sizes) > 1e4, sizes


def test_first_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    file = str(tmp_path / "first.json")
    assert main(["first_calls", "--rows", "product*", "--rounds", "1", "--json", file]) == 0
    (row,) = record.read(tmp_path / "first.json")["rows"]
    assert set(row["seconds"]) == {"ours", "ours, warm", "XLA", "XLA, warm"}
    assert 0 < row["later_seconds"]["XLA, warm"] < row["seconds"]["XLA"]


@needs_nvrtc
def test_first_lowerings_need_no_gpu(tmp_path):
    file = tmp_path / "first.json"
    command = ["first_lowerings", "--rows", "product*", "--rounds", "1", "--json", str(file)]
    assert main(command) == 0
    (row,) = record.read(file)["rows"]
    assert set(row["seconds"]) == {"ours", "in order"}
    assert row["compiled"] > 0


def test_rows_are_named_without_backticks():
    assert commands.matches("`kernel`: Lorenz", ["kernel*"])
    assert commands.matches("`kernel`: Lorenz", ["`kernel`*"])


def test_a_pattern_without_rows_is_an_error(capsys):
    assert main(["first_calls", "--rows", "none*"]) == 2
    assert "no row has a name like none*" in capsys.readouterr().err


def test_a_first_call_that_fails_is_an_error(tmp_path):
    with pytest.raises(BenchmarkError, match=r"none: a process fails: ValueError: not enough"):
        first_calls.fresh_process("benchmarks.first_calls", ["none", "ours"], tmp_path)


# The wheel does not hold what is tested here: see tests/README.md.


# Rungs.


def _cases():
    for name in NAMES:
        rungs = {(p.title.split()[-1], r.name): (p, r) for p in problems_of(name) for r in p.rungs}
        for (dtype, label), (problem, rung) in rungs.items():
            for arch in ("sm_80", "sm_90a"):
                takes = known_gpu(arch).compute_capability >= rung.compute_capability
                if rung.source and takes:
                    yield pytest.param(problem, rung, arch, id=f"{name}-{dtype}-{label}-{arch}")


@needs_nvrtc
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


@needs_nvrtc
@needs_gpu
@pytest.mark.parametrize(("name", "size"), [(n, size) for n in NAMES for size in SIZES[n]])
def test_every_rung_is_right(name, size, tmp_path):
    file = tmp_path / "l.jsonl"
    assert main(["ladder", name, "--check", "--size", size, "--json", str(file)]) == 0
    rungs = record.read(file)["rows"]
    assert not any({"failure", "seconds"} & set(rung) for rung in rungs)
    assert any("kernels" in rung for rung in rungs)


def test_a_sample_of_decoding_products(tmp_path):
    path = tmp_path / "sample.jsonl"
    command = ("sample", "--operations", "scaled_matmul, decode", "--count", "2", "--seed", "1")
    assert main([*command, "--seconds", "0.01", "--json", str(path)]) == 0
    for row in record.read(path)["rows"]:
        assert row["ratio"].keys() == {"bfloat16"}
        assert row["error"]["ours"] < 2**-7


def test_a_model_decodes_by_small_weights(tmp_path):
    path = tmp_path / "decoding.jsonl"
    assert main(["decoding", "--seconds", "0.01", "--json", str(path)]) == 0
    rows = record.read(path)["rows"]
    assert [row["name"].rpartition(" ")[2] for row in rows] == ["1", "16"]
    for row in rows:
        assert row["error"]["ours"] < 2**-6
        rates, seconds = row["tokens_in_a_second"], row["seconds"]
        assert rates.keys() == seconds.keys() == {"ours", "bfloat16"}


def test_errors_of_small_weights_are_those_of_bfloat16(tmp_path):
    path = tmp_path / "errors.jsonl"
    assert main(["small_weights_accuracy", "--json", str(path)]) == 0
    for row in record.read(path)["rows"]:
        # Weights are rounded to bfloat16, or results alone.
        assert row["float32"]["ours"] < 2**-8
        assert row["bfloat16"]["ours"] < 2 * row["bfloat16"]["bfloat16"]


PASSES = ["attention value", "attention gradient"]


def test_a_sample_of_attention(tmp_path):
    path = tmp_path / "sample.jsonl"
    command = ("sample", "--operations", *PASSES, "--count", "1", "--seed", "1")
    assert main([*command, "--seconds", "0.01", "--json", str(path)]) == 0
    rows = record.read(path)["rows"]
    assert [row["draw"] for row in rows] == [[name, 1, 0, "cpu"] for name in PASSES]
    # Without a GPU, XLA's blocks are both sides.
    assert all(row["error"] == {"ours": 0} for row in rows)
    assert all(row["seconds"].keys() == {"ours", "XLA"} for row in rows)
    (value, gradient) = (row["name"].partition(": ")[2] for row in rows)
    assert value == gradient


@needs_nvrtc
@pytest.mark.defaults
def test_the_policy_is_asked_of_attention_once():
    gpu = known_gpu("H200")
    for name, index in itertools.product(PASSES, range(6)):
        call = DrawnCall(name, 2, index)
        with gpu_target(gpu):
            keys = call.call.ways.keys()
            assert call.call.sides().keys() - {"XLA"} == keys
        times = fit_policy.CallTimes(call.name, call, {"xla": 9.0, "kernels": 2.0, "cuDNN": 1.0})
        found = fit_policy.measured_call(times, gpu)
        if not keys:
            assert found is None
            continue
        assert {way.key for way in found.candidates} == keys
        assert found.xla == 9
        by_key = {found.candidates[i].key: us for i, us in found.ours.items()}
        assert by_key == {key: {"kernels": 2.0, "cuDNN": 1.0}[key] for key in keys}
        assert found.workload.operation == "attention"


def test_recorded_calls_of_attention_are_drawn_again():
    calls = fit_policy.read_times([*(record.RESULTS / "h200/samples").glob("attention-*")])
    assert len(calls) > 30
    assert all(call.microseconds for call in calls)
