"""Kernels for calls that planners otherwise leave to XLA, most of them small."""

from jax_tilekern.ops import contraction
from jax_tilekern.plans import add, cpu
from jax_tilekern.plans.gemm import select as products
from jax_tilekern.plans.reduction import select as sums
from jax_tilekern.plans.transpose import select as transposes

# As they are before tests change them.
FEW_ELEMENTS = cpu._FEW_ELEMENTS


def keep_small_calls(monkeypatch):
    """Plan kernels for small calls, too. Processes that a test starts call this."""
    monkeypatch.setattr(cpu, "_FEW_ELEMENTS", dict.fromkeys(cpu._FEW_ELEMENTS, 0))
    monkeypatch.setattr(contraction, "small_left_to_xla", lambda _: None)
    monkeypatch.setattr(products, "predicted_to_be_xlas", lambda *_: None)
    monkeypatch.setattr(sums, "small_sum_left_to_xla", lambda *_: None)
    monkeypatch.setattr(transposes, "small_left_to_xla", lambda *_: None)
    monkeypatch.setattr(add, "left_to_xla", lambda *_: None)
