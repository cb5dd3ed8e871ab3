"""Hardware counters: how ncu is run, what it writes, and which rung a launch belongs to."""

import contextlib
import json
import math
import os
import stat
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tilekern.cli.ladder import counted_launches, counters, ladder_run, ncu
from jax_tilekern.cli.ladder.ncu import Launch, NoCounters
from jax_tilekern.cli.ladder.rung import Ladder, Problem, Rung

# What ncu writes.

NAMES = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
    "Block Size", "Grid Size", "Device", "CC",
)  # fmt: skip
STALL = counters._STALL.format
METRICS = {
    "gpu__time_duration.sum": "usecond",
    "launch__registers_per_thread": "register/thread",
    "dram__bytes_write.sum": "Mbyte",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "sector",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": "",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "sector",
    "smsp__inst_executed_op_shared_ld.sum": "inst",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "",
    STALL("long_scoreboard"): "inst",
    STALL("wait"): "inst",
    STALL("barrier"): "inst",
}


def row(kernel, grid, *values, number=0):
    launch = (number, 17, "python3.12", "127.0.0.1", kernel, 1, 7, "(256, 1, 1)", grid, 0, "9.0")
    return [*map(str, launch), *values]


def csv_of(*rows):
    table = [
        [*NAMES, *METRICS],
        [*([""] * len(NAMES)), *METRICS.values()],
        *rows,
    ]
    lines = [",".join(f'"{entry}"' for entry in entries) for entries in table]
    noise = ["==PROF== Connected to process 17 (/usr/bin/python3.12)", "I0000 gpu: something"]
    return "\n".join([*noise, *lines, "==PROF== Disconnected from process 17", ""])


def marker(index):
    return row(counters.MARKER, f"({index + 1}, 1, 1)", *["0"] * len(METRICS))


TILE = row(
    "void ns::tile<Padded, (int)8>(const float *, float *)", "(2048, 4, 1)",
    "12.5", "32", "4.19", "1,024", "4,096", "1024", "32768", "512", "15,872", "9.5", "2.25",
    "11.004",
)  # fmt: skip
NOTHING = row("sum", "(1, 1, 1)", "1", "16", "0", "0", "0", "0", "0", "0", "0", "nan", "n/a", "0")


