import numpy as np
import pytest

from jax_tilekern.cli import demo, main
from jax_tilekern.cli.digits import load_digits


def test_the_digits_are_those_of_uci():
    train, test = load_digits()
    assert (train.images.shape, test.images.shape) == ((1437, 64), (360, 64))
    # The number of images of each digit in UCI's test set.
    counts = np.bincount(np.concatenate([train.labels, test.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (train.images.min(), train.images.max()) == (0, 1)


def test_it_trains_and_agrees_with_jnp_dot(capsys, monkeypatch):
    monkeypatch.setattr(demo, "_TIMING_SECONDS", 0)
    assert main(["demo", "--steps", "150"]) == 0
    out = capsys.readouterr().out
    # Forward, and the gradients of both operands.
    assert all(product in out for product in ("mk,kn->mn", "mk,nk->mn", "km,kn->mn"))
    assert "jnp.dot / jax_tilekern.matmul" in out
    assert out.endswith("OK\n")


@pytest.mark.parametrize(
    ("steps", "accuracy", "difference", "failure"),
    [
        (150, 0.97, 1e-6, None),
        (149, 0.5, 1e-6, None),
        (150, 0.95, 1e-6, "accuracy 95.0% is not above 95%"),
        (150, 0.97, 0.1, "gradients differ by 1.0e-01"),
        (150, 0.97, float("nan"), "gradients differ by nan"),
    ],
)
def test_what_fails(steps, accuracy, difference, failure):
    found = demo.failures(steps, accuracy, difference)
    assert found == [] if failure is None else failure in found[0]


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_steps_are_checked(steps, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--steps", steps])
    assert "--steps" in capsys.readouterr().err
