import json

import numpy as np
import pytest

from jax_tilekern.cli import demo, main, network, training
from jax_tilekern.cli.digits import load_digits
from jax_tilekern.cli.timing import Pairs
from jax_tilekern.inspection.explain import Explanation


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch):
    monkeypatch.setattr(demo, "_TIMING_SECONDS", 0)


def test_the_digits_are_those_of_uci():
    train, test = load_digits()
    assert (train.images.shape, test.images.shape) == ((1437, 64), (360, 64))
    # The number of images of each digit in UCI's test set.
    counts = np.bincount(np.concatenate([train.labels, test.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert train.images.min() == 0
    assert train.images.max() == 1


# .ci/run and the README run the demo itself.
@pytest.mark.thorough
def test_it_trains_and_agrees_with_jnp_dot(tmp_path, capsys):
    file = tmp_path / "demo.json"
    status = main(["demo", "--steps", "150", "--json", str(file)])
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert status == 0, out
    assert result["failures"] == []
    assert result["accuracy"] > 0.95
    assert result["largest_difference"] <= result["allowed_difference"]
    assert len(result["losses"]["ours"]) == 150
    # Forward, both operands' gradients, and the vmapped outer products.
    calls = {product["call"] for product in result["products"]}
    assert {"mk,kn->mn", "mk,nk->mn", "km,kn->mn", "bm,bn->bmn"} <= calls
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("accuracy", "loss", "failure"),
    [
        (0.97, 1.0, None),
        (0.95, 1.0, "accuracy 95.0% is not above 95%"),
        (0.97, 1.1, "losses differ by 1.0e-01"),
        (0.97, float("nan"), "losses differ by nan"),
    ],
)
def test_what_fails(accuracy, loss, failure):
    ours, peer = (training.Run((value,) * 150, network.initial_state()) for value in (loss, 1.0))
    outcome = demo.Outcome(
        ours=ours,
        peer=peer,
        accuracy=accuracy,
        allowed=0.01,
        times=Pairs((1.0,), (1.0,)),
        explanation=Explanation(()),
        norms=np.ones(3, np.float32),
        norms_error=0.0,
        seconds=1.0,
    )
    found = outcome.failures
    assert found == [] if failure is None else failure in found[0]


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_steps_are_checked(steps, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--steps", steps])
    assert "--steps" in capsys.readouterr().err
