"""The choice between the library's kernels and XLA's, for every operation and device.

A planner states the workload and proposes candidates; :func:`choose` picks one of them, or XLA's
own operation. The models of devices are data, one file a device in ``data/``:
``python -m benchmarks fit_policy`` fits them to measured calls.
"""

from jax_tilekern.plans.policy.choice import (
    PolicyChoice,
    choose,
    plan_choice,
    plan_fused,
    predicted_times,
)
from jax_tilekern.plans.policy.setting import current_policy, policy, why_excluded

__all__ = [
    "PolicyChoice",
    "choose",
    "current_policy",
    "plan_choice",
    "plan_fused",
    "policy",
    "predicted_times",
    "why_excluded",
]
