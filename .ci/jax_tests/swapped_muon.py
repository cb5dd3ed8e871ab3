"""A pytest plugin: optax's tests of ``muon`` take ``jax_tilekern.muon``."""

from optax.contrib import _muon

import jax_tilekern as jtk

_muon.muon = jtk.muon
