"""Many executions of overlapped products, with other work on the devices' streams.

``python tests/soak.py --executions 100000`` takes every device of the process. A program has a loop
of layers, each a gathered and a scattered product and its gradient. Between its runs there are
collectives, transfers from the host, and donated arrays. A second thread runs products of single
GPUs meanwhile. Every result is compared with the first one's bits, which an exact product of
integers has checked. The last line states what was executed; the exit status is 1 after a
difference.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk
from jax_tilekern.plans.overlap import in_parts

ROWS, COLUMNS = P("x"), P(None, "x")
ON_CPU = jax.default_backend() == "cpu"
OVERLAPPED = 'custom_call_target="jax_tilekern_cuda_launch_overlapped"'


@dataclass(frozen=True)
class Layers:
    """A loop of layers, compiled, and its arrays.

    Attributes
    ----------
    run
        ``run(x, up, down)`` returns results of the loop.
    arrays
        Its operands.
    wanted
        The results.
    executions
        Products in which devices exchange rows, in one run.
    """

    run: Callable[..., Any]
    arrays: Sequence[Any]
    wanted: Any
    executions: int


def layers(mesh: Mesh, count: int, tokens: int, width: int, parts: int | None) -> Layers:
    """Return a loop of layers whose results are rounded once, if at all."""
    rng = np.random.default_rng(0)
    hidden = 2 * width
    # Layers exchange columns and change signs, so that elements stay -1, 0 and 1.
    x, between = rng.integers(-1, 2, (tokens, width)), rng.permutation(hidden)[:width]
    up, down = np.zeros((width, hidden), np.int64), np.zeros((hidden, width), np.int64)
    up[rng.permutation(width), between] = rng.choice([-1, 1], width)
    down[between, rng.permutation(width)] = rng.choice([-1, 1], width)

    def layer(x: Any, up: Any, down: Any) -> Any:
        return jtk.matmul_reduce_scatter(jtk.all_gather_matmul(x, up, "x"), down, "x")

    over = jax.shard_map(layer, mesh=mesh, in_specs=(ROWS, COLUMNS, ROWS), out_specs=ROWS)

    def run(x: Any, up: Any, down: Any) -> Any:
        def step(x: Any, _: None) -> Any:
            y, transpose = jax.vjp(over, x, up, down)
            return y, transpose(x)

        return lax.scan(step, x, None, length=count)

    specs = (ROWS, COLUMNS, ROWS)
    arrays = [
        jax.device_put(a.astype(jnp.bfloat16), NamedSharding(mesh, spec))
        for a, spec in zip((x, up, down), specs, strict=True)
    ]
    with in_parts(parts):
        compiled = jax.jit(run).lower(*arrays).compile()
    of_a_layer = compiled.as_text().count(OVERLAPPED)
    return Layers(compiled, arrays, exact(count, x, up, down), count * of_a_layer)


def exact(count: int, x: Any, up: Any, down: Any) -> Any:
    """Return the results of the loop as integers, which bfloat16 may round."""
    found = []
    for _ in range(count):
        hidden, by_hidden = x @ up, x @ down.T
        found.append((by_hidden @ up.T, x.T @ by_hidden, hidden.T @ x))
        x = hidden @ down
    return x, tuple(np.stack(each) for each in zip(*found, strict=True))


def waited_for(results: Any) -> Any:
    """Return results, on CPUs when they are there: collectives in flight take threads there."""
    return jax.block_until_ready(results) if ON_CPU else results


class OtherWork:
    """What devices do between the runs of the loop, and beside them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.ended, self.products = mesh, threading.Event(), 0
        whole = NamedSharding(mesh, P())
        rows = NamedSharding(mesh, ROWS)
        self.array = jax.device_put(np.ones((256 * mesh.size, 256), np.float32), rows)
        # Collectives of XLA, and memory that a program takes over.
        self.sum = jax.jit(lambda x: x.sum(0), out_shardings=whole)
        self.step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=rows)
        self.thread = threading.Thread(target=self._products)

    def between(self, run: int) -> Any:
        """Dispatch what follows a run, and return a result of it."""
        self.array = self.step(self.array)
        total = self.sum(self.array)
        if run % 16 == 0:
            sharding = NamedSharding(self.mesh, ROWS)
            self.array = jax.device_put(np.ones(self.array.shape, np.float32), sharding)
        return total

    def _products(self) -> None:
        square = jax.jit(lambda x: jnp.tanh(x @ x))
        arrays = [
            jax.device_put(np.ones((512, 512), jnp.bfloat16), device)
            for device in self.mesh.devices.flat
        ]
        while not self.ended.is_set():
            arrays = [square(x) for x in arrays]
            jax.block_until_ready(arrays)
            self.products += len(arrays)

    def __enter__(self) -> OtherWork:
        if not ON_CPU:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if not ON_CPU:
            self.thread.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loop until so many products were executed, and report differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="end earlier after these")
    parser.add_argument("--devices", type=int, default=len(jax.devices()))
    parser.add_argument("--count", type=int, default=8, help="layers of the loop")
    parser.add_argument("--tokens", type=int, default=512, help="rows of a device")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--parts", type=int, default=2, help="parts of a device's rows")
    parser.add_argument("--check-every", type=int, default=16, help="runs between checks")
    given = parser.parse_args(arguments)
    mesh = jax.make_mesh(
        (given.devices,),
        ("x",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[: given.devices],
    )
    loop = layers(mesh, given.count, given.tokens * mesh.size, given.width, given.parts)
    same = jax.jit(lambda a, b: jnp.stack([jnp.all(x == y) for x, y in zip(a, b, strict=True)]))
    first = loop.run(*loop.arrays)
    wrong = sum(
        not np.array_equal(x, y.astype(jnp.bfloat16))
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(loop.wanted), strict=True)
    )
    start, runs, done, pending = time.monotonic(), 1, loop.executions, []
    # On CPUs nothing is exchanged, and the runs are counted.
    each = loop.executions or 1
    with OtherWork(mesh) as other:
        while done < given.executions and time.monotonic() - start < given.seconds:
            found = waited_for(loop.run(*loop.arrays))
            waited_for(other.between(runs))
            runs, done = runs + 1, done + each
            pending.append(functools.partial(same, jax.tree.leaves(found), jax.tree.leaves(first)))
            if len(pending) == given.check_every:
                # Results of runs that are in flight together.
                wrong += sum(int(np.sum(~np.asarray(check()))) for check in pending)
                pending.clear()
        wrong += sum(int(np.sum(~np.asarray(check()))) for check in pending)
    print(
        f"{loop.executions} overlapped products in each of {runs} runs on {mesh.size} devices, "
        f"{loop.executions * runs} in all, beside {other.products} products of single devices: "
        f"{wrong} results differ, {time.monotonic() - start:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
