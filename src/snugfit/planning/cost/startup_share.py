"""The run that a plan is made for: how long it is, and a step's share of its start-up.

    seconds a step = (start-up + steps x steady step) / steps

On a long run the steady step is all that counts; on a short one a recipe that starts sooner may be ahead of
one that steps faster. A run whose length was not said is taken to have no end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from snugfit.errors import UsageError
from snugfit.prediction.pinned import pinned_bytes
from snugfit.prediction.startup import (
    STARTUP_RATES,
    KernelSet,
    StartupRates,
    count_in_programs,
    distinct_kernels,
    startup,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.trace import Trace, Work
    from snugfit.techniques.setup import Setup

LONGEST = 10**12


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run's length, and what its start-up takes."""

    steps: int | None = None
    """Optimizer steps; None where that was not said."""

    rates: StartupRates = STARTUP_RATES
    """What the host takes to start."""

    def __post_init__(self) -> None:
        if self.steps is not None and not (type(self.steps) is int and 1 <= self.steps <= LONGEST):
            raise UsageError(
                f"steps is {self.steps!r}; it must be a whole number of steps from 1 to {LONGEST:,}, or "
                "None if the length of the run is not known."
            )


ENDLESS = PlannedRun()


class StartupShare(NamedTuple):
    """What a recipe's start-up costs."""

    once: float
    """Seconds of the whole start-up."""
    share: float
    """Of them, a step's share in seconds; 0 where the run has no end."""


class StartupShares:
    """The start-up of this job's run under each Setup, and a step's share of it."""

    def __init__(self, job: Job, run: PlannedRun) -> None:
        self.job, self.run = job, run
        self._kernels: dict[int, tuple[Work, KernelSet]] = {}  # by the id of the work beside

    def of(self, setup: Setup, trace: Trace) -> StartupShare:
        """The start-up of a run whose steps are this trace."""
        launched = count_in_programs(trace.kernels, setup)
        once = self._seconds(setup, distinct_kernels(trace.kernels), pinned_bytes(trace.kernels), launched)
        return StartupShare(once, once / self.run.steps if self.run.steps else 0.0)

    def least_share(self, setup: Setup, works: Iterable[Work]) -> float:
        """The least seconds that a step's share can be, from what steps of few layers do: the kernels of
        those are among the kernels of many."""
        if self.run.steps is None:
            return 0.0
        kernels: KernelSet = frozenset().union(*map(self._kernels_of, works))
        return self._seconds(setup, kernels) / self.run.steps

    def forget(self) -> None:
        """The steps that were asked about are not asked about again."""
        self._kernels.clear()

    def _seconds(self, setup: Setup, kernels: KernelSet, pinned: int = 0, in_programs: int = 0) -> float:
        rates = self.run.rates
        once = startup(self.job, setup, kernels, pinned_bytes=pinned, in_programs=in_programs, rates=rates)
        return once.total_seconds(0.0)

    def _kernels_of(self, work: Work) -> KernelSet:
        known = self._kernels.get(id(work))
        if known is None:
            known = self._kernels[id(work)] = work, distinct_kernels(work.kernels)
        return known[1]
