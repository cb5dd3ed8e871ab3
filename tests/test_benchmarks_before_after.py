"""``python -m benchmarks before_after``: two checkouts' kernels, old against new."""

import pytest

from benchmarks import before_after
from benchmarks.command_line import main
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc


def planned(key, *offered):
    return {"key": key, "offered": [*filter(None, [key]), *offered]}


def test_rows_are_compared_by_the_old_keys_under_their_present_names():
    old = {
        "same": [planned("64x64")],
        "renamed": [planned("128x64 alternate flipped"), planned("parts 64x64")],
        "other": [planned("64x64", "128x64")],
        "xla now": [planned("64x64")],
        "xla": [planned("64x64"), planned(None, "64x64")],
        "gone": [planned("64x8")],
        "fewer": [planned("64x64"), planned("64x64")],
        "broken": "ValueError: no",
        "removed": [planned("64x64")],
    }
    new = {
        "same": [planned("64x64")],
        "renamed": [planned("128x64 ping-pong swapped"), planned("split float16 64x64")],
        "other": [planned("128x64", "64x64")],
        "xla now": [planned(None, "64x64")],
        "xla": [planned("64x64"), planned("64x64")],
        "gone": [planned("64x16", "64x64")],
        "fewer": [planned("64x64")],
        "broken": [planned("64x64")],
    }
    renamed = {"alternate": "ping-pong", "flipped": "swapped", "parts": "split float16"}
    found = before_after.common(old, new, renamed)
    assert found["same"] == {"old_keys": ["64x64"], "keys": ["64x64"]}
    assert found["renamed"]["keys"] == ["128x64 ping-pong swapped", "split float16 64x64"]
    assert "chosen" not in found["renamed"]
    assert found["other"]["keys"] == ["64x64"]
    assert found["other"]["chosen"] == ["128x64"]
    assert found["xla now"]["keys"] == ["64x64"]
    assert found["xla now"]["chosen"] == [None]
    for name, why in [
        ("xla", "XLA computes"), ("gone", "no longer offered: 64x8"), ("fewer", "2 problems"),
        ("broken", "old: ValueError: no"), ("removed", "no such row"),
    ]:  # fmt: skip
        assert why in found[name]["why"], name
        assert "keys" not in found[name]


def test_the_old_keys_have_a_job_on_both_sides_and_other_kernels_one_of_their_own():
    row = {"name": "x", "old_keys": ["a"], "keys": ["b"]}
    assert before_after._jobs(row) == {"old": {"x": ["a"]}, "new": {"x": ["b"]}}
    assert before_after._jobs({**row, "chosen": [None]}) == before_after._jobs(row)
    chosen = before_after._jobs({**row, "chosen": ["c"]})["new"]
    assert chosen == {"x": ["b"], "x, as chosen": ["c"]}


def test_a_ratio_is_the_median_of_rounds():
    # A round that both sides are slow in does not count more than another.
    assert before_after.ratio([2.0, 30.0, 2.2], [1.0, 20.0, 2.0]) == 1.5


def row(group, name, ratio, **more):
    return {"group": group, "name": name, "ratio": ratio, "identical": True, "old_us": [1.0],
            "keys": ["64x64"], "same_machine_code": False, **more}  # fmt: skip


def test_groups_have_geometric_means_and_a_worst_row():
    rows = [row("a", "x", 0.5), row("a", "y", 2.0, chosen_ratio=4.5), row("b", "z", 1.1)]
    rows.append({"group": "c", "name": "untimed", "why": "no longer offered: 64x8"})
    found = before_after.summaries(rows)
    assert [*found] == ["a", "b"]
    assert found["a"] == (2, pytest.approx(1.0), ("x", 0.5), pytest.approx(1.5))
    assert found["b"].mean == pytest.approx(1.1)


def test_a_group_below_the_limit_is_a_failure(capsys):
    assert before_after._report([row("a", "x", 0.991)]) == 0
    assert before_after._report([row("a", "x", 1.2), row("b", "y", 0.989)]) == 1
    assert "b: 1 rows, 0.989 (below 0.99), worst 0.989 y" in capsys.readouterr().out


def test_results_agree_by_their_bytes_or_differ_by_a_share_of_their_size():
    old = {"digest": "a", "sample": [3.0, -3.0]}
    assert before_after.agreement(old, old) == {"identical": True, "difference": 0.0}
    new = {"digest": "b", "sample": [3.0, -2.7]}
    assert before_after.agreement(old, new)["difference"] == pytest.approx(0.1)
    assert before_after.agreement(old, new)["identical"] is False
    large = {"digest": None, "sample": []}
    assert before_after.agreement(large, large) == {"identical": None}


def test_batches_have_every_compared_row_once_and_the_first_of_each_group_first():
    rows = [
        {"group": group, "name": f"{group}{i}", "bytes": 1 << 30, "keys": []}
        for group in "ab"
        for i in range(9)
    ]
    batches = [[x["name"] for x in b] for b in before_after._batches([*rows, {"group": "c"}])]
    names = [name for batch in batches for name in batch]
    assert names[:4] == ["a0", "b0", "a1", "b1"]
    assert sorted(names) == sorted(row["name"] for row in rows)
    assert max(map(len, batches)) == 8


def test_a_checkout_has_its_own_machine_code(capsys):
    try:
        nvrtc()
    except NvrtcNotFound as error:
        pytest.skip(str(error))
    command = ["before_after", "--old", str(before_after._ROOT), "--suites", "vdot-h100"]
    assert main([*command, "--rows", "many", "--compile-only"]) == 0
    out = capsys.readouterr().out
    assert "vdot: many: 2 of 3 rows have a kernel in both" in out
    assert "vdot: many: machine code is the same in 2 of 2 rows" in out
