"""``demo``: train a network on handwritten digits with every product done by this package."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from jax_tilekern.cli import network, training
from jax_tilekern.cli.console import duration, make_console, output_file, write_json
from jax_tilekern.cli.digits import Digits, load_digits
from jax_tilekern.cli.timing import Pairs, Spread, interleaved

if TYPE_CHECKING:
    from rich.console import Console

    from jax_tilekern.inspection.explain import Explanation

HELP = "train a small network on handwritten digits with this package's products"
_ACCURACY = 0.95
# Fewer steps do not reach it.
_STEPS_TO_ACCURACY = 150
_TIMING_SECONDS = 2.0
_LINES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--steps", type=_positive, default=400, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the results here"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


@dataclass(frozen=True)
class Outcome:
    """What the demo found.

    Attributes
    ----------
    ours, peer
        The training runs with ``jax_tilekern.matmul`` and with ``jnp.dot``.
    accuracy
        Of ``ours`` on the test images.
    allowed
        How far the two runs' losses may be apart.
    times
        Of a training step with each.
    explanation
        Which kernel computes each product of our step.
    norms
        Length of the gradient of each training image, after training, by our products.
    norms_error
        The largest relative difference of ``norms`` to those by ``jnp.dot``.
    seconds
        Time of the whole command.
    """

    ours: training.Run
    peer: training.Run
    accuracy: float
    allowed: float
    times: Pairs
    explanation: Explanation
    norms: np.ndarray[Any, np.dtype[np.float32]]
    norms_error: float
    seconds: float

    @property
    def difference(self) -> float:
        """How far the losses are apart where they are farthest."""
        return training.largest_difference(self.ours, self.peer)

    @property
    def failures(self) -> list[str]:
        """What is not as it must be."""
        found = []
        if len(self.ours.losses) >= _STEPS_TO_ACCURACY and self.accuracy <= _ACCURACY:
            found.append(f"test accuracy {self.accuracy:.1%} is not above {_ACCURACY:.0%}")
        # Written so that a loss that is not a number fails.
        if not self.difference <= self.allowed:
            found.append(
                f"losses differ by {self.difference:.1e}, more than the {self.allowed:.1e} that "
                "rounding accounts for"
            )
        return found


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a check failed."""
    start = time.perf_counter()
    console = make_console()
    train_data, test_data = load_digits()
    console.print(
        f"Handwritten digits: {len(train_data.images)} images to train on, "
        f"{len(test_data.images)} to test. Network {' -> '.join(map(str, network.SIZES))}, "
        f"batches of {training.BATCH}, each image's gradient clipped.\n"
        f"jax_tilekern {jax_tilekern.__version__}, jax {jax.__version__}, "
        f"{jax.devices()[0].device_kind} ({jax.default_backend()}).\n"
    )
    chosen = training.batches(train_data, arguments.steps)
    ours, peer, disturbed = map(
        network.make_step, (jax_tilekern.matmul, jnp.dot, training.perturbed(jnp.dot))
    )
    with _progress(console, arguments.steps) as shown:
        our_run = training.train(ours, chosen, shown("jax_tilekern.matmul"))
        peer_run = training.train(peer, chosen, shown("jnp.dot"))
        disturbed_run = training.train(disturbed, chosen, shown("jnp.dot, perturbed"))

    batch = chosen[-1]
    norms, peer_norms = (
        np.asarray(
            jax.jit(functools.partial(network.gradient_norms, product))(
                our_run.state.parameters, *map(jnp.asarray, train_data)
            )
        )
        for product in (jax_tilekern.matmul, jnp.dot)
    )
    scores = jax.jit(functools.partial(network.logits, jax_tilekern.matmul))(
        our_run.state.parameters, jnp.asarray(test_data.images)
    )
    outcome = Outcome(
        ours=our_run,
        peer=peer_run,
        accuracy=float(np.mean(np.argmax(np.asarray(scores), -1) == test_data.labels)),
        allowed=training.allowed_difference(peer_run, disturbed_run),
        times=interleaved(
            lambda: ours(our_run.state, *batch),
            lambda: peer(our_run.state, *batch),
            seconds=_TIMING_SECONDS,
        ),
        explanation=jax_tilekern.explain(ours, our_run.state, *batch),
        norms=norms,
        norms_error=float(np.max(np.abs(norms - peer_norms) / np.maximum(peer_norms.max(), 1e-12))),
        seconds=time.perf_counter() - start,
    )
    _show(console, outcome, train_data)
    if arguments.json is not None:
        write_json(arguments.json, _as_json(outcome))
    return 1 if outcome.failures else 0


