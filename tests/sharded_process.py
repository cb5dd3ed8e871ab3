"""One process of a test of sharded programs: ``python sharded_process.py COMMAND ...``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

COMMAND, *ARGUMENTS = sys.argv[1:]
PLATFORM = ARGUMENTS.pop() if COMMAND == "distributed" else "cpu"
DEVICES = 4 if COMMAND in ("distributed", "disagree") else 8
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = PLATFORM
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import numpy as np
from jax import export, lax, monitoring
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk
from jax_tilekern.partitioning import agreement

TYPES = (AxisType.Auto, AxisType.Auto)
A = (np.arange(16 * 32) % 5 - 2).reshape(16, 32).astype(np.float32)
B = (np.arange(32 * 8) % 3 - 1).reshape(32, 8).astype(np.float32)
E = np.stack([B, -B, 2 * B, B])
SIZES = np.array([5, 0, 7, 3], np.int32)
# Two matrices of more than 16 rows for each of eight devices, which are left to LAPACK. Even powers
# of two, and their roots, are exact.
M = np.diag(np.tile([1, 4, 1, 0.25], 6)) * 4.0 ** (np.arange(16) % 2)[:, None, None]
M = M.astype(np.float32)
LAPACK = {
    "inv": jtk.linalg.inv,
    "cholesky": jtk.linalg.cholesky,
    "lu_factor": jtk.linalg.lu_factor,
    "det": jtk.linalg.det,
    "solve, gradient": jax.grad(lambda a: jtk.linalg.solve(a, a + 1).sum()),
    "triangular_solve": lambda a: jtk.linalg.triangular_solve(a, a),
}
SPECS = {
    "data": (P("d"), P()),
    "columns": (P("d"), P(None, "m")),
    "contracted": (P("d", "m"), P("m")),
    "fully sharded": (P("d"), P("d")),
}


def loss(a, b):
    return (jtk.matmul(a, b) ** 2).sum()


def layer(a, b, bias):
    return jtk.linear(a, b, bias, jax.nn.relu)


def programs():
    """Name, function and arguments of each program, with the specs of the arguments."""
    # First, so that no other program has loaded LAPACK.
    for name, function in LAPACK.items():
        yield name, function, (M,), (P(("d", "m")),)
    for name, specs in SPECS.items():
        yield name, jtk.matmul, (A, B), specs
        yield f"{name}, gradient", jax.grad(loss, (0, 1)), (A, B), specs
        bias = P(*specs[1][1:])
        yield f"{name}, epilogue", layer, (A, B, B[0]), (*specs, bias)
    weights = jax.grad(lambda *args: layer(*args).sum(), (1, 2))
    yield "gradient of an epilogue", weights, (A, B, B[0]), (P("d"), P(None, "m"), P("m"))
    yield "groups", lambda a, e: jtk.ragged_dot(a, e, SIZES), (A, E), (P("d"), P("m"))
    yield "sum", lambda a: jtk.sum(a, 0), (A,), (P("d", "m"),)
    yield "transpose", jtk.transpose, (A,), (P("d", "m"),)
    yield "add", jtk.add, (A, A), (P("d", "m"), P("d", "m"))


def placed(mesh, arrays, specs):
    def place(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return [place(*pair) for pair in zip(arrays, specs, strict=True)]


def cache(folder):
    """Compile every program; print how many came from JAX's persistent cache and their results."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    monitoring.register_event_listener(lambda event, **_: events.append(event))
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=TYPES)
    found = {}
    for name, function, arrays, specs in programs():
        args = placed(mesh, arrays, specs)
        lowered = jax.jit(function).lower(*args)
        events.clear()
        compiled = lowered.compile()
        hits = events.count("/jax/compilation_cache/cache_hits")
        leaves = jax.tree.leaves(compiled(*args))
        found[name] = hits, [np.asarray(leaf).astype(float).ravel().tolist() for leaf in leaves]
    print(json.dumps(found))


def save(folder):
    """Export every program, lowered for real devices and for an abstract mesh."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=TYPES)
    abstract = AbstractMesh((2, 4), ("d", "m"), axis_types=TYPES)
    for i, (_, function, arrays, specs) in enumerate(programs()):
        for kind, given in (("real", mesh), ("abstract", abstract)):
            types = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(given, spec))
                for x, spec in zip(arrays, specs, strict=True)
            ]
            exported = export.export(
                jax.jit(function), platforms=["cpu"], disabled_checks=jtk.export_checks()
            )
            (Path(folder) / f"{i}.{kind}").write_bytes(exported(*types).serialize())
    print("saved")


def load(folder):
    """Run what :func:`save` has exported."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=TYPES)
    for i, (name, function, arrays, specs) in enumerate(programs()):
        wanted = jax.tree.leaves(jax.jit(function)(*arrays))
        args = placed(mesh, arrays, specs)
        for kind in ("real", "abstract"):
            exported = export.deserialize((Path(folder) / f"{i}.{kind}").read_bytes())
            compiled = jax.jit(exported.call).lower(*args).compile()
            for x, y in zip(jax.tree.leaves(compiled(*args)), wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)
            text = compiled.as_text()
            assert ("lapack_" if name in LAPACK else "jax_tilekern_cpu_") in text, name
            assert "jax_tilekern_partitioned" not in text, name
    print("loaded")


def distributed(process, port, count):
    """Be one of several processes that run every program together, on a GPU each or on CPUs."""
    own = None
    if PLATFORM == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    else:
        own = [int(process)]
    jax.distributed.initialize(f"localhost:{port}", int(count), int(process), local_device_ids=own)
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("d", "m"), axis_types=TYPES)
    handler = "jax_tilekern_cpu_" if PLATFORM == "cpu" else "jax_tilekern_cuda_launch"
    for name, function, arrays, specs in programs():
        args = placed(mesh, arrays, specs)
        wanted = jax.tree.leaves(jax.jit(function)(*arrays))
        compiled = jax.jit(function).lower(*args).compile()
        # On a GPU XLA moves and adds small arrays itself.
        small = PLATFORM == "cuda" and name in ("add", "sum", "transpose")
        left_to_lapack = PLATFORM == "cpu" and name in LAPACK
        assert handler in compiled.as_text() or small or left_to_lapack, name
        for x, y in zip(jax.tree.leaves(compiled(*args)), wanted, strict=True):
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(y)[shard.index], err_msg=name)

    def layers(x, w):
        return lax.scan(lambda h, w: (jtk.matmul(h, w), None), x, w)[0].sum()

    x, w = A[:, :8], np.stack([A[:8, :8]] * 3)
    got = jax.jit(jax.grad(layers, 1))(*placed(mesh, (x, w), (P("d"), P(None, None, "m"))))
    wanted = np.asarray(jax.jit(jax.grad(layers, 1))(x, w))
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, wanted[shard.index])
    print("done")


def disagree(process, port, count):
    """Be one of several processes that know different times of the same CPU."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", int(count), int(process))
    agreement.data_digest = lambda _: f"times of process {process}"
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=TYPES[:1])
    (x,) = placed(mesh, (A,), (P("d"),))
    lower = jax.jit(jtk.matmul).trace(x, x.T).lower
    try:
        lower()
    except RuntimeError as error:
        print(error)
    # The last process to publish what it knows is the one that finds the difference.
    multihost_utils.sync_global_devices("both have lowered")


COMMANDS = (cache, save, load, distributed, disagree)
with jtk.policy("kernels"):
    {command.__name__: command for command in COMMANDS}[COMMAND](*ARGUMENTS)
