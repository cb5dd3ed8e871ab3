"""Hardware counters: how ncu is run, what it writes, and which rung a launch belongs to."""

import argparse
import contextlib
import json
import math
import os
import stat
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ladder import counted_launches, counters, ladder_run, ncu
from benchmarks.ladder.counters import Kernel, Wanted
from benchmarks.ladder.ncu import NoCounters
from benchmarks.ladder.rung import Ladder, Problem, Rung

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


def wanted(name, *kernels, title="it"):
    """A rung that launches the kernels of these rows, or those that XLA decides on."""
    known = [Kernel(*one[:3]) for one in ncu.parse(csv_of(*kernels))]
    return Wanted("8", title, name, known or None)


def names(counted):
    return counted and [kernel["name"] for kernel in counted["kernels"]]


def test_a_rung_has_the_kernels_between_its_marker_and_the_next():
    rungs = [wanted("a"), wanted("b"), wanted("c"), wanted("d")]
    launches = ncu.parse(
        # The third launched none, and time ran out before the fourth.
        csv_of(marker(0), TILE, marker(1), NOTHING, TILE, marker(2))
    )
    first, second, third, fourth = counters.assign(launches, rungs)
    assert names(first) == ["tile"]
    assert names(second) == ["sum", "tile"]
    assert third is fourth is None
    (tile,) = first["kernels"]
    assert (tile["grid"], tile["block"]) == ([2048, 4, 1], [256, 1, 1])
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


def test_rungs_whose_kernels_are_known_follow_each_other_without_markers():
    rungs = [wanted("a", TILE), wanted("b", NOTHING, TILE), wanted("c", TILE), wanted("jnp")]
    launches = ncu.parse(csv_of(marker(0), TILE, NOTHING, TILE, TILE, marker(3), TILE, TILE))
    assert [names(one) for one in counters.assign(launches, rungs)] == [
        ["tile"], ["sum", "tile"], ["tile"], ["tile", "tile"],
    ]  # fmt: skip
    # Another problem's rung does not follow.
    rungs = [wanted("a", TILE), wanted("a", TILE, title="of another type")]
    launches = ncu.parse(csv_of(marker(0), TILE, TILE))
    assert [names(one) for one in counters.assign(launches, rungs)] == [["tile"], None]


def test_after_a_launch_that_ncu_left_out_counting_goes_on_at_the_next_marker():
    other = row("tile", "(7, 1, 1)", *["1"] * len(METRICS))
    rungs = [wanted("a", TILE), wanted("b", other), wanted("c", TILE), wanted("jnp")]
    launches = ncu.parse(csv_of(marker(0), TILE, TILE, marker(3), NOTHING))
    assert [names(one) for one in counters.assign(launches, rungs)] == [
        ["tile"], None, None, ["sum"],
    ]  # fmt: skip
    # Of two kernels one is not all.
    rungs = [wanted("a", NOTHING, TILE), wanted("jnp")]
    launches = ncu.parse(csv_of(marker(0), NOTHING, marker(1), TILE))
    assert [names(one) for one in counters.assign(launches, rungs)] == [None, ["tile"]]


def test_launches_before_any_marker_are_nobodys():
    assert counters.assign(ncu.parse(csv_of(TILE, marker(0), TILE)), [wanted("a", TILE)]) != [None]
    assert counters.assign(ncu.parse(csv_of(TILE)), [wanted("a", TILE)]) == [None]
    with pytest.raises(NoCounters, match="rung 7 of 1"):
        counters.assign(ncu.parse(csv_of(marker(7), TILE)), [wanted("a", TILE)])


def test_a_kernel_is_known_by_its_record():
    record = {"name": "tile<Padded, 8>", "grid": [256, 256, 1], "block": (32, 8, 1)}
    assert Kernel.of(record) == ("tile", (256, 256, 1), (32, 8, 1))


