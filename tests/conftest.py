"""The suite runs on whatever backend JAX has; sharded tests use four devices of the CPU."""

import os

# Before jax is imported: four host devices for the sharding tests, and no preallocation, so that
# several workers share one GPU.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")


@pytest.fixture
def rng(request):
    """Random numbers of the test's own, fresh for every session."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")  # pytest shows it when the test fails
    return np.random.default_rng(seed)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
