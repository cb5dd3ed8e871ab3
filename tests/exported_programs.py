"""Programs that a release exports and later releases run, with the values that they compute.

Before a release, in an environment with the oldest supported JAX, because JAX loads programs of
older versions alone: ``PYTHONPATH=. python tests/exported_programs.py tests/exported``
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    # Programs name this file without its folder.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")

import numpy as np
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk

X = (np.arange(24 * 16) % 7 - 3).reshape(24, 16).astype(np.float32)
Y = (np.arange(16 * 8) % 5 - 2).reshape(16, 8).astype(np.float32)
EXPERTS = np.stack([Y, -Y, 2 * Y])
SIZES = np.array([5, 0, 16], np.int32)
# Eight matrices, symmetric and positive definite.
A = (4 * np.eye(4) + np.arange(8)[:, None, None]).astype(np.float32)
B = np.tile(X[:4], (8, 1, 1))

# For each program: a function, its operands and its results by NumPy.
ON_CPU = {
    "matmul": (jtk.matmul, (X, Y), X @ Y),
    "matmul_gradient": (
        jax.grad(lambda x, y: (jtk.matmul(x, y) ** 2).sum()), (X, Y), 2 * X @ Y @ Y.T,
    ),
    "ragged_dot": (
        jtk.ragged_dot, (X, EXPERTS, SIZES),
        np.concatenate([X[:5] @ Y, X[5:21] @ (2 * Y), np.zeros((3, 8), np.float32)]),
    ),
    "transpose": (jtk.transpose, (X,), X.T),
    "sum": (lambda x: jtk.sum(x, 1), (X,), X.sum(1)),
    "add": (jtk.add, (X, X), X + X),
    "segment_sum": (
        lambda x, ids: jtk.segment_sum(x, ids, 2), (X, np.arange(24) % 2),
        np.stack([X[::2].sum(0), X[1::2].sum(0)]),
    ),
    "inv": (jtk.linalg.inv, (A,), np.linalg.inv(A)),
    "det": (jtk.linalg.det, (A,), np.linalg.det(A)),
    "cholesky": (jtk.linalg.cholesky, (A,), np.linalg.cholesky(A)),
    "solve": (jtk.linalg.solve, (A, B), np.linalg.solve(A, B)),
}  # fmt: skip
# Each of two devices has half of the rows of the first operand.
ON_TWO_DEVICES = {"sharded_matmul": ON_CPU["matmul"]}
# The machine code is that of compute capability 9.0.
ON_HOPPER = {"cuda_matmul": ON_CPU["matmul"]}
PROGRAMS = ON_CPU | ON_TWO_DEVICES | ON_HOPPER


def shardings():
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices("cpu")[:2])
    return NamedSharding(mesh, P("rows")), NamedSharding(mesh, P())


def serialized(name):
    """Return the program of that name, exported."""
    function, operands, _ = PROGRAMS[name]
    jitted = jax.jit(function, in_shardings=shardings() if name in ON_TWO_DEVICES else None)
    platform = "cuda" if name in ON_HOPPER else "cpu"
    with jtk.gpu_target("sm_90"):
        exported = export.export(jitted, platforms=[platform], disabled_checks=jtk.export_checks())(
            *operands
        )
    assert "jax_tilekern_" in exported.mlir_module()
    return exported.serialize()


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / jtk.__version__
    folder.mkdir(parents=True)
    with jtk.policy("kernels"):
        for program in PROGRAMS:
            (folder / f"{program}.bin").write_bytes(serialized(program))