def test_launches_are_read_from_the_raw_page_in_whatever_units():
    (tile,) = ncu.parse(csv_of(TILE))
    assert (tile.name, tile.grid, tile.block) == ("tile", (2048, 4, 1), (256, 1, 1))
    assert tile.metrics["gpu__time_duration.sum"] == 12500
    assert tile.metrics["dram__bytes_write.sum"] == pytest.approx(4.19e6)
    assert tile.metrics["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == 4096
    (nothing,) = ncu.parse(csv_of(NOTHING))
    # What ncu cannot tell is no number.
    assert STALL("long_scoreboard") not in nothing.metrics
    assert STALL("wait") not in nothing.metrics
    assert nothing.metrics[STALL("barrier")] == 0
    assert ncu.parse("==ERROR== no kernels were profiled") == []


def test_a_rung_has_the_kernels_between_its_marker_and_the_next():
    launches = ncu.parse(
        # Of the second rung both kernels; the third launched none before time ran out.
        csv_of(marker(0), TILE, marker(1), NOTHING, TILE, marker(2), marker(2))
    )
    first, second, third, fourth = counters.assign(launches, 4)
    assert [kernel["name"] for kernel in first["kernels"]] == ["tile"]
    assert [kernel["name"] for kernel in second["kernels"]] == ["sum", "tile"]
    assert third is fourth is None
    (tile,) = first["kernels"]
    assert tile["nanoseconds"] == 12500
    assert tile["registers"] == 32
    assert tile["load_sectors_per_request"] == 4
    assert tile["store_sectors_per_request"] == 32
    assert tile["load_conflicts_per_request"] == 31
    assert tile["store_conflicts_per_request"] is None
    assert tile["compute_percent"] is None
    assert list(tile["stalls"].items()) == [
        ("barrier", 11.004), ("long_scoreboard", 9.5), ("wait", 2.25),
    ]  # fmt: skip
    assert counters.longest_kernel(second)["name"] == "tile"
    assert second["kernels"][0]["stalls"] == {}
    json.dumps(first)


def test_a_problem_repeats_the_marker_that_closes_the_one_before():
    launches = ncu.parse(csv_of(marker(0), TILE, marker(1), marker(1), TILE, marker(2)))
    assert all(counters.assign(launches, 2))


def test_launches_that_no_marker_explains_are_an_error():
    with pytest.raises(NoCounters, match="tile before any marker"):
        counters.assign(ncu.parse(csv_of(TILE, marker(0))), 1)
    with pytest.raises(NoCounters, match="rung 7 of 1"):
        counters.assign(ncu.parse(csv_of(marker(7), TILE)), 1)


def test_counters_as_entries_of_a_table():
    (counted,) = counters.assign(ncu.parse(csv_of(marker(0), TILE)), 1)
    cells = list(counters.cells(counted))
    assert len(cells) == len(counters.HEADINGS)
    assert cells[0] == "4.0, 32.0"
    assert cells[1] == "31.0, -"
    assert cells[-1] == "barrier 11.0, long_scoreboard 9.5"


# How it is run.


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Return a function that makes an ``ncu`` of a shell script."""

    def make(script):
        path = tmp_path / "ncu"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def test_one_ncu_counts_all_rungs(fake_ncu, tmp_path):
    (tmp_path / "csv").write_text(csv_of(marker(0), TILE, marker(1), TILE, marker(2)))
    fake_ncu(
        f'for a; do echo "$a"; done > {tmp_path}/given; env > {tmp_path}/env\n'
        f'for a; do last="$a"; done; cp "$last" {tmp_path}/order\n'
        f'while [ "$1" != --log-file ]; do shift; done; cp {tmp_path}/csv "$2"'
    )
    wanted = [{"size": "8", "title": "it", "name": name} for name in ("a", "b", "c")]
    found = counters.count("add", wanted, 60.0)
    assert [bool(one) for one in found] == [True, True, False]
    given = (tmp_path / "given").read_text().splitlines()
    assert given[given.index("--profile-from-start") + 1] == "off"
    assert given[given.index("--clock-control") + 1] == "none"
    assert given[given.index("--metrics") + 1].split(",") == list(counters.METRICS)
    assert given[-3:-1] == ["-m", "jax_tilekern.cli.ladder.counted_launches"]
    order = json.loads((tmp_path / "order").read_text())
    assert order == {"ladder": "add", "seconds": 60.0, "wanted": wanted}
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - The user' >&2; exit 1", r"may not read .*as root"),
        ("echo '==ERROR== Unknown' >&2; exit 3", r"counted 0 launches, exit status 3:\n.*Unkn"),
        ("exit 0", r"counted 0 launches, exit status 0"),
    ],
)
def test_an_ncu_that_fails_says_why(fake_ncu, script, message):
    fake_ncu(script)
    with pytest.raises(NoCounters, match=message):
        counters.count("add", [{"size": "8", "title": "it", "name": "a"}], 60.0)


def test_metrics_are_named_once_and_stalls_by_reason():
    assert len(set(counters.METRICS)) == len(counters.METRICS)
    assert STALL("gmma") in counters.METRICS


# What is launched.


def a_ladder(log):
    def rung(name):
        def run(x):
            jax.debug.callback(lambda: log.append(name))
            return 2 * x

        return Rung(name, (run,), "x/01_y.cu")

    operand = jax.ShapeDtypeStruct((64,), np.dtype(np.float32))

    def problems(sizes):
        return tuple(
            Problem(f"{what} {sizes[0]}", {"size": sizes[0]}, (operand,), (rung(what),),
                    (Rung("jnp", (jnp.negative,)),), bytes=1)
            for what in ("a", "b")
        )  # fmt: skip

    return Ladder((("size",),), ("1",), problems)


def launched(wanted, until):
    log = []

    @contextlib.contextmanager
    def recording():
        log.append("start")
        yield
        log.append("stop")

    counted_launches.launch(
        a_ladder(log), wanted, until=until, mark=lambda index: log.append(index),
        recording=recording,
    )  # fmt: skip
    jax.effects_barrier()
    return log


def test_rungs_are_compiled_unrecorded_and_launched_after_their_markers():
    wanted = [
        {"size": "3", "title": "a 3", "name": "a"},
        {"size": "3", "title": "a 3", "name": "jnp"},
        {"size": "4", "title": "b 4", "name": "b"},
    ]
    assert launched(wanted, math.inf) == [
        "a", "start", 0, "a", 1, 2, "stop", "b", "start", 2, "b", 3, "stop",
    ]  # fmt: skip


def test_nothing_is_launched_when_time_is_up():
    wanted = [{"size": "3", "title": "a 3", "name": "a"}]
    assert launched(wanted, time.monotonic() - 1) == []


def test_rungs_that_lack_counters_get_them(monkeypatch):
    def rung(name, **changes):
        return {"name": name, "failure": None, "skipped": None} | changes

    listed = [
        {"size": "8", "title": "f32", "rungs": [rung("a"), rung("wrong", failure="wrong")]},
        {"size": "8", "title": "f64", "rungs": [rung("a"), rung("had", counters={"kernels": [1]})]},
    ]
    calls = []

    def count(ladder, wanted, seconds):
        calls.append((ladder, [(one["title"], one["name"]) for one in wanted], seconds))
        return [{"kernels": ["counted"]}, None][: len(wanted)]

    monkeypatch.setattr(counters, "count", count)
    ladder_run._put_counters(listed, "matmul", 30.0)
    assert calls == [("matmul", [("f32", "a"), ("f64", "a")], 30.0)]
    assert listed[0]["rungs"][0]["counters"] == {"kernels": ["counted"]}
    # Time was up before the second, and a resumed run asks for it alone.
    assert "counters" not in listed[1]["rungs"][0]
    ladder_run._put_counters(listed, "matmul", 30.0)
    assert calls[1] == ("matmul", [("f64", "a")], 30.0) or len(calls) == 2


def test_a_launch_is_described_by_its_shape_and_name():
    launch = Launch("k", (1, 2, 3), (32, 1, 1), {})
    (counted,) = counters.assign([Launch(counters.MARKER, (1,), (1,), {}), launch], 1)
    assert counted["kernels"][0]["grid"] == [1, 2, 3]
    assert counted["kernels"][0]["name"] == "k"
