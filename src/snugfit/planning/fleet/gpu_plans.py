"""Results of one plan for many GPUs: the best recipe on each, with its bytes and speed.

The cost of a run is not part of it: prices come from the user and change daily. `prices.py` combines them
with these answers. A GPU whose bytes or seconds are unknown is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from snugfit.documents import JsonDocument, encode, encode_fields
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.plan import Choice, Counts, KeptSlot
from snugfit.results.speed import StepSpeed, speed_of


@dataclass(frozen=True, kw_only=True)
class OnGpu:
    """A plan's best recipe on one GPU model, or the reason for none."""

    gpu: Gpu
    """The requested GPU."""

    fits: bool | None
    """True if any recipe fits the GPU; None if unknown."""

    headroom_bytes: int = 0
    """Bytes of the GPU's memory that should stay free."""

    choice: Choice | None = None
    """Best recipe, or the nearest miss if nothing fits. Its seconds are 0 if they are unknown."""

    verified: bool | None = None
    """True if the full simulation, whose figures these are, confirmed the search; None without a recipe. It
    confirms the same seconds, and the same bytes except for the GPU's own workspaces and temporary buffers.
    """

    rates: str = ""
    """Source of the GPU's rates."""

    measured_rates: bool | None = None
    """True if the GPU's rates were measured, False if a data sheet scaled them from another's, None without
    seconds."""

    mfu: float | None = None
    """Model FLOPs utilisation of the recipe; None without a known peak or seconds."""

    why: str = ""
    """Reason why bytes or seconds are unknown."""

    doubts: tuple[str, ...] = ()
    """Assumptions of the recipe's simulation, as sentences."""

    @property
    def key(self) -> str:
        """Key of the GPU in the table."""
        return self.gpu.key

    @property
    def lacking_bytes(self) -> int:
        """Bytes of memory that are missing; negative if a recipe fits, 0 if unknown."""
        return self.choice.needed_bytes - (self.gpu.memory_bytes or 0) if self.choice else 0

    @property
    def tight(self) -> bool:
        """True if the recipe fits but leaves less than the requested free memory (headroom), because every
        recipe does so on this GPU.
        """
        return bool(self.fits) and -self.lacking_bytes < self.headroom_bytes

    def pace(self, steps: int | None) -> float | None:
        """Return seconds a step, with the start-up spread over a run of `steps` steps (`Choice.pace`); None
        if unknown or if it does not fit."""
        known = self.choice if self.fits and self.choice and self.choice.step_seconds else None
        return known.pace(steps) if known else None


@dataclass(frozen=True, kw_only=True)
class GpuPlans(JsonDocument):
    """The best recipes on many GPU models."""

    what: ClassVar = "plans for many GPUs"

    job: Job
    """The training job of the plans."""

    fidelity: str
    """Lowest fidelity that the user allows."""

    objective: str
    """Criterion on each GPU: `speed`, `memory` or `cost` (which on one GPU is `speed`)."""

    steps: int | None = None
    """Length of the run over which the start-up is spread; None if it was not given."""

    answers: tuple[OnGpu, ...]
    """Answers in the order of the requested GPUs."""

    kept: tuple[KeptSlot, ...] = ()
    """Slots that the search left unchanged."""

    counts: tuple[Counts, ...] = ()
    """Sizes of the searches; GPUs that run the same kernels share one."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that computed the plans."""

    @property
    def fitting(self) -> tuple[OnGpu, ...]:
        """The results for GPUs on which a recipe fits."""
        return tuple(answer for answer in self.answers if answer.fits)

    @property
    def smallest(self) -> OnGpu | None:
        """The GPU with the least memory that trains the job; among equals, the fastest."""
        return min(
            self.fitting,
            key=lambda on_gpu: (on_gpu.gpu.memory_bytes or 0, on_gpu.pace(self.steps) or 0.0, on_gpu.key),
            default=None,
        )

    @property
    def fastest(self) -> OnGpu | None:
        """The GPU with the shortest step, or with the shortest run if its length is known."""
        timed = (on_gpu for on_gpu in self.fitting if on_gpu.pace(self.steps))
        return min(timed, key=lambda on_gpu: (on_gpu.pace(self.steps) or 0.0, on_gpu.key), default=None)

    def speed(self, answer: OnGpu) -> StepSpeed | None:
        """Return the speed of the recipe for one GPU; None without a recipe, or if its seconds are
        unknown.
        """
        seconds = answer.choice.step_seconds if answer.choice else 0.0
        if not seconds:
            return None
        return speed_of(seconds, self.job, measured_rates=answer.measured_rates, mfu=answer.mfu)

    def derived_keys(self) -> dict[str, Any]:
        """Return the results with their speeds, and the keys of the smallest and of the fastest GPU."""
        answers = [encode_fields(answer, timing=encode(self.speed(answer))) for answer in self.answers]
        return {
            "answers": answers,
            "smallest": self.smallest.key if self.smallest else None,
            "fastest": self.fastest.key if self.fastest else None,
        }
