"""Random calls of the public operations at the defaults, compared with wider arithmetic.

``python tests/fuzz.py --calls 1000 --seed 7`` prints totals for each operation and the worst
calls. A seed and an index draw a call, and ``--first INDEX --calls 1`` draws it again. With
``--emulated H200`` the kernels of that GPU compute on the CPU what is small enough.

The bound on each element's error follows from the arithmetic that ``docs/design.md`` promises:
products of 16-bit and 8-bit types are exact, sums are in float32 at least, and the result is
rounded once. ``unit * terms * sum(|a| |b|)`` bounds the error of a sum in any order.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import multiprocessing
import os
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from emulated_gpu import emulated_gpu

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS
from benchmarks.catalog.bounds import COMPLEX, FP8, is_float
from benchmarks.catalog.call import Call
from benchmarks.catalog.draw import Draw
from benchmarks.catalog.oracles import ORACLES
from benchmarks.record import device_name, environment
from jax_tilekern.plans.gpu import known_gpu, target_is_set

# How long a call may take that begins at the end of the time.
GRACE_SECONDS = 30
# The most elements of the operands of a call that is emulated.
EMULATED_ELEMENTS = 20_000
MODES = ("eager", "jit", "vmap", "grad")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call gave.

    Attributes
    ----------
    ratio
        The largest error in units of its bound; infinite where the call or its result is wrong
        altogether, and ``None`` where JAX refuses the call, too.
    detail
        The exception, if there is one, and what computes the call.
    """

    call: Call
    mode: str
    ratio: float | None
    detail: str

    @property
    def failed(self):
        return self.ratio is not None and self.ratio > 1

    @property
    def known(self):
        """Why the error is larger than it should be, or ``None`` if nobody knows."""
        types = {x.dtype for x in self.call.operands if x.values is None}
        if types & set(FP8) and any(t.kind in "iu" for t in types):
            return "an integer is rounded to the float of 8 bits that it is multiplied with"
        return None

    def __str__(self):
        ratio = "refused" if self.ratio is None else f"{self.ratio:.3g}"
        return f"{ratio:>8}  {self.mode:5}  {self.call}\n          {self.detail}"


