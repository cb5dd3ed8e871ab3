"""A pytest plugin: every test runs inside ``jax_tilekern.patch()``."""

import pytest

import jax_tilekern


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Run a test with this library's products in place of JAX's."""
    with jax_tilekern.patch():
        return (yield)
