"""The two separately simulated parts of a step: forward and backward passes, and the optimizer update. They
are recorded separately and joined.

A feature whose steps are joined in another way provides a subclass (`Wish.parts`).
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
    """Error: a simulation showed that this model's step cannot run with these settings, for example as a CUDA
    graph.
    """


class StepParts:
    """Simulate and join the parts of a step whose kernels are launched one by one."""

    can_be_spliced = True
    """True if passes and update can be simulated separately. False if weights are updated within the backward
    pass.
    """

    def as_written(self, setup: Setup, *, padded: bool) -> Setup:
        """Return the Setup under which forward and backward passes are simulated, on batches with or without
        padding.
        """
        return setup

    def refuse(self, setup: Setup, waits: int) -> None:
        """Raise `UnsupportedStep` if the settings do not support the `waits` times that the host waits for
        the device in forward and backward.
        """

    def rehearse_update(self, job: Job, setup: Setup, *arguments: Any) -> Part:
        """Simulate clipping and the optimizer's step under this Setup, with the further arguments of
        `splice.rehearse_update`. Raises `UnsupportedStep`."""
        return rehearse_update(job, setup, *arguments)

    def splice(self, passes: Part, update: Part, *, micro_batches: int = 1) -> PeriodicRun | None:
        """Return a run of whole steps, joined from these simulated passes and this update; None if the two do
        not match.
        """
        return splice(passes, update, micro_batches=micro_batches)

    def launched_kernels(self, setup: Setup, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Return the step's kernels, marked as launched by CUDA graphs if the settings use them; otherwise
        the same object.
        """
        return kernels


PLAIN = StepParts()


def parts_of(setup: Setup) -> StepParts:
    """Return the object that simulates and joins the parts of a step under this Setup."""
    named = (wish.parts for wish in used_wishes(setup) if wish.parts is not None)
    parts = next(named, None)
    return PLAIN if parts is None else parts.run()
