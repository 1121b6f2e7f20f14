"""Reasons for groups of GPUs that work on the same samples, as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.techniques import roster

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.several_gpus.candidates import Shared


def why_mesh(job: Job, shared: Shared, step_seconds: float, alone_seconds: float | None) -> str:
    """Return the sharing of its groups of GPUs with the reason; empty without groups.

    `alone_seconds` is the lower bound of a step that shares the batch alone, None if that does not fit.
    """
    if shared.parts == 1:
        return ""
    what = " and ".join(shared.processes.groups_in_words())
    if job.batch_size % shared.gpus:
        why = f"a batch of {job.batch_size:,} cannot be shared evenly by {shared.gpus:,} GPUs"
    elif alone_seconds is None:
        why = "nothing fits in which GPUs share the batch alone"
    else:
        why = f"sharing the batch alone takes at least {alone_seconds / step_seconds:.1f} times as long"
    return f"{what}, because {why}."


def doubts_about_mesh(job: Job, shared: Shared, gpu: Gpu) -> Iterator[str]:
    """Yield warnings on the limits of measurements with its techniques for groups of GPUs."""
    if shared.parts == 1:
        return
    for slot in roster.slots_of_several_gpus():
        technique = shared.recipe[slot]
        for warning in technique.warnings(job, gpu.compute_capability):
            yield f"{technique}: {warning}"