@contextmanager
def _progress(
    console: Console, steps: int
) -> Iterator[Callable[[str], Callable[[int, float], None]]]:
    """Show how training goes on: a bar on a terminal, and a few lines anywhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    every = max(1, steps // _LINES)

    def shown(name: str) -> Callable[[int, float], None]:
        task = bars.add_task(name, total=steps)

        def update(step: int, loss: float) -> None:
            bars.update(task, completed=step)
            if step % every == 0 or step in (1, steps):
                console.print(f"{name:20} step {step:4}  loss {loss:.4f}")

        return update

    with bars:
        yield shown


def _show(console: Console, outcome: Outcome, data: Digits) -> None:
    from rich.table import Table

    kernels = Table(title="Products of one training step", title_justify="left")
    for heading in ("times", "product", "operands", "kernel", "why"):
        kernels.add_column(heading, justify="right" if heading == "times" else "left")
    for row, count in _counted(outcome.explanation).items():
        kernels.add_row(str(count), *row)
    console.print()
    console.print(kernels)

    ours, peer = Spread.of(outcome.times.ours), Spread.of(outcome.times.peer)
    steps = Table(title="Time of one training step", title_justify="left")
    for heading in ("", "median", "p10 - p90"):
        steps.add_column(heading)
    for name, spread in (("jax_tilekern.matmul", ours), ("jnp.dot", peer)):
        steps.add_row(
            name, duration(spread.median), f"{duration(spread.p10)} - {duration(spread.p90)}"
        )
    console.print(steps)
    ratio = outcome.times.ratio
    console.print(
        f"jnp.dot / jax_tilekern.matmul: {ratio.median:.2f} (p10 {ratio.p10:.2f}, "
        f"p90 {ratio.p90:.2f}) over {len(outcome.times.ours)} interleaved pairs of whole steps, "
        "wall time.\nA step does more than matrix products; `python -m benchmarks matmul`, "
        "run from a clone, times those alone.\n"
    )

    hardest = np.argsort(outcome.norms)[::-1][:3]
    console.print(
        f"Gradient of each training image by itself (vmap of grad): median length "
        f"{np.median(outcome.norms):.2g}, longest {outcome.norms.max():.2g}; "
        f"within {outcome.norms_error:.1e} of jnp.dot's. The hardest images:"
    )
    for line in _drawn(data, hardest):
        console.print(line)

    console.print(
        f"\nTest accuracy {outcome.accuracy:.1%}. Losses of the two runs differ by at most "
        f"{outcome.difference:.1e} (last step {outcome.ours.losses[-1]:.6f} and "
        f"{outcome.peer.losses[-1]:.6f});\nrounding accounts for {outcome.allowed:.1e}. "
        f"{outcome.seconds:.0f} s in all."
    )
    for failure in outcome.failures:
        console.print(f"FAILED: {failure}", style="bold red")
    if not outcome.failures:
        console.print("OK", style="bold green")


def _counted(explanation: Explanation) -> dict[tuple[str, str, str, str], int]:
    """Return the distinct products, and how often each occurs."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for choice in explanation:
        operands = f"{' x '.join(choice.operands)} -> {choice.result}"
        row = (choice.call, operands, choice.kernel or "XLA", choice.reason)
        counts[row] = counts.get(row, 0) + 1
    return counts


def _drawn(data: Digits, indices: np.ndarray[Any, Any]) -> list[str]:
    """Return lines of text that show the images side by side, with their labels."""
    shades = np.asarray(list(" .:-=+*#%@"))
    images = [shades[(image.reshape(8, 8) * 9).astype(int)] for image in data.images[indices]]
    rows = ["   ".join("".join(np.repeat(image[y], 2)) for image in images) for y in range(8)]
    return [*rows, "   ".join(f"{f'labelled {data.labels[i]}':16}" for i in indices)]


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "schema": 1,
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jax_tilekern": jax_tilekern.__version__},
        "steps": len(outcome.ours.losses),
        "accuracy": outcome.accuracy,
        "losses": {"ours": outcome.ours.losses, "peer": outcome.peer.losses},
        "largest_difference": outcome.difference,
        "allowed_difference": outcome.allowed,
        "gradient_norms": asdict(Spread.of(outcome.norms.tolist())),
        "gradient_norms_error": outcome.norms_error,
        "step_seconds": {
            "ours": asdict(Spread.of(outcome.times.ours)),
            "peer": asdict(Spread.of(outcome.times.peer)),
            "ratio": asdict(outcome.times.ratio),
            "pairs": len(outcome.times.ours),
        },
        "products": [asdict(choice) for choice in outcome.explanation],
        "seconds": outcome.seconds,
        "failures": outcome.failures,
    }
