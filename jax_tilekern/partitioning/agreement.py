"""A check that the processes of a program choose kernels by the same data.

Each process plans the calls on its own devices. If its data of a device differ from the data of
another process, their kernels differ, and so may the bits of values that both have.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from jax._src.distributed import global_state as _global_state

from jax_tilekern.plans.cpu import current_cpu
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.policy.model import data_digest
from jax_tilekern.plans.tuned import tuned_digest

_lock = threading.Lock()
# The digests that this process has told the others for each device, first to last.
_told: dict[str, list[str]] = {}


def require_agreement(platform: str) -> None:
    """Raise an error if another process with the same kind of device decides by other data.

    Each process publishes what it decides by, whenever that changes. The processes of a program
    change it in the same order, so the n-th states are compared.
    """
    client = _global_state.client
    if client is None or _global_state.num_processes == 1:
        return
    try:
        device, state = _state(platform)
    except NoGpu:
        return
    with _lock:
        told = _told.setdefault(device, [])
        if not told or told[-1] != state:
            told.append(state)
            _publish(client, f"jax_tilekern/{device}/{len(told)}", state)


def _state(platform: str) -> tuple[str, str]:
    """Return the name of this process's device, and what decides between kernels for it."""
    from jax_tilekern import __version__

    content = {"version of jax_tilekern": __version__}
    if platform == "cuda":
        device = current_gpu().name
        content["tuned choices"] = tuned_digest(current_gpu())
    else:
        device = current_cpu().name
    content["data of the policy"] = data_digest(device)
    return device, json.dumps(content)


def _publish(client: Any, key: str, state: str) -> None:
    process = _global_state.process_id
    client.key_value_set(f"{key}/{process}", state, allow_overwrite=True)
    own = json.loads(state)
    for path, text in client.key_value_dir_get(key):
        other = json.loads(text)
        differing = [name for name in own if own[name] != other[name]]
        if differing:
            raise RuntimeError(
                f"processes {process} and {path.rpartition('/')[2]} choose kernels by different "
                f"{' and '.join(differing)}: "
                + "; ".join(f"{own[name]!r} and {other[name]!r}" for name in differing)
                + ". Install the same jax_tilekern for every process, and give all the same file "
                "of tuned choices."
            )
