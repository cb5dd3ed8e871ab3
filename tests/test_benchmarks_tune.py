"""``tune`` of the benchmarks: the products of a suite."""

import jax.numpy as jnp
import pytest

import jax_tilekern as jtk
from benchmarks import tune
from benchmarks.command_line import main
from benchmarks.suites.suite import load_suite
from jax_tilekern.cli import tune as tuning_command


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


def test_most_rows_of_the_suite_have_products():
    calls = [tune.product_call(row) for row in load_suite("matmul-h100").rows]
    with jtk.gpu_target("sm_90"):
        found = tuning_command._products(calls)
    assert len(found) > 0.7 * len(calls)
    assert all(jnp.dtype(p.out_dtype) for p in found)
