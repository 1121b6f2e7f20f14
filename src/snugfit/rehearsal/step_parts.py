"""The two separately simulated parts of a step: forward and backward passes, and the optimizer update. They
are recorded separately and joined.

A feature whose steps are joined otherwise names a subclass in its field of `Setup` (`Wish.parts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snugfit.errors import RehearsalError
from snugfit.rehearsal.splice import Part, rehearse_update, splice
from snugfit.techniques.wish import used_wishes

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.trace.repeat import PeriodicRun
    from snugfit.rehearsal.trace.trace import Kernel
    from snugfit.techniques.setup import Setup


class UnsupportedStep(RehearsalError):
    """Error: this model's step cannot run under these settings, for example as a CUDA graph, as a simulation
    shows.
    """


class StepParts:
    """Simulates and joins the parts of a step that the plain loop runs kernel by kernel."""

    can_be_spliced = True
    """False if passes and update cannot be simulated apart, since updates run within the passes."""

    def as_written(self, setup: Setup, *, padded: bool) -> Setup:
        """Return the Setup under which forward and backward passes are simulated, on batches with or without
        padding.
        """
        return setup

    def refuse(self, setup: Setup, waits: int) -> None:
        """Raise `UnsupportedStep` if forward and backward wait `waits` times for the device, and the Setup
        does not support waits.
        """

    def rehearse_update(self, job: Job, setup: Setup, *asked: Any) -> Part:
        """Simulate clipping and the optimizer's step under this Setup, with the further arguments of
        `splice.rehearse_update`. Raises `UnsupportedStep`."""
        return rehearse_update(job, setup, *asked)

    def splice(self, passes: Part, update: Part, *, micro_batches: int = 1) -> PeriodicRun | None:
        """Return a run of whole steps, joined from these simulated passes and this update; None if the two do
        not match.
        """
        return splice(passes, update, micro_batches=micro_batches)

    def launched_kernels(self, setup: Setup, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Return the step's kernels with another launch, such as by CUDA graphs; the same object if nothing
        changes.
        """
        return kernels


PLAIN = StepParts()


def parts_of(setup: Setup) -> StepParts:
    """Return the object that simulates and joins the parts of a step under this Setup."""
    named = (wish.parts for wish in used_wishes(setup) if wish.parts is not None)
    parts = next(named, None)
    return PLAIN if parts is None else parts.run()
