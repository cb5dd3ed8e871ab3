"""The page that puts ``cuda_kernel`` beside its peers: its code is the examples', and they run."""

from __future__ import annotations

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from guides import DOCS

EXAMPLES = DOCS.parent / "examples/kernel_apis"
PAGE = (DOCS / "kernel-apis.md").read_text()
FILES = {
    "`cuda_kernel`": ["ours.py"],
    "`jax.ffi`": ["jax_ffi/silu.cu", "jax_ffi/CMakeLists.txt", "jax_ffi/silu.py"],
    "Pallas": ["pallas.py"],
    "jax-triton": ["triton_kernel.py"],
    "Warp": ["warp_kernel.py"],
}


def test_the_page_quotes_the_files():
    quoted = re.findall(r"^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    files = [name for names in FILES.values() for name in names]
    sources = [name for name in files if not name.endswith("CMakeLists.txt")]
    assert quoted == [(EXAMPLES / name).read_text() for name in sources]
    assert {path.name for path in EXAMPLES.rglob("*.*") if path.suffix != ".pyc"} == {
        name.rpartition("/")[2] for name in files
    }


@pytest.fixture
def x():
    return jnp.linspace(-3, 3, 1000, dtype=jnp.float32)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_ours_runs_and_is_mapped(example, x):
    silu = example("ours").silu
    pair = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(silu)(pair), jax.nn.silu(pair), rtol=1e-6, atol=1e-6)
    # The derivative is that of the reference.
    ours, theirs = (jax.grad(lambda x, f=f: f(x).sum())(x) for f in (silu, jax.nn.silu))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_pallas_runs_and_is_mapped(example, x):
    module = example("pallas")

    def silu(x):
        return module.silu(x, interpret=True)

    pair = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(silu)(pair), jax.nn.silu(pair), rtol=1e-5, atol=1e-6)
    _, tangent = jax.jvp(silu, (x,), (x,))
    np.testing.assert_allclose(tangent, jax.jvp(jax.nn.silu, (x,), (x,))[1], rtol=1e-5, atol=1e-6)
