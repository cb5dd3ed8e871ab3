"""Descriptions of the operations: random calls, the same in plain JAX, and bounds on errors."""

from __future__ import annotations

from benchmarks.catalog import (
    arrays,
    attention,
    attention_passes,
    convolution,
    cuda_kernel,
    decoding_products,
    epilogues,
    grouped,
    lanes,
    linalg,
    mixture,
    optimisers,
    products,
    quantised,
    scans,
    segments,
    selection,
)

FAMILIES = (
    arrays, attention, convolution, cuda_kernel, epilogues, grouped, lanes, linalg, mixture,
    optimisers, products, quantised, scans, segments, selection,
)  # fmt: skip
DESCRIPTIONS = {x.name: x for family in FAMILIES for x in family.DESCRIPTIONS}
# What ``sample`` times.
SAMPLED = {name: x for name, x in DESCRIPTIONS.items() if not x.on_host}
SAMPLED |= {
    x.name: x for family in (attention_passes, decoding_products) for x in family.DESCRIPTIONS
}
# Public functions that compute nothing by themselves.
NOT_OPERATIONS = {
    "cost_analysis", "cxx_type", "explain", "export_checks", "gpu_target", "policy", "strict",
    "tune", "out_of_core.plan",
}  # fmt: skip