def run(draw, call, policy=None, own_types=False):
    """Compute a call in a mode that is drawn, and compare; by default, a policy is drawn, too."""
    host = call.operation.startswith("out_of_core")
    modes = ["eager"] if host else [m for m in MODES if m != "grad" or call.cotangent_errors]
    mode = draw.one(*modes)
    special = call.is_plain and mode in ("eager", "jit") and draw.chance(0.15)
    special = special and all(is_float(x.dtype) for x in call.operands)
    # Bits are compared for elements in any order, errors for those that may be far apart.
    ordered = call.has_jaxs_bits and mode != "grad" and draw.chance(0.6)
    count = draw.one(1, 2, 5) if mode == "vmap" else 1
    axes = [draw.one(None, *range(len(x.shape) + 1)) for x in call.operands]
    if all(axis is None for axis in axes):
        axes[0] = 0
    # The values of each operand, of which an unmapped one has one.
    mapped = [mode == "vmap" and axis is not None for axis in axes]
    drawn = draw.ordered if ordered else functools.partial(draw.value, special=special)
    values = [
        [drawn(x) for _ in range(count if is_mapped else 1)]
        for x, is_mapped in zip(call.operands, mapped, strict=True)
    ]
    stored = [
        np.stack([v.transpose(x.order) for v in each], axis)
        if is_mapped
        else each[0].transpose(x.order)
        for x, each, axis, is_mapped in zip(call.operands, values, axes, mapped, strict=True)
    ]
    in_axes = tuple(axis if m else None for axis, m in zip(axes, mapped, strict=True))
    note = f" in_axes={in_axes}" if mode == "vmap" else " NaN, inf" if special else ""
    note += " ties, NaN, zeros" if ordered else ""

    def function(m, *arrays):
        restored = (
            jnp.transpose(x, np.argsort(operand.order))
            if operand.order != (0, 1) or not host
            else x
            for x, operand in zip(arrays, call.operands, strict=True)
        )
        return call.function(m, *restored)

    def computed(m):
        def ours(*arrays):
            return function(m, *arrays)

        if mode == "grad":
            result, pull = jax.vjp(jax.jit(ours), *stored)
            cotangent = draw_cotangent.standard_normal(result.shape)
            if result.dtype in COMPLEX:
                cotangent = cotangent + 1j * draw_cotangent.standard_normal(result.shape)
            cotangent = cotangent.astype(result.dtype)
            cotangents = [
                np.transpose(x, np.argsort(operand.order))
                for x, operand in zip(pull(jnp.asarray(cotangent)), call.operands, strict=True)
            ]
            return result, cotangent, cotangents
        mapped = jax.vmap(ours, in_axes) if mode == "vmap" else ours
        return jax.block_until_ready((jax.jit(mapped) if mode == "jit" else mapped)(*stored))

    draw_cotangent = np.random.default_rng(int(draw.rng.integers(2**32)))
    wide_types = any(x.dtype.name in ("float64", "complex128") for x in call.operands)
    # Small complex products are XLA's at the defaults.
    as_real = any(x.dtype in COMPLEX for x in call.operands) and draw.chance(0.5)
    chosen_policy = jtk.policy(policy or ("kernels" if as_real else "auto"))
    with chosen_policy, jax.enable_x64(True) if wide_types else contextlib.nullcontext():
        try:
            result = computed(jtk)
        except Exception as error:
            return _of_error(call, mode + note, error, computed)
        firsts = [each[0] for each in values]
        if ordered:
            found = _differing(result, computed(ORACLES))
        elif mode == "grad":
            result, cotangent, cotangents = result
            found = [*call.errors(result, *firsts)]
            found += call.cotangent_errors(cotangents, cotangent, *firsts)
            pairs = zip(cotangents, call.operands, strict=True)
            if not all(x.dtype in (own.dtype, jax.dtypes.float0) for x, own in pairs):
                found.append((np.full(1, np.inf), np.zeros(1)))
        elif mode == "vmap":
            found = []
            for i in range(count):
                of_call = [each[min(i, len(each) - 1)] for each in values]
                found += call.errors(jax.tree.map(lambda x, i=i: x[i], result), *of_call)
        else:
            found = call.errors(result, *firsts)
        ratio = max(
            (
                float(np.max(np.where(error == 0, 0, error / np.maximum(bound, 1e-300)), initial=0))
                for error, bound in found
            )
        )
        if mode in ("eager", "jit") and not host and not own_types:
            theirs = jax.eval_shape(lambda *arrays: function(ORACLES, *arrays), *stored)
            if types_of(result) != types_of(theirs):
                return Outcome(call, mode, math.inf, f"{types_of(result)}, not {types_of(theirs)}")
        detail = note.strip()
        # An emulated kernel is no choice of this platform.
        if ratio > 1 and not host and not target_is_set():
            chosen = (
                jtk.explain(jax.vmap(lambda *x: function(jtk, *x), in_axes), *stored)
                if (mode == "vmap")
                else jtk.explain(lambda *x: function(jtk, *x), *stored)
            )
            detail = f"{detail} {chosen}".strip()
        return Outcome(call, mode, ratio, detail)


def _differing(found, expected):
    """Which bits differ, but for those of NaN: pairs of an error and a bound."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for x, y in (map(np.asarray, pair) for pair in pairs):
        if x.shape != y.shape or x.dtype != y.dtype:
            yield np.full(1, np.inf), np.zeros(1)
            continue
        is_nan = np.isnan(x) & np.isnan(y) if is_float(x.dtype) else False
        bits = (z.view(f"u{z.dtype.itemsize}") for z in (x, y))
        yield (np.not_equal(*bits) & ~np.asarray(is_nan)).astype(float), np.zeros(x.shape)


def types_of(results):
    """Shapes, types, and which are weak."""
    leaves = [getattr(x, "aval", x) for x in jax.tree.leaves(results)]
    return [(x.shape, x.dtype.name, x.weak_type) for x in leaves]


def _of_error(call, mode, error, computed):
    """The outcome of an exception, which is JAX's own if its function raises one of the type."""
    try:
        computed(ORACLES)
    except Exception as theirs:
        if type(theirs) is type(error):
            return Outcome(call, mode, None, f"{type(error).__name__}: {error}")
    lines = " ".join(str(error).split())[:300]
    return Outcome(call, mode, math.inf, f"{type(error).__name__}: {lines}")


def outcomes(rng, calls, operations=None, policy=None):
    """Yield the outcome of random calls, of some operations."""
    for _ in range(calls):
        draw = Draw(rng)
        description = DESCRIPTIONS[draw.one(*(operations or DESCRIPTIONS))]
        yield run(draw, description.draw(draw), policy, description.own_types)


