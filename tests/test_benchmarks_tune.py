"""``tune`` of the benchmarks: the products of a suite."""

import pytest

from benchmarks import tune
from benchmarks.command_line import main


def test_rows_of_a_suite(monkeypatch):
    given = []
    monkeypatch.setattr(tune, "tune_calls", lambda calls, arguments: given.extend(calls) or 0)
    assert main(["tune", "--suite", "matmul-h100", "--rows", "bf16 4096³ ABᵀ"]) == 0
    (call,) = given
    assert call.name == "bf16 4096³ ABᵀ"
    assert [operand.shape for operand in call.operands] == [(4096, 4096), (4096, 4096)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "none"], "no suite 'none'"),
        (["--suite", "sum-h100"], "no products"),
        (["--rows", "nothing of the kind"], "no row"),
        (["--seconds", "0"], "positive"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