def test_write_efficiency_is_of_the_result_over_all_sectors_stored():
    (counted,) = counters.assign(ncu.parse(csv_of(marker(0), TILE, NOTHING, TILE)), [wanted("a")])
    # Two kernels store 32768 sectors each, of which an eighth is the result.
    assert counters.write_efficiency(counted, 2 * 32768 * 32 // 8) == 0.125
    (counted,) = counters.assign(ncu.parse(csv_of(marker(0), NOTHING)), [wanted("a")])
    assert counters.write_efficiency(counted, 4096) is None


def test_counters_as_entries_of_a_table():
    (counted,) = counters.assign(ncu.parse(csv_of(marker(0), TILE)), [wanted("a")])
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
    (tmp_path / "csv").write_text(csv_of(marker(0), TILE, marker(1), TILE))
    fake_ncu(
        f'for a; do echo "$a"; done > {tmp_path}/given; env > {tmp_path}/env\n'
        f'for a; do last="$a"; done; cp "$last" {tmp_path}/order\n'
        f'while [ "$1" != --log-file ]; do shift; done; cp {tmp_path}/csv "$2"'
    )
    rungs = [wanted("a", TILE), wanted("b"), wanted("c")]
    log = tmp_path / "log.csv"
    found = counters.count("add", rungs, 60.0, log)
    assert [bool(one) for one in found] == [True, True, False]
    # What is missing can be looked for in what ncu wrote.
    assert log.read_text() == (tmp_path / "csv").read_text()
    given = (tmp_path / "given").read_text().splitlines()
    assert given[given.index("--profile-from-start") + 1] == "off"
    assert given[given.index("--clock-control") + 1] == "none"
    assert given[given.index("--metrics") + 1].split(",") == list(counters.METRICS)
    assert given[-3:-1] == ["-m", "benchmarks.ladder.counted_launches"]
    order = json.loads((tmp_path / "order").read_text())
    kernel = ["tile", [2048, 4, 1], [256, 1, 1]]
    assert order == {
        "ladder": "add",
        "seconds": 60.0,
        "wanted": [["8", "it", "a", [kernel]], ["8", "it", "b", None], ["8", "it", "c", None]],
    }
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - The user' >&2; exit 1", r"may not read .*as root"),
        ("echo '==ERROR== Unknown' >&2; exit 3", r"counted no launches, exit status 3:\n.*Unkn"),
        ("exit 0", r"counted no launches, exit status 0"),
    ],
)
def test_an_ncu_that_fails_says_why(fake_ncu, script, message):
    fake_ncu(script)
    with pytest.raises(NoCounters, match=message):
        counters.count("add", [wanted("a")], 60.0)


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


def launched(rungs, until):
    log = []

    @contextlib.contextmanager
    def recording():
        log.append("start")
        yield
        log.append("stop")

    counted_launches.launch(
        a_ladder(log), rungs, until=until, mark=lambda index: log.append(index),
        recording=recording,
    )  # fmt: skip
    jax.effects_barrier()
    return log


def test_rungs_are_compiled_unrecorded_and_marked_where_it_takes_a_marker():
    kernel = [["k", [1], [1]]]
    rungs = [
        Wanted("3", "a 3", "a", kernel),
        Wanted("3", "a 3", "a", kernel),
        Wanted("3", "a 3", "jnp", None),
        Wanted("4", "b 4", "b", kernel),
    ]
    assert launched(rungs, math.inf) == [
        "a", "a", "start", 0, "a", "a", 2, "stop", "b", "start", 3, "b", "stop",
    ]  # fmt: skip


def test_nothing_is_launched_when_time_is_up():
    assert launched([Wanted("3", "a 3", "a", None)], time.monotonic() - 1) == []


def test_rungs_that_lack_counters_get_them(monkeypatch):
    kernel = {"name": "k<4>", "grid": [2, 1, 1], "block": [32, 1, 1]}

    def rung(name, **changes):
        record = {"name": name, "failure": None, "skipped": None, "only_kernels": False}
        return record | {"kernels": []} | changes

    known = rung("a", kernels=[kernel], only_kernels=True)
    listed = [
        {"title": "f32", "rungs": [known, rung("wrong", failure="wrong")]},
        {"title": "f64", "rungs": [rung("a"), rung("had", counters={"kernels": [1]})]},
    ]
    listed = [{"size": "8", "result_bytes": 64} | problem for problem in listed]
    counted = {"kernels": [{"store_sectors": 4}]}
    calls = []
    arguments = argparse.Namespace(ladder="matmul", counters=30.0, json=Path("r/matmul.json"))

    def count(ladder, rungs, seconds, log):
        calls.append(rungs)
        assert (ladder, seconds, log) == ("matmul", 30.0, Path("r/matmul.ncu.csv"))
        return [counted, None][: len(rungs)]

    monkeypatch.setattr(counters, "count", count)
    said = ladder_run._put_counters(listed, arguments)
    assert said == "1 of 2 rungs were not counted; --resume with --json counts them."
    of_f64 = Wanted("8", "f64", "a", None)
    assert calls == [[Wanted("8", "f32", "a", [("k", (2, 1, 1), (32, 1, 1))]), of_f64]]
    assert known["counters"] == counted | {"write_efficiency": 0.5}
    # Time was up before the second, and a resumed run asks for it alone.
    assert "counters" not in listed[1]["rungs"][0]
    assert ladder_run._put_counters(listed, arguments) is None
    assert calls[1:] == [[of_f64]]
    # Then nothing is left.
    ladder_run._put_counters(listed, arguments)
    assert len(calls) == 2
