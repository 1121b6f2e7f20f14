"""The run that a plan is made for: how long it is, and what it pays once.

    seconds a step = (once + steps x steady step) / steps

On a long run the steady step is all that counts; on a short one a recipe that starts sooner may be ahead of
one that steps faster. A run whose length was not said is taken to have no end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from snugfit.errors import UsageError
from snugfit.prediction.startup import STARTUP_RATES, KernelSet, StartupRates, distinct_kernels, startup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.trace import Trace, Work
    from snugfit.techniques.setup import Setup

LONGEST = 10**12


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's length, and what is paid once."""

    steps: int | None = None
    """Optimizer steps; None where that was not said."""

    rate: StartupRates = STARTUP_RATES
    """What the host takes once."""

    def __post_init__(self) -> None:
        if self.steps is not None and not (type(self.steps) is int and 1 <= self.steps <= LONGEST):
            raise UsageError(
                f"steps is {self.steps!r}; the length of a run is a whole number of steps from 1 to"
                f" {LONGEST:,}, or None where it is not known."
            )


ENDLESS = Run()


class Opening:
    """What a run of this job pays once under each Setup, and a step's share of it."""

    def __init__(self, job: Job, run: Run) -> None:
        self.job, self.run = job, run
        self._loaded: dict[int, tuple[Work, KernelSet]] = {}  # by id, with the work that it is the id of

    def of(self, setup: Setup, trace: Trace) -> tuple[float, float]:
        """Seconds that are paid once, and of them a step's share: 0 where the run has no end."""
        once = self._seconds(setup, distinct_kernels(trace.kernels))
        return once, once / self.run.steps if self.run.steps else 0.0

    def least_share(self, setup: Setup, works: Iterable[Work]) -> float:
        """The least that a step's share can be, from what steps of few layers do: the kernels of those are
        among the kernels of many."""
        if self.run.steps is None:
            return 0.0
        loaded: KernelSet = frozenset().union(*map(self._remembered, works))
        return self._seconds(setup, loaded) / self.run.steps

    def forget(self) -> None:
        """Steps that were asked about come no more."""
        self._loaded.clear()

    def _seconds(self, setup: Setup, loaded: KernelSet) -> float:
        return startup(self.job, setup, loaded, rates=self.run.rate).total_seconds(0.0)

    def _remembered(self, work: Work) -> KernelSet:
        known = self._loaded.get(id(work))
        if known is None:
            known = self._loaded[id(work)] = work, distinct_kernels(work.kernels)
        return known[1]
