"""``sharded`` measures programs of several devices, and says which results differ."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded import devices

from benchmarks import sharded
from benchmarks.command_line import main

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or devices() is None, reason="eight CPU devices"
)


def small(count):
    def product(matmul, _):
        return matmul

    def wrong(matmul, _):
        return lambda a, b: matmul(a, b) * (2 if matmul is sharded.jax_tilekern.matmul else 1)

    def groups(_, ragged_dot):
        return lambda x, w, sizes: ragged_dot(x, w, sizes)

    pair = ((64, 32), (32, 64)), (P("x"), P(None, "x")), P(None, "x")
    yield sharded.Program("products", "right", 0.97, product, *pair, ((64, 32), (32, 64 // count)))
    yield sharded.Program("products", "wrong", 0.97, wrong, *pair)
    yield sharded.Program(
        "groups", "columns", 0.85, groups, ((64, 32), (8, 32, 16), (8,)),
        (P(), P(None, None, "x"), P()), P(None, "x"), peer=False, added=(64, 16),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """Eight devices on few cores: collectives of many calls at a time take too long."""
    monkeypatch.setattr(sharded, "programs", small)
    monkeypatch.setattr(sharded, "_BLOCK_SECONDS", 1e-4)
    monkeypatch.setattr(sharded, "REPEATS", 2)


def test_rows_are_measured_recorded_and_shown(tmp_path, capsys):
    file = tmp_path / "sharded.json"
    assert main(["sharded", "--seconds", "0.01", "--json", str(file)]) == 1
    record = json.loads(file.read_text())
    right, wrong, groups = record["rows"]
    assert record["devices"] == 8
    assert right["difference"] < 0.01
    assert not right["same_program"]
    assert set(right["microseconds"]) == {"ours", "jnp", "alone"}
    assert "error" not in right
    assert "differ" in wrong["error"]
    times = groups["microseconds"]
    assert set(times) == {"ours", "one device", "all-reduce"}
    share = times["one device"] / 8
    assert groups["bound"] == pytest.approx(share / (share + times["all-reduce"]))
    assert groups["calls"][0]["partition"]
    capsys.readouterr()
    assert main(["report", str(file)]) == 0
    table = capsys.readouterr().out
    assert "| products | right |" in table
    assert table.count("failed") == 1
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sharded.png"
    assert main(["report", str(file), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_rows_are_chosen_by_a_pattern(tmp_path):
    file = tmp_path / "sharded.json"
    command = ["sharded", "--rows", "groups: *", "--seconds", "0.01", "--json", str(file)]
    assert main(command) == 0
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["columns"]


def test_programs_are_compared_without_names():
    def compiled(function):
        return jax.jit(function).lower(np.ones((64, 32), np.float32)).compile()

    def first(x):
        return jnp.sin(x) @ x.T

    def second(y):
        with jax.named_scope("another"):
            return jnp.matmul(jnp.sin(y), y.T)

    assert sharded.are_same(compiled(first), compiled(second))
    assert not sharded.are_same(compiled(first), compiled(lambda x: jnp.cos(x) @ x.T))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA for CPUs merges calls across barriers in JAX 0.10"
)
def test_no_repetition_is_removed():
    x, w = np.ones((64, 32), np.float32), np.ones((32, 48), np.float32)
    compiled = jax.jit(sharded.repeated(jnp.matmul)).lower(x, w).compile()
    assert compiled.as_text().count(" dot(") == sharded.REPEATS
    assert len(compiled(x, w)) == sharded.REPEATS
