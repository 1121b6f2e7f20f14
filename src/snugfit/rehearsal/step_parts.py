"""The parts that a step is put together from: its passes and its update, rehearsed apart.

A feature whose steps are put together otherwise names a subclass in its field of `Setup` (`Wish.parts`).
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
    """A step cannot run in the way of its Setup, as a rehearsal of its parts shows."""


class StepParts:
    """The parts of a step that the plain loop runs kernel by kernel."""

    can_be_spliced = True
    """False if passes and update are one."""

    def as_written(self, setup: Setup, *, padded: bool) -> Setup:
        """Return the Setup under which the passes are rehearsed, on batches with or without padding."""
        return setup

    def refuse(self, setup: Setup, waits: int) -> None:
        """Raise `UnsupportedStep` where passes that wait so many times for the device cannot be run."""

    def rehearse_update(self, job: Job, setup: Setup, *asked: Any) -> Part:
        """Return clipping and the optimizer's step under this Setup, with the further arguments of
        `splice.rehearse_update`. Raises `UnsupportedStep`."""
        return rehearse_update(job, setup, *asked)

    def splice(self, passes: Part, update: Part, *, micro_batches: int = 1) -> PeriodicRun | None:
        """Return the step of these parts, or None if the parts do not match."""
        return splice(passes, update, micro_batches=micro_batches)

    def launched_kernels(self, setup: Setup, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Return the step's kernels as the host launches them; the same object if nothing changes."""
        return kernels


PLAIN = StepParts()


def parts_of(setup: Setup) -> StepParts:
    """Return the parts that a step under this Setup is put together from."""
    named = (wish.parts for wish in used_wishes(setup) if wish.parts is not None)
    parts = next(named, None)
    return PLAIN if parts is None else parts.run()
