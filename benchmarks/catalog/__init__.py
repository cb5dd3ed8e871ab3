"""Descriptions of the operations: random calls, the same in plain JAX, and bounds on errors."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.catalog.call import Description

_MODULES = {
    x.name: importlib.import_module(f"{__name__}.{x.name}") for x in pkgutil.iter_modules(__path__)
}
# The descriptions of each module.
FAMILIES: dict[str, list[Description]] = {
    name: module.DESCRIPTIONS
    for name, module in _MODULES.items()
    if hasattr(module, "DESCRIPTIONS")
}
DESCRIPTIONS = {x.name: x for family in FAMILIES.values() for x in family}
# What ``sample`` times: some modules have what it alone draws.
SAMPLED = {name: x for name, x in DESCRIPTIONS.items() if not x.on_host}
SAMPLED |= {x.name: x for module in _MODULES.values() for x in getattr(module, "SAMPLES", ())}
# Public functions that compute nothing by themselves.
NOT_OPERATIONS = {
    "cost_analysis", "cxx_type", "explain", "export_checks", "gpu_target", "policy", "strict",
    "tune", "out_of_core.plan",
}  # fmt: skip
