"""Distribute the start-up seconds of a run over its steps.

seconds a step = (start-up + steps x steady step) / steps

In a long run the start-up hardly counts. In a short run, a recipe with a faster start-up may beat one with
faster steps. Without a given length, the start-up is ignored.
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
    """Length of a training run in steps, and rates for its start-up seconds."""

    steps: int | None = None
    """Number of optimizer steps of the run; None if it was not given."""

    rates: StartupRates = STARTUP_RATES
    """Seconds that the host takes for parts of the start-up, such as imports."""

    def __post_init__(self) -> None:
        if self.steps is not None and not (type(self.steps) is int and 1 <= self.steps <= LONGEST):
            raise UsageError(
                f"steps is {self.steps!r}; it must be a whole number of steps from 1 to {LONGEST:,}, or "
                "None if the length of the run is not known."
            )


ENDLESS_RUN = PlannedRun()


class StartupShare(NamedTuple):
    """Start-up seconds of a training run, in total and per step."""

    once: float
    """Seconds of the run's whole start-up."""
    share: float
    """Seconds of start-up divided by the steps of the run; 0 if the number of steps is unknown."""


class StartupShares:
    """Compute the start-up seconds of a job's training run for each Setup, and each step's share of them."""

    def __init__(self, job: Job, run: PlannedRun) -> None:
        self.job, self.run = job, run
        self._kernels: dict[int, tuple[Work, KernelSet]] = {}  # by id of the work, kept alive here

    def of(self, setup: Setup, trace: Trace) -> StartupShare:
        """Return the seconds of start-up of a run whose steps have this trace, in total and per step."""
        launched = count_in_programs(trace.kernels, setup)
        once = self._seconds(setup, distinct_kernels(trace.kernels), pinned_bytes(trace.kernels), launched)
        return StartupShare(once, once / self.run.steps if self.run.steps else 0.0)

    def least_share(self, setup: Setup, works: Iterable[Work]) -> float:
        """Return a lower bound of the start-up seconds per step, from the kernels of a model with few layers.
        These are a subset of the whole model's kernels.
        """
        if self.run.steps is None:
            return 0.0
        kernels: KernelSet = frozenset().union(*map(self._kernels_of, works))
        return self._seconds(setup, kernels) / self.run.steps

    def forget(self) -> None:
        """Clear the cache of kernels, after the last call for these steps."""
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
