"""``moe``, ``moe_model``, ``symmetric``, ``fp8``, and what is measured where sides may fail."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import BF16, E4M3, F32, H100

from benchmarks import fp8, moe, programs, symmetric
from benchmarks.command_line import main
from jax_tilekern.interop.gpu_target import gpu_target

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough


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

    row = programs.measured(program(ours=ours, XLA=large, parts=ours, absent=absent), 0.01)
    assert set(row["seconds"]) == set(row["error"]) == {"ours", "parts"}
    assert row["peer"] == "parts"
    assert row["failures"]["absent"] == "not installed"
    assert row["failures"]["XLA"].startswith("out of memory: ")
    alone = programs.measured(program(ours=ours, XLA=wrong), 0.01)
    assert (alone["peer"], alone["ratio"], alone["error"]) == (None, None, {})
    assert alone["failures"] == {"XLA": "ValueError: first line"}
    with pytest.raises(ValueError, match="first line"):
        programs.measured(program(ours=wrong, XLA=ours), 0.01)


def test_layers_of_experts(tmp_path, monkeypatch, capsys):
    sizes = moe.Sizes(24, 16, 8, 4, 2)
    rows = {"small": sizes._replace(zipf=True), "decode of 1": sizes._replace(tokens=1)}
    monkeypatch.setitem(moe.SIZES, "cpu", rows)
    monkeypatch.setitem(moe.SIZES, "gpu", rows)
    assert main(["moe", "--seconds", "0.01", "--json", str(tmp_path / "moe.json")]) == 0
    found = json.loads((tmp_path / "moe.json").read_text())["rows"]
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
    rows = json.loads(file.read_text())["rows"]
    assert {row["name"].split()[0] for row in rows} == {
        "product", "quantize", "layer", "epilogue", "quantised", "grouped",
    }  # fmt: skip
    for row in rows:
        kinds = {"quantize": 0, "quantised": 0.07, "layer of": 0.15}
        bound = next((b for kind, b in kinds.items() if row["name"].startswith(kind)), 0.05)
        assert all(error <= bound for error in row["error"].values()), row


def test_kernels_that_quantise_rows(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = [((256, 384), BF16), ((512, 384), BF16), ((256, 384), E4M3), ((512, 384), E4M3)]
    shapes += [((256, 3), F32), ((4, 3), F32), ((3, 256), F32)]
    given = [jax.ShapeDtypeStruct(*x) for x in shapes]
    with gpu_target(H100):
        for scaled in (False, True):
            sides = fp8._quantizing_candidates(256, 512, 384, scaled=scaled)
            assert 0 < len(sides) <= fp8._CANDIDATES
            for side in sides.values():
                lowered = jax.jit(side).trace(*given).lower(lowering_platforms=("cuda",))
                assert [x.shape for x in lowered.out_info] == [(256, 512), (256, 4)]


def test_training_steps(tmp_path):
    file = tmp_path / "model.json"
    small = {"layers": 1, "hidden": 16, "experts": 4, "batch": 1, "sequence": 16, "seconds": 0.01}
    options = [f"--{name}={value}" for name, value in small.items()]
    assert main(["moe_model", *options, "--json", str(file)]) == 0
    sides = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(sides) == {"ours", "XLA", "parts", "tokamax"}
    for name in ("ours", "XLA", "parts"):
        assert sides[name]["tokens_per_second"] > 0
        assert sides[name]["bytes"] > sides[name]["temporaries"] > 0
        # Products of bfloat16 round differently by side.
        np.testing.assert_allclose(sides[name]["losses"], sides["ours"]["losses"], rtol=0.01)


def test_symmetric_products(tmp_path, monkeypatch):
    file = tmp_path / "symmetric.json"
    options = ["--types", "float32", "--seconds", "0.01", "--json", str(file)]
    assert main(["symmetric", *options]) == 0
    rows = json.loads(file.read_text())["rows"]
    kinds = [row["name"].partition(" ")[0] for row in rows]
    assert set(kinds) == {"x", "2", "newton_schulz"}
    for row in rows:
        assert {"ours", "XLA"} < set(row["seconds"])
        assert all(error < 1e-4 for error in row["error"].values()), row
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with gpu_target(H100):
        sides = symmetric._halves((2, 256, 64), "bfloat16")
        x = jax.ShapeDtypeStruct((2, 256, 64), "bfloat16")
        texts = [
            jax.jit(side).trace(x).lower(lowering_platforms=("cuda",)).as_text()
            for side in sides.values()
        ]
    assert len(texts) == symmetric._CANDIDATES
    assert all("wgmma_symmetric_matmul" in text for text in texts)
