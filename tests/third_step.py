"""Law 1 for the update of our own optimizers: the third step, which equals all later ones."""

from __future__ import annotations

from aligned import compare, peak
from cpu_scratch import compared
from reported import foreseen, reports
from snugfit.job.job import Job
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.setup import Setup


def hold_third_step(job: Job, setup: Setup) -> None:
    """Assert that a real third step allocates the events of its trace, and that both runs have the same
    peak."""
    trace = compared(foreseen(rehearse(job, setup, CpuPolicy())))
    real = compared(reports(job, setup))
    third = [[event for event in events if event.step == 2] for events in (real, trace)]
    assert all(third)
    assert compare(*third).similarity == 1.0
    assert peak(real) == peak(trace)
