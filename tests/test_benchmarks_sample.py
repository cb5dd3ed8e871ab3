import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import on_gpu

from benchmarks import regret
from benchmarks.calls.operations import flops
from benchmarks.command_line import main
from benchmarks.measurement import measure, rows_on_gpu
from benchmarks.records import sample_report
from benchmarks.records.sample_report import Distribution
from benchmarks.samples import product_candidates, sample, sample_run
from benchmarks.samples.sample import DRAWS, draw_sample
from benchmarks.suites.suite import _malformed
from jax_tilekern.interop.compat import mlir
from jax_tilekern.plans import gpu as gpus
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.tuning import product_timing, random_operands
from jax_tilekern.tuning.device_time import Activity, Block, Interval, Unattributed

H100 = gpus.known_gpu("sm_90")
F32 = np.dtype(np.float32)


# What is drawn.


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("operation", list(DRAWS))
def test_rows_are_well_formed_and_quick(operation, device):
    limits = sample._LIMITS[device]
    rows = draw_sample(operation, device, 200, 5).rows
    assert not any(map(_malformed, rows))
    assert all(row.lhs != row.out for row in rows if row.operation == "transpose")
    assert len({row.name for row in rows}) == 200
    assert all(row.bytes <= limits.bytes and flops(row) <= limits.operations for row in rows)


@pytest.mark.parametrize("operation", list(DRAWS))
def test_a_row_depends_on_the_seed_and_its_index_alone(operation):
    few, many = (draw_sample(operation, "gpu", count, 6).rows for count in (5, 20))
    assert few == many[:5]
    assert [row.sizes for row in few] == [row.sizes for row in many[:5]]
    assert few != draw_sample(operation, "gpu", 5, 7).rows


def test_even_seeds_are_for_fitting():
    assert [sample.purpose(seed) for seed in (0, 1, 2)] == ["fit", "report", "fit"]


# What is reported.


def timed_row(ours, peer, group="g", candidates=(), peer_error=0.0):
    seconds = {
        name: {"median": value} for name, value in (("ours", ours), ("peer", peer))
    } | {"ratio": {"median": peer / ours}}  # fmt: skip
    return {
        "name": f"{group} {ours} {peer}",
        "group": group,
        "error": {"peer": peer_error},
        "seconds": seconds,
        "candidates": candidates,
        "others": {},
    }


def test_the_distribution_is_of_the_ratios():
    found = Distribution.of([0.5, 1.0, 1.0, 2.0])
    assert found.geometric_mean == pytest.approx(1.0)
    assert found.tenth_percentile == pytest.approx(0.65)
    assert (found.worst, found.slower) == (0.5, 0.25)


def test_what_the_peer_gets_wrong_does_not_count():
    rows = [timed_row(1.0, 2.0), timed_row(3.0, 1.0, peer_error=1.0)]
    sampled = {"seed": 3, "purpose": "report"}
    record = {"operation": "matmul", "sample": sampled, "rows": rows}
    first, wrong = sample_report.sample_summary(record)
    assert first.startswith("1 calls drawn")
    assert wrong == "The peer's result is wrong, so these do not count: g 3.0 1.0."


