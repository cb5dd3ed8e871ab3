"""JAX's persistent compilation cache: what one process compiles another one loads."""

import json
import os
import subprocess
import sys

import pytest

# test_sharded_processes.py has programs of most operations by default.
pytestmark = pytest.mark.thorough

# Programs of equal shapes side by side, which differ in a handler's attributes alone.
_PROCESS = """
import json, sys
import jax, jax.monitoring, jax.numpy as jnp, numpy as np
import jax_tilekern as jtk

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
counts = {"hits": 0, "misses": 0}

def count(event, **_):
    for kind in counts:
        counts[kind] += event == f"/jax/compilation_cache/cache_{kind}"

jax.monitoring.register_event_listener(count)
rng = np.random.default_rng(0)
x, w = (jnp.asarray(rng.integers(-9, 9, (24, 24)), jnp.float32) for _ in range(2))
v = x[0] + 0
cube = jnp.asarray(rng.integers(-9, 9, (8, 8, 8)), jnp.float32)
weights = jnp.asarray(rng.integers(-9, 9, (3, 24, 24)), jnp.float32)
sizes = jnp.array([7, 0, 17], jnp.int32)

def dot_general(lhs, rhs):
    return lambda x, w: jtk.dot_general(x, w, (((lhs,), (rhs,)), ((), ())))

programs = {
    "matmul": ((x, w), jtk.matmul, lambda x, w: jtk.matmul(w, x), lambda x, w: jtk.matmul(x, w.T)),
    "dot_general": ((x, w), dot_general(0, 0), dot_general(0, 1), dot_general(1, 1)),
    "matvec": ((x, v), jtk.matvec, lambda x, v: jtk.matvec(x.T, v)),
    "vecmat": ((v, x), jtk.vecmat, lambda v, x: jtk.vecmat(v, x.T)),
    "dot": ((v, v), jtk.dot, lambda v, w: jtk.dot(v[:7], w[:7])),
    "vdot": ((x, w), jtk.vdot, lambda x, w: jtk.vdot(x.T, w)),
    "ragged_dot": (
        (x, weights, sizes), jtk.ragged_dot, lambda x, w, g: jtk.ragged_dot(x, w.mT, g)
    ),
    "sum": ((cube,), *(lambda x, axis=axis: jtk.sum(x, axis) for axis in (0, 1, 2, (0, 1), None))),
    "transpose": (
        (cube,),
        *(lambda x, axes=axes: jtk.transpose(x, axes) for axes in ((1, 0, 2), (0, 2, 1), None)),
    ),
    "add": ((x, v), jtk.add, lambda x, v: jtk.add(x, v[:, None])),
    "gradient": ((x, w), jax.grad(lambda x, w: jtk.matmul(x, w).sum())),
}
found = {}
for name, (operands, *functions) in programs.items():
    before = dict(counts)
    results = [jax.jit(function)(*operands) for function in functions]
    jax.block_until_ready(results)
    found[name] = {
        "programs": len(functions),
        "results": [np.asarray(result).tolist() for result in results],
        **{kind: counts[kind] - before[kind] for kind in counts},
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Return what a first and a second process found."""
    folder = tmp_path_factory.mktemp("cache")
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS, str(folder)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "true"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return found


OPERATIONS = [
    "matmul", "dot_general", "matvec", "vecmat", "dot", "vdot", "ragged_dot", "sum", "transpose",
    "add", "gradient",
]  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_process_compiles_nothing(name, processes):
    first, second = (found[name] for found in processes)
    assert first["misses"] >= first["programs"]
    assert second["misses"] == 0
    assert second["hits"] >= second["programs"]
    assert second["results"] == first["results"]
    # All programs of an operation have the same operands, and different results.
    assert first["hits"] == 0
    results = first["results"]
    assert all(results.count(result) == 1 for result in results)
