"""One way to compute an operation, as planners offer it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan


class Candidate(ABC):
    """One way to compute an operation, not compiled yet."""

    @property
    @abstractmethod
    def key(self) -> str:
        """A short name, unique among the candidates of a problem and stable between versions."""

    @abstractmethod
    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it.

        Raises
        ------
        NvrtcNotFound
            If there is no NVRTC to compile the kernels with.
        """


class CostedCandidate(Candidate):
    """A candidate that a cost model ranks.

    Attributes
    ----------
    cycles
        The estimated cost, in cycles of the SM clock.
    """

    cycles: float

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread, beside which an epilogue has its registers."""
        return 0
