"""What ``ragged_dot`` adds: grouped operands, a judge, several peers and their memory."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tilekern as jtk
from benchmarks import operation_command
from benchmarks.calls import other_peers, ragged_by_blocks, ragged_calls
from benchmarks.calls.case import Case, jitted, types_enabled
from benchmarks.calls.operations import OPERATIONS, OURS, Peer, flops
from benchmarks.calls.ragged_row import LAYER, LAYER_GRADIENTS, PRODUCTS, SPLITS
from benchmarks.command_line import main
from benchmarks.measurement import measure, side_times, suite_run
from benchmarks.records import record, report
from benchmarks.records.ceilings import Ceilings
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


def test_every_backend_has_a_suite():
    names = {suite.default_suite("ragged_dot", backend) for backend in ("cpu", "gpu")}
    assert names == set(suite.suite_names("ragged_dot"))


@pytest.mark.parametrize("split", SPLITS)
def test_splits_give_all_rows_away(split):
    sizes = row(split=split, m=1000, g=16).group_sizes
    assert sizes.shape == (16,)
    assert sizes.sum() == 1000
    assert sizes.min() >= 0
    spread = sizes.max() - sizes.min()
    low, high = {"balanced": (0, 1), "one-hot": (1000, 1000)}.get(split, (2, 999))
    assert low <= spread <= high
    if split == "zipf":  # The first of 16 has 1 / (1 + 1/2 + ... + 1/16) of all.
        assert 230 < sizes.max() < 370


def test_what_a_row_says():
    r = row(split="one-hot", type="bfloat16")
    assert flops(r) == 2 * 300 * 24 * 40
    # The weights of two groups need not be read.
    assert r.bytes == 2 * (300 * 24 + 24 * 40 + 300 * 40) + 3 * 4
    assert r.details["groups"] == {"empty": 2, "smallest": 0, "largest": 300}
    # But their gradients are written.
    r = row(WEIGHT_GRADIENT, split="one-hot", type="bfloat16")
    assert r.bytes == 2 * (300 * 24 + 3 * 24 * 40 + 300 * 40) + 3 * 4
    assert flops(row(LAYER)) == 3 * flops(row())
    assert flops(row(LAYER_GRADIENTS)) == 9 * flops(row())
    weights, rows = 3 * 24 * 40, 300 * 24
    assert row(LAYER).bytes == 4 * (rows + 3 * weights + rows + 3)
    assert row(LAYER_GRADIENTS).bytes == 4 * (2 * (rows + 3 * weights) + 3)


@pytest.mark.parametrize(
    ("dimensions", "group", "changes", "message"),
    [
        (("mk", "gnk", "mn"), {}, {}, "'mk gnk mn' are none of"),
        (FORWARD, {}, {"split": "even"}, "split 'even' is none of balanced"),
        (FORWARD, {}, {"b": 3}, "need a size each"),
        (FORWARD, {"others": {"cublas": 1.0}}, {}, "others cublas are not among lax, tokamax"),
    ],
)
def test_malformed_rows_are_named(dimensions, group, changes, message):
    with pytest.raises(suite.SuiteError, match=message):
        row(dimensions, group, **changes)


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


def test_a_layers_result_has_the_size_of_its_operands():
    r = row(LAYER, m=500, k=64, n=64)
    (operands, result) = (r.random_operands(0), jitted(r, lax)(*r.random_operands(0)))
    assert 0.1 < float(jnp.std(result)) / float(jnp.std(operands[0])) < 2


# test_right_results_are_right_and_one_wrong_element_is_found calls the same peers.
@pytest.mark.thorough
def test_the_dense_peer_does_the_same_operations_by_one_groups_weights():
    for dimensions in CALLS:
        r = row(dimensions)
        case = Case.of(r)
        operands = case.operands()
        dense = case.peer_operands(operands)
        found = jax.tree.leaves(case.peer(*dense))
        assert [x.shape for x in found] == [r.shape(x.removeprefix("g")) for x in r.results]
    one = jnp.matmul(operands[0], operands[1][0])
    r = row()
    # TF32 on a GPU, of one and perhaps not of the other.
    bound = 1e-2 * np.sqrt(r.sizes["k"]) if jax.default_backend() == "gpu" else 1e-4
    np.testing.assert_allclose(Case.of(r).peer(*dense[:2], dense[-1]), one, 0, bound)


def test_operands_rotate_with_the_same_group_sizes():
    case = Case.of(row(split="zipf"))
    first, second = case.operands(0), case.operands(1)
    np.testing.assert_array_equal(first[-1], second[-1])
    assert np.any(np.asarray(first[1]) != np.asarray(second[1]))


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


def test_a_group_that_should_be_empty_is_zero():
    r = row(WEIGHT_GRADIENT, split="one-hot")
    right = Case.of(r)
    operands = right.operands()
    assert record._wrong(r, right.errors(operands)) is None
    off = Case(r, lambda *x: right.ours(*x).at[0, 0, 0].set(1e-6), right.peer)
    assert "an element" in record._wrong(r, off.errors(operands))


@pytest.mark.thorough
def test_one_wrong_gradient_of_a_layer_is_found():
    r = row(LAYER_GRADIENTS, split="multinomial")
    right = Case.of(r)
    operands = right.operands()
    assert record._wrong(r, right.errors(operands)) is None

    def off(*x):
        dx, dw1, dw3, dw2 = right.ours(*x)
        return dx, dw1, 1.01 * dw3, dw2

    wrong = Case(r, off, right.peer).errors(operands)
    assert "relative error" in record._wrong(r, wrong)


# Other peers.


def found_peers(monkeypatch, function, **limits):
    """The peer ``lax`` with another function, as a row finds it."""
    side = ragged_calls.Grouped(function)
    monkeypatch.setitem(OPERATIONS["ragged_dot"].others, "lax", Peer("lax", lambda: side))
    r = row(group={"others": {"lax": 1.0}}, **limits)
    operands = r.random_operands(0)
    return other_peers.other_peers(r, operands, Case.of(r).ours(*operands))["lax"]


def test_a_peer_that_can_is_compiled(monkeypatch):
    found = found_peers(monkeypatch, lax.ragged_dot_general)
    assert found.failure is None
    assert found.function is not None
    assert found.temporary_bytes >= 0


def test_what_a_peer_raises_is_its_failure(monkeypatch):
    def broken(*_, **__):
        raise NotImplementedError("no such kernel\nand more")

    assert found_peers(monkeypatch, broken).failure == "NotImplementedError: no such kernel"

    def exhausted(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    assert found_peers(monkeypatch, exhausted).failure == "out of memory"


def test_a_peer_that_takes_too_much_memory_does_not_run(monkeypatch):
    ran = []

    def noted(*arguments, **types):
        jax.debug.callback(lambda: ran.append(1))
        return lax.ragged_dot_general(*arguments, **types)

    monkeypatch.setattr(other_peers, "free_bytes", lambda: 1000)
    found = found_peers(monkeypatch, noted)
    jax.effects_barrier()
    assert (found.failure, found.function, ran) == ("out of memory", None, [])
    assert found.temporary_bytes is not None


def test_a_wrong_peer_is_named(monkeypatch):
    def half(*arguments, **types):
        return lax.ragged_dot_general(*arguments, **types) / 2

    assert found_peers(monkeypatch, half).failure == "wrong: differs from ours by 50%"

    def nothing(*arguments, **types):
        return lax.ragged_dot_general(*arguments, **types) * jnp.nan

    assert "wrong" in found_peers(monkeypatch, nothing).failure


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    ragged_calls._tokamax.cache_clear()
    r = row(group={"others": {"tokamax": 1.0, "tokamax triton": 1.0}})
    operands = r.random_operands(0)
    found = other_peers.other_peers(r, operands, Case.of(r).ours(*operands))
    assert {peer.failure for peer in found.values()} == {"not installed"}


def test_the_memory_that_is_needed_and_left():
    x = jnp.zeros(100, jnp.float32)
    assert other_peers.needed_bytes((x, x), (x,), 7) == 4 * 100 * 4 + 7
    assert other_peers.free_bytes() > 1 << 20


def test_ours_takes_hardly_any_temporary_memory():
    r = row(m=4000, g=8, k=64, n=64, split="multinomial")
    found = other_peers.temporary_bytes(other_peers.compiled(r, OURS))
    assert found < 1 << 20


# Timing.


def side(calls, rounds):
    return side_times.Side(lambda: None, calls, rounds)


def test_sides_are_interleaved_for_as_many_rounds_as_each_has():
    sides = {"ours": side(9, 3), "peer": side(9, 3), "slow": side(1, 1)}
    order = side_times._order(sides)
    assert order == ["ours", "peer", "slow", "peer", "ours", "ours", "peer"]
    times = {"ours": (1.0, 2.0, 3.0), "slow": (8.0,)}
    assert side_times.pairs(times, "slow").ratio.median == 8


def test_slow_peers_have_few_calls_and_rounds(monkeypatch):
    for seconds, expected in ((1e-3, (10, 12)), (0.1, (1, 3))):
        monkeypatch.setattr(measure, "wall_seconds", lambda _, seconds=seconds: seconds)
        found = measure._other_side(lambda: None, most_calls=50, seconds=0.24)
        assert (found.calls, found.rounds) == expected


def test_other_peers_are_timed_with_ours():
    case = Case.of(row(LAYER))
    others = {"lax": jitted(case.row, lax)}
    operands = case.operands()
    for found in (
        measure.measure_on_cpu(case, operands, 0.0, others),
        measure.measure_on_gpu(case, operands, 0.01, 1 << 10, others),
    ):
        assert found.products_per_call == 1
        assert set(found.others) == {"lax"}
        assert min(found.others["lax"].peer) > 0
        assert len(found.others["lax"].peer) == len(found.others["lax"].ours) >= 3


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


def timed_row(**changes):
    spread = {"median": 1e-3, "p10": 1.0, "p90": 1.0}
    seconds = {"ours": spread, "peer": spread, "ratio": spread | {"median": 1.0}}
    entry = {"name": "x", "kernel": "k", "target": 1.0, "share": 0.0, "type": "float32"}
    entry |= {"rhs_type": None, "precision": None, "flops": 1e9, "bytes": 1e6, "group": "g"}
    entry |= {"failure": None, "seconds": seconds, "error": {"ours": 0.0, "peer": 0.0}}
    return entry | {"temporary": 1 << 20, "temporary_bytes": 100, "others": {}} | changes


def other(ratio, **changes):
    spread = {"median": ratio, "p10": ratio, "p90": ratio}
    seconds = {"ours": spread, "peer": spread | {"median": 3e-3}, "ratio": spread}
    found = {"target": 2.0, "temporary_bytes": 3 << 20, "failure": None, "seconds": seconds}
    return found | changes


def test_a_row_may_lose_against_another_peer_or_by_its_memory():
    bounds = Ceilings(1e10, {"float32": 1e13})
    good = timed_row(others={"lax": other(2.5)})
    slow = timed_row(others={"lax": other(1.5)})
    large = timed_row(temporary_bytes=2 << 20)
    failed = timed_row(others={"lax": {"target": 2.0, "temporary_bytes": 56 << 30}})
    failed["others"]["lax"]["failure"] = "out of memory"
    table = {"operation": "ragged_dot", "rows": [good, slow, large, failed]}
    assert [report.loses(r, bounds) for r in table["rows"]] == [False, True, True, False]
    texts = [report.cells(table, r, bounds) for r in table["rows"]]
    assert {len(cells) for cells in texts} == {len(report.headings(table))}
    assert "2.50 (3 ms, 3 MiB)" in texts[0]
    assert "1.50 (below 2) (3 ms, 3 MiB)" in texts[1]
    assert "2 MiB (above 1 MiB)" in texts[2]
    assert "out of memory, 56 GiB" in texts[3]
    assert "100 B" in texts[0]


def test_our_function_is_the_packages():
    assert OURS.ragged_dot_general is jtk.ragged_dot_general
