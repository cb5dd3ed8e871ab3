"""Random calls of all operations by the kernels of a GPU, which the emulator runs."""

import pytest
from fuzz import emulated_outcome
from nvrtc_mark import needs_emulator

pytestmark = [needs_emulator, pytest.mark.defaults]


@pytest.mark.parametrize("policy", ["auto", "kernels"])
@pytest.mark.parametrize("number", range(4))
def test_errors_are_within_the_bounds(rng, number, policy):
    """``python tests/fuzz.py --emulated H200`` runs more, and prints each call that fails."""
    outcome = emulated_outcome(rng, "H200", policy=policy)
    assert not outcome.failed or outcome.known, str(outcome)
