"""The measured choice of a kernel: :func:`tune`, and choices that are shipped to other machines."""

from jax_tilekern.tuning.tuner import TunedChoices, TunedProduct, using

__all__ = ["TunedChoices", "TunedProduct", "using"]


def __dir__() -> list[str]:
    """List the public names, and no modules of the implementation."""
    return sorted(__all__)
