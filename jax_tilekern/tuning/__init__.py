"""The measured choice of a kernel: :func:`tune`, and choices that are shipped to other machines."""

from jax_tilekern.tuning.tuner import TunedChoices, TunedProduct, Tuning, export, load, using

__all__ = ["TunedChoices", "TunedProduct", "Tuning", "export", "load", "using"]
