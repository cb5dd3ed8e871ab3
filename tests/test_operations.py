"""An operation of which a piece is missing fails here, with the names of all that it lacks."""

import inspect
import operator
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from test_messages import CALLS

import jax_tilekern as jtk
from benchmarks import listings
from benchmarks.catalog import NOT_OPERATIONS
from benchmarks.catalog.oracles import ORACLES

SANITIZE = Path(__file__).parent / "sanitize"
# Tests of their own have the errors of these.
_OTHER_ERRORS = {
    "all_gather_matmul", "matmul_reduce_scatter", "attention", "cuda_kernel", "muon", "tune",
    "patch", "strict", "gpu_target", "export_checks", "cxx_type",
}  # fmt: skip
# Descriptions of these have the same in plain JAX themselves.
_NO_ORACLES = {"cuda_kernel", "fuse", "kernel", "patch", "segment_plan"}


def has_errors(name):
    """Those of JAX raise JAX's errors."""
    of_jax = (hasattr(module, name) for module in (jnp, jnp.linalg, jax.lax, jax.nn, jax.ops))
    return "." in name or any(of_jax) or name in CALLS or name in _OTHER_ERRORS


def has_oracle(name):
    try:
        return name in _NO_ORACLES or bool(operator.attrgetter(name)(ORACLES))
    except AttributeError:
        return False


def lacking(name):
    pieces = {
        "a docstring": inspect.getdoc(listings.function(name)),
        "a description in benchmarks/catalog": name in listings.variants(),
        "the same in plain JAX in benchmarks/catalog/oracles.py": has_oracle(name),
        f"`::: jax_tilekern.{name}` in docs/reference": name in listings.pages(),
        "its errors in CALLS of tests/test_messages.py": has_errors(name),
    }
    return [piece for piece, is_there in pieces.items() if not is_there]


def report():
    found = {name: lacking(name) for name in sorted(listings.public())}
    return "\n".join(f"{name} lacks {'; '.join(found[name])}" for name in found if found[name])


def test_no_operation_lacks_a_piece():
    assert not report(), report()


def test_what_is_described_is_public():
    assert set(listings.variants()) <= listings.public()
    for name in NOT_OPERATIONS:
        assert callable(listings.function(name))
        assert has_errors(name), name


def test_each_missing_piece_is_named(monkeypatch):
    monkeypatch.setattr(jtk, "rows_of", lambda x: x, raising=False)
    monkeypatch.setattr(jtk, "__all__", [*jtk.__all__, "rows_of"])
    assert report() == (
        "rows_of lacks a docstring; a description in benchmarks/catalog; the same in plain JAX in "
        "benchmarks/catalog/oracles.py; `::: jax_tilekern.rows_of` in docs/reference; its errors "
        "in CALLS of tests/test_messages.py"
    )


def test_kernels_run_under_compute_sanitizer():
    command = [sys.executable, SANITIZE / "commands.py", "racecheck"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert "tests/sanitize/gpu_calls.py 'top_k'" in found
    assert "tests/sanitize/gpu_fp8.py products" not in found
    scripts = {line.split("/")[-1].partition(" ")[0] for line in found}
    assert scripts == {x.name for x in SANITIZE.glob("gpu_*.py")} - {"gpu_attention.py"}
