"""``demo``: train a network on handwritten digits with every product done by this package."""

from __future__ import annotations

import argparse
import itertools
import time

import jax
import jax.flatten_util
import numpy as np

import jax_tilekern
from jax_tilekern.cli import network
from jax_tilekern.cli.console import duration
from jax_tilekern.cli.digits import load_digits
from jax_tilekern.cli.timing import Pairs, Spread, interleaved
from jax_tilekern.inspection.columns import columns
from jax_tilekern.interop.originals import jnp

HELP = "train a small network on handwritten digits with this package's products"
_ACCURACY = 0.95
# Fewer steps do not reach it.
_STEPS_TO_ACCURACY = 150
# A GPU multiplies float32 in TF32 by default, whose roundings are 2**13 times as large.
_TOLERANCES = {"gpu": 1e-2}
_TOLERANCE = 1e-5
_TIMING_SECONDS = 2.0
_LINES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--steps", type=_positive, default=400, help="training steps (default: %(default)s)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a check failed."""
    start = time.perf_counter()
    train_data, test_data = load_digits()
    print(
        f"Handwritten digits: {len(train_data.images)} images to train on, "
        f"{len(test_data.images)} to test. Network {' -> '.join(map(str, network.SIZES))}, "
        f"batches of {network.BATCH}.\n"
        f"jax_tilekern {jax_tilekern.__version__}, jax {jax.__version__}, "
        f"{jax.devices()[0].device_kind} ({jax.default_backend()}).\n"
    )
    ours, peer = map(network.make_step, (jax_tilekern.matmul, jnp.dot))
    batches = network.batches(train_data)
    first = network.initial_state(), *next(batches)
    difference = gradient_difference(ours(*first)[0], peer(*first)[0])

    state = network.initial_state()
    every = max(1, arguments.steps // _LINES)
    for number, batch in enumerate(itertools.islice(batches, arguments.steps), start=1):
        state, loss = ours(state, *batch)
        if number % every == 0 or number in (1, arguments.steps):
            print(f"step {number:4}  loss {loss:.4f}", flush=True)
    scores = network.logits(jax_tilekern.matmul, state.parameters, jnp.asarray(test_data.images))
    accuracy = float(np.mean(np.argmax(np.asarray(scores), -1) == test_data.labels))

    print("\nProducts of one training step")
    print(jax_tilekern.explain(ours, *first))
    pairs = interleaved(lambda: ours(*first), lambda: peer(*first), seconds=_TIMING_SECONDS)
    print("\nTime of one training step")
    print(_times(pairs))
    print(
        f"\nTest accuracy {accuracy:.1%}. The gradients of the first step are within "
        f"{difference:.1e} of jnp.dot's. {time.perf_counter() - start:.0f} s in all."
    )
    found = failures(arguments.steps, accuracy, difference)
    print("\n".join(f"FAILED: {failure}" for failure in found) or "OK")
    return 1 if found else 0


def gradient_difference(ours: network.State, peer: network.State) -> float:
    """Return the relative difference of two states' gradients, which are their first velocities."""
    left, right = (jax.flatten_util.ravel_pytree(x.velocity)[0] for x in (ours, peer))
    return float(jnp.linalg.norm(left - right) / jnp.linalg.norm(right))


def failures(steps: int, accuracy: float, difference: float) -> list[str]:
    """Return what is not as it must be."""
    found = []
    if steps >= _STEPS_TO_ACCURACY and accuracy <= _ACCURACY:
        found.append(f"test accuracy {accuracy:.1%} is not above {_ACCURACY:.0%}")
    # Written so that a difference that is not a number fails.
    if not difference <= _TOLERANCES.get(jax.default_backend(), _TOLERANCE):
        found.append(f"gradients differ by {difference:.1e}, more than rounding accounts for")
    return found


def _times(pairs: Pairs) -> str:
    rows = [("", "median", "p10 - p90")]
    for name, times in (("jax_tilekern.matmul", pairs.ours), ("jnp.dot", pairs.peer)):
        spread = Spread.of(times)
        extremes = f"{duration(spread.p10)} - {duration(spread.p90)}"
        rows.append((name, duration(spread.median), extremes))
    ratio = pairs.ratio
    return (
        f"{columns(rows)}\n"
        f"jnp.dot / jax_tilekern.matmul: {ratio.median:.2f} (p10 {ratio.p10:.2f}, p90 "
        f"{ratio.p90:.2f}) over {len(pairs.ours)} interleaved pairs of whole steps, wall time.\n"
        "A step does more than matrix products; `python -m benchmarks matmul`, run from a clone, "
        "times those alone."
    )
