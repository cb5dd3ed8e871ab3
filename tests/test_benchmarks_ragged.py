"""What ``ragged_dot`` adds: grouped operands, a judge, several peers and their memory."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks import operation_command
from benchmarks.calls import other_peers, ragged_by_blocks, ragged_calls
from benchmarks.calls.case import Case, jitted, types_enabled
from benchmarks.calls.operations import OURS
from benchmarks.calls.ragged_row import LAYER, LAYER_GRADIENTS, PRODUCTS, SPLITS
from benchmarks.command_line import main
from benchmarks.measurement import side_times, suite_run
from benchmarks.records import record
from benchmarks.suites import suite

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

FORWARD, ROW_GRADIENT, WEIGHT_GRADIENT = PRODUCTS
CALLS = (*PRODUCTS, LAYER, LAYER_GRADIENTS)

TINY = """
operation = "ragged_dot"
about = "For tests"

[[groups]]
name = "small"
target = 0.0
others = { lax = 1e9, tokamax = 0.0 }
temporary = 1048576
rows = [
  { name = "forward", split = "zipf", type = "bfloat16", lhs = "mk", rhs = "gkn", out = "mn", g = 3, m = 40, k = 8, n = 16 },
  { name = "integers", split = "one-hot", type = "int8", result = "int32", lhs = "mk", rhs = "gkn", out = "mn", g = 3, m = 40, k = 8, n = 16 },
]