def emulated_outcome(rng, gpu, operations=None, policy="auto"):
    """Return the outcome of a random call of a GPU, in a mode of the emulator."""
    draw = Draw(rng)
    how = draw.one(
        {},
        {"late": ("reads", "writes")},
        {"backwards": True},
        {"held": 1 + int(draw.rng.integers(1000))},
    )
    of_gpus = [x for x in DESCRIPTIONS if not x.startswith("out_of_core")]
    with emulated_gpu(known_gpu(gpu), policy=policy, **how) as ran:
        description, call = _small_call(draw, operations or of_gpus)
        outcome = run(draw, call, policy, description.own_types)
    names = ", ".join(dict.fromkeys(plan.name for plan in ran)) or "XLA"
    return dataclasses.replace(outcome, detail=f"{outcome.detail} {how or ''} {names}".strip())


def _small_call(draw, operations):
    """Draw a call that the emulator computes in seconds."""
    for _ in range(1000):
        description = DESCRIPTIONS[draw.one(*operations)]
        call = description.draw(draw)
        elements = sum(math.prod(x.shape) for x in call.operands)
        # JAX narrows what a callback returns to 32 bits in threads without 64-bit types.
        if elements <= EMULATED_ELEMENTS and not call.is_wide:
            return description, call
    raise ValueError(f"{', '.join(operations)}: no call has {EMULATED_ELEMENTS} elements or fewer")


class _Found(NamedTuple):
    """An outcome as processes send it."""

    operation: str
    ratio: float | None
    failed: bool
    known: str | None
    text: str


def _in_process(task):
    """Return an index and what its call gave, or ``None`` after the end of the time."""
    seed, index, gpu, operations, policy, end = task
    if time.time() > end:
        return index, None
    rng = np.random.default_rng([seed, index])
    if gpu:
        outcome = emulated_outcome(rng, gpu, operations, policy or "auto")
    else:
        outcome = next(outcomes(rng, 1, operations, policy))
    name, text = outcome.call.operation, str(outcome)
    return index, _Found(name, outcome.ratio, outcome.failed, outcome.known, text)


def _found(tasks, processes, end):
    """Yield the indices and outcomes of calls until the end of the time, as they come."""
    if processes == 1:
        yield from map(_in_process, tasks)
        return
    # The processes share one GPU, of whose memory CUDA takes some in each.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.5 / processes:.4f}")
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(_in_process, tasks)
        with contextlib.suppress(StopIteration, multiprocessing.TimeoutError):
            # The call of a process that ended gives nothing.
            while True:
                yield results.next(max(0, end - time.time()) + GRACE_SECONDS)


def record(found, lost):
    """Return what a run found, and where."""
    return {
        "command": shlex.join(["python", "tests/fuzz.py", *sys.argv[1:]]),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        **environment(),
        "calls": len(found),
        "refused": sum(x.ratio is None for x in found.values()),
        "wrong": {i: x.text for i, x in found.items() if x.failed and x.known is None},
        "known": {i: x.known for i, x in found.items() if x.failed and x.known is not None},
        "lost": lost,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the index of the first call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operation", choices=DESCRIPTIONS, nargs="+", help="some operations")
    parser.add_argument("--policy", choices=("auto", "kernels", "xla"))
    parser.add_argument("--emulated", metavar="GPU", help="emulate the kernels of a GPU: H200")
    parser.add_argument("--worst", type=int, default=10, help="how many calls to print")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no calls after it")
    parser.add_argument("--json", type=Path, help="write counts, wrong calls and versions here")
    options = parser.parse_args()
    end = time.time() + options.seconds
    indices = range(options.first, options.first + options.calls)
    found, skipped = {}, 0
    drawn = options.emulated, options.operation, options.policy
    tasks = [(options.seed, i, *drawn, end) for i in indices]
    for index, outcome in _found(tasks, options.processes, end):
        if outcome is None:
            skipped += 1
            continue
        found[index] = outcome
        if outcome.failed:
            print(f"{index}: {outcome.text}", flush=True)
    lost = options.calls - len(found) - skipped
    if options.json is not None:
        options.json.write_text(json.dumps(record(found, lost), indent=1) + "\n")
    found = list(found.values())
    print(f"{'operation':22}  calls  refused  failed  largest error / bound")
    for operation in sorted({x.operation for x in found}):
        own = [x for x in found if x.operation == operation]
        refused = sum(x.ratio is None for x in own)
        largest = max((x.ratio for x in own if x.ratio is not None), default=0.0)
        failed = sum(x.failed for x in own)
        print(f"{operation:22} {len(own):6} {refused:8} {failed:7}  {largest:.3g}")
    worst = sorted((x for x in found if x.ratio is not None), key=lambda x: -x.ratio)
    print(f"\n{len(found)} calls, {lost} lost with their processes; worst:")
    for outcome in worst[: options.worst]:
        print(outcome.text)
    raise SystemExit(lost > 0 or any(x.failed for x in found))


if __name__ == "__main__":
    main()
