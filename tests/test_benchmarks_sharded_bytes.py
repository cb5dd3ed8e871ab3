"""``sharded_bytes`` counts what programs with random shardings send, and checks their results."""

from __future__ import annotations

import pytest
from sharded import AUTO, devices, mesh_of

from benchmarks import sharded_bytes
from benchmarks.command_line import main
from benchmarks.sharded_bytes.collectives import total_bytes
from benchmarks.sharded_bytes.programs import KINDS, drawn

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(devices() is None, reason="eight CPU devices"),
]


def test_a_row_for_each_kind_and_its_gradients(capsys):
    assert main(["sharded_bytes", "--count", "1", "--seed", "5"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    names = [f"| `{kind}`, {part}" for kind in KINDS for part in ("forward", "gradients")]
    assert [row[0] for row in rows] == names
    assert {row[1].split(" of ")[1] for row in rows} == {"1"}


def test_draws_repeat():
    first, again = (list(drawn("einsum", 3, 4)) for _ in range(2))
    assert [(x.shapes, x.specs, x.out) for x in first] == [
        (x.shapes, x.specs, x.out) for x in again
    ]
    assert len({str(x.specs) for x in first}) > 2


def test_bytes_are_those_of_the_collectives_and_wrong_results_are_seen(rng, monkeypatch):
    mesh = mesh_of((AUTO, AUTO))
    programs = list(drawn("matmul", 0, 6))
    found = [sharded_bytes.compare(mesh, program, rng) for program in programs]
    assert all(x.error == 0 for x in found)
    assert any(total_bytes(x.ours) > 0 for x in found)
    monkeypatch.setattr(
        sharded_bytes.jax_tilekern, "matmul", lambda a, b: (a @ b).at[..., 0, 0].add(1)
    )
    assert sharded_bytes.compare(mesh, programs[0], rng).error > 0