[[groups]]
name = "layer"
target = 0.0
others = { lax = 0.0 }
rows = [
  { name = "layer", split = "multinomial", type = "float32", lhs = "mk", rhs = "gkn", out = "mk", g = 3, m = 40, k = 8, n = 16 },
]
"""  # noqa: E501


def row(dimensions=FORWARD, group=(), **changes):
    lhs, rhs, out = dimensions
    sizes = {"g": 3, "m": 300, "k": 24, "n": 40}
    entry = {"name": "x", "type": "float32", "lhs": lhs, "rhs": rhs, "out": out} | sizes | changes
    return suite._row(entry, "ragged_dot", {"name": "g", "target": 1.0} | dict(group))


def expected(r, operands):
    """What a row of one product is, group by group in float64."""
    lhs, rhs, sizes = (np.asarray(x) for x in operands)
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    ends = np.cumsum(sizes)
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if r.dimensions == WEIGHT_GRADIENT:
        return np.stack([lhs[part].T @ rhs[part] for part in parts])
    if r.dimensions == ROW_GRADIENT:
        rhs = rhs.mT
    return np.concatenate([lhs[part] @ rhs[g] for g, part in enumerate(parts)])


# Suites and rows.


@pytest.mark.parametrize("name", suite.suite_names("ragged_dot"))
def test_the_package_suites_are_well_formed(name):
    found = suite.load_suite(name)
    assert {r.dimensions for r in found.rows} == set(CALLS)
    assert {r.split for r in found.rows} == set(SPLITS)
    for r in found.rows:
        for side in (OURS, lax, ragged_by_blocks.BY_BLOCKS):
            results = jax.tree.leaves(jax.eval_shape(jitted(r, side), *r.structs))
            assert [x.shape for x in results] == [r.shape(x) for x in r.results], r.name
            assert {x.dtype for x in results} == {r.result_type}, r.name
        assert r.temporary == (None if r.is_layer else 1 << 20)


# What is called, and what says that it is right.


@pytest.mark.parametrize("dimensions", PRODUCTS)
@pytest.mark.one_in(3)
def test_all_sides_compute_the_product_of_each_group(dimensions):
    # TF32 on a GPU; a sum of n products of normal numbers has the size of the root of n.
    bound = (1e-2 if jax.default_backend() == "gpu" else 1e-5) * np.sqrt(300)
    for split in SPLITS:
        r = row(dimensions, split=split, g=5)
        operands = r.random_operands(0)
        exact = expected(r, operands)
        for side in (OURS, lax, ragged_by_blocks.BY_BLOCKS):
            found = jitted(r, side)(*operands)
            np.testing.assert_allclose(found, exact, rtol=0, atol=bound, err_msg=split)


@pytest.mark.parametrize("dimensions", [LAYER, LAYER_GRADIENTS])
@pytest.mark.one_in(2)
@pytest.mark.thorough
def test_a_layer_is_gated_and_has_gradients(dimensions):
    r = row(dimensions, split="multinomial", type="float64", m=30, k=4, n=6)
    with types_enabled(r):
        operands = r.random_operands(0)
        *_, sizes = operands
        group = np.repeat(np.arange(3), np.asarray(sizes))

        def layer(x, w1, w3, w2):
            w1, w3, w2 = w1[group], w3[group], w2[group]
            gate, up = jnp.einsum("mk,mkn->mn", x, w1), jnp.einsum("mk,mkn->mn", x, w3)
            return jnp.einsum("mn,mnk->mk", gate * jax.nn.sigmoid(gate) * up, w2)

        exact = layer(*operands[:-1])
        if dimensions == LAYER_GRADIENTS:
            square = jax.grad(lambda *x: jnp.sum(layer(*x) ** 2) / 2, (0, 1, 2, 3))
            exact = square(*operands[:-1])
        for side in (OURS, lax, ragged_by_blocks.BY_BLOCKS):
            found = jitted(r, side)(*operands)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-9, 1e-9), found, exact)


@pytest.mark.parametrize(
    ("dimensions", "kind"),
    [(FORWARD, "bfloat16"), (FORWARD, "int8"), (WEIGHT_GRADIENT, "float32")],
)
@pytest.mark.one_in(3)
def test_right_results_are_right_and_one_wrong_element_is_found(dimensions, kind):
    r = row(dimensions, type=kind, split="zipf", result="int32" if kind == "int8" else None)
    right = Case.of(r)
    operands = right.operands()
    assert record._wrong(r, right.errors(operands)) is None
    off = Case(r, lambda *x: right.ours(*x).at[..., -2, 5].add(6), right.peer)
    assert record._wrong(r, off.errors(operands)) is not None
    nan = jnp.nan if kind != "int8" else 1 << 20
    off = Case(r, lambda *x: right.ours(*x).at[..., 0, 0].set(nan), right.peer)
    assert "relative error" in record._wrong(r, off.errors(operands))


# Other peers.


def test_ours_takes_hardly_any_temporary_memory():
    r = row(m=4000, g=8, k=64, n=64, split="multinomial")
    found = other_peers.temporary_bytes(other_peers.compiled(r, OURS))
    assert found < 1 << 20


# Timing.


def side(calls, rounds):
    return side_times.Side(lambda: None, calls, rounds)


# Records and tables.


@pytest.mark.thorough
def test_a_run_writes_a_record_and_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    ragged_calls._tokamax.cache_clear()
    monkeypatch.setattr(operation_command, "load_suite", lambda name: suite.parse_suite(name, TINY))
    bandwidths = {"read_bytes_per_second": 1e10, "copy_bytes_per_second": 2e10}
    monkeypatch.setattr(suite_run, "bandwidths", lambda: bandwidths)
    file = tmp_path / "b.json"
    arguments = ["--suite", "tiny", "--seconds", "0", "--json", str(file)]
    assert main(["ragged_dot", *arguments]) == 0
    out = capsys.readouterr().out
    assert "2 of 3 rows below their target" in out  # of lax
    assert "Geometric means of dense / ours" in out

    forward, integers, layer = json.loads(file.read_text())["rows"]
    assert forward["failure"] is None
    assert forward["split"] == "zipf"
    assert forward["temporary_bytes"] < 1 << 20
    assert set(forward["others"]) == {"lax", "tokamax"}
    assert forward["others"]["lax"]["seconds"]["ratio"]["median"] > 0
    assert forward["others"]["lax"]["temporary_bytes"] >= 0
    assert forward["others"]["tokamax"]["failure"] == "not installed"
    assert integers["error"]["ours"] == 0
    assert set(layer["others"]) == {"lax"}

    assert main(["report", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| dense / ours |" in lines[0]
    assert "| lax / ours (time, temporary) | tokamax / ours (time, temporary) |" in lines[0]
    assert "| error ours, XLA |" in lines[0]
    assert "(below 1e+09)" in lines[2]
    assert "| not installed |" in lines[2]
    assert len({line.count("|") for line in lines[:5]}) == 1