# The command.


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Leave out what takes long and says nothing of samples."""
    monkeypatch.setattr(measure, "_LONGEST_CHAIN", 1)
    bandwidths = {"read_bytes_per_second": 1e10, "copy_bytes_per_second": 1e10}
    monkeypatch.setattr(sample_run, "bandwidths", lambda: bandwidths)


def run(*arguments, operation="add"):
    return main([operation, "--seed", "2", "--seconds", "0.01", *arguments])


@pytest.mark.skipif(on_gpu(), reason="measures on a CPU")
@pytest.mark.thorough
def test_a_sample_is_measured_and_continued(tmp_path, capsys):
    path = tmp_path / "sample.json"
    assert run("--sample", "3", "--part", "0/2", "--json", str(path)) == 0
    assert run("--sample", "5", "--resume", "--json", str(path)) == 0
    record = json.loads(path.read_text())
    assert record["sample"] == {"seed": 2, "purpose": "fit"}
    assert [row["name"].partition(":")[0] for row in record["rows"]] == [*"01234"]
    # The first run's rows stayed.
    first = {row["run"] for row in record["rows"]}
    assert all(row["failure"] is None and row["seconds"] for row in record["rows"])
    assert len(first) <= 2
    assert "5 calls drawn with seed 2" in capsys.readouterr().out


@pytest.mark.skipif(on_gpu(), reason="measures on a CPU")
@pytest.mark.parametrize("operation", [name for name in DRAWS if name not in ("add", "decode")])
@pytest.mark.one_in(6)
@pytest.mark.thorough
def test_every_operation_has_samples(operation, capsys):
    assert run("--sample", "2", operation=operation) == 0
    assert "2 calls drawn with seed 2" in capsys.readouterr().out


# The way of a GPU, with plans that the CPU executes.


@dataclasses.dataclass(frozen=True)
class JaxPlan:
    function: object


@dataclasses.dataclass(frozen=True)
class JaxCandidate:
    key: str
    function: object
    cycles: float = 1000.0

    def plan(self, gpu):
        if isinstance(self.function, Exception):
            raise self.function
        return JaxPlan(self.function)


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Make samples on this CPU as on an H100, with one candidate of each kind for each row."""

    def emit(ctx, lhs, rhs, *, plan, result):
        return mlir.lower_fun(plan.function, multiple_results=False)(ctx, lhs, rhs)

    product = Product(MatmulGeometry((), 64, 64, 64, (64, 1), (64, 1), (64, 1)), *[F32] * 3, "f32")
    right = functools.partial(jnp.matmul, precision="highest")
    found = [
        JaxCandidate("right", right),
        JaxCandidate("wrong", lambda a, b: right(a, b) + 1),
        JaxCandidate("unplanned", ValueError("too large")),
        JaxCandidate("not asked for", right),
    ]
    mlir.register_lowering(product_timing._planned, emit, platform="cpu")
    monkeypatch.setattr(random_operands, "_MOST_COPIES", 2)
    monkeypatch.setattr(rows_on_gpu, "_MOST_CALLS", 2)
    monkeypatch.setattr(product_candidates, "products_of", lambda *_: [product])
    monkeypatch.setattr(product_candidates, "candidates", lambda *_: found)
    monkeypatch.setattr(regret, "current_gpu", lambda: H100)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def profiled(sides, calls, order):
    """Run blocks and say that each took a millisecond a call."""
    blocks = []
    for side in order:
        activities = []
        for i in range(calls[side]):
            sides[side]()
            activities.append(Activity(i * 1e6, (i + 1) * 1e6, f"kernel of {side}"))
        blocks.append(Block(side, Interval(0.0, 2e6 * calls[side]), activities))
    return blocks


def unclear(sides, calls, order):
    raise Unattributed("no device")


@pytest.mark.skipif(on_gpu(), reason="plans are executed by the CPU")
@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("profiler", [profiled, unclear])
@pytest.mark.thorough
def test_right_candidates_are_timed(tmp_path, monkeypatch, profiler):
    monkeypatch.setattr(rows_on_gpu, "run_blocks", profiler)
    path = tmp_path / "regret.json"
    small = draw_sample("matmul", "cpu", 4, 2)
    monkeypatch.setattr(regret, "draw_sample", lambda *_: small)
    arguments = ("--sample", "4", "--candidates", "3", "--without-xla", "--json", str(path))
    assert main(["regret", "matmul", *arguments]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        assert list(row["microseconds"]) == ["right"]
        assert "at most" in row["failures"]["wrong"]
        assert "too large" in row["failures"]["unplanned"]
        assert row["product"].startswith("f32 64x64x64")
        if profiler is profiled:
            assert row["microseconds"]["right"] == pytest.approx(1e3)
