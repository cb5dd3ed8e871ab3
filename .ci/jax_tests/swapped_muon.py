"""A pytest plugin: optax's tests of ``muon`` take ``jax_tilekern.muon``."""

import jax_tilekern as jtk
from optax.contrib import _muon

_muon.muon = jtk.muon
