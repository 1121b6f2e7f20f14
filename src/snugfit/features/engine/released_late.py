"""Technique `released_late`: `released` with gradients that are clipped by the norm of the step before.

`released` needs the norm of all gradients before the first update, and runs forward and backward pass twice
to get it. Here each gradient is scaled by the coefficient of the last step's norm, and updates its weight at
once. Its squares are added to the norm for the next step. So a step has one forward and one backward pass.

The difference is in the clipping alone. After a step whose norm exceeds the limit, the next step's gradients
are scaled by that norm. A step whose own norm jumps is not scaled down in time. With Adam such a step changes
weights little more than others, since updates do not grow with gradients. With SGD it changes them in
proportion to its norm. The first step has no earlier norm, so it runs twice, as with `released`. A checkpoint
has the last norm, so that a resumed run takes the same steps.

A NaN loss changes no weight. A non-finite gradient of a finite loss makes weights non-finite, and the run
returns to its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.features.engine.fields import PREVIOUS_NORM
from snugfit.features.engine.released import Released
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class ReleasedLate(Released):
    """Releases gradients as `released`, but clips by the norm of the step before."""

    fidelity: ClassVar = Fidelity.LEARNS
    source: ClassVar = (
        "the updates of Lv et al., arXiv 2306.09782 (LOMO); the norm of the step before is snugfit's choice"
    )
    elsewhere: ClassVar[tuple[str, ...]] = ()

    def install(self, setup: Setup) -> Setup:
        """Set the field of the Setup that clips each gradient by the norm of the step before."""
        return setup.with_fields(release_gradients=PREVIOUS_NORM)

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the objections to `released`, and one to a job without clipping, which needs no norm."""
        yield from super().objections(job, recipe)
        if job.trains and not job.clip:
            yield "the job does not clip gradients, so no norm is needed. Try 'released'."
