"""The same plan on many GPUs: which of them trains a job, with what recipe, how fast.

What a run costs is no part of it: prices are the user's, and change by the day (`prices.py` lays them beside
this answer). A GPU whose bytes or seconds are not known stands in the list with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from snugfit.documents import decode_fields, encode, encode_fields
from snugfit.errors import UsageError
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.plan import Choice, Counts, KeptSlot
from snugfit.results.speed import StepSpeed, speed_of

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class OnGpu:
    """The answer for one GPU."""

    gpu: Gpu
    """The GPU that was asked about."""

    fits: bool | None
    """Whether any recipe fits it; None where that is not known."""

    headroom_bytes: int = 0
    """How much of the GPU's memory should stay free."""

    choice: Choice | None = None
    """The best recipe, or where nothing fits the nearest miss. Its seconds are 0 where they are not known."""

    verified: bool | None = None
    """Whether simulating it in full, whose figures these are, took what the search had found: the same
    seconds, and the same bytes but for the GPU's own workspaces and scratch. None where there is no
    recipe."""

    rates: str = ""
    """Where the seconds come from."""

    measured_rates: bool | None = None
    """Whether the GPU's rates were measured; False where they were scaled from another's by data sheet, None
    where there are no seconds."""

    mfu: float | None = None
    """Model FLOPs utilisation of the recipe; None where no peak or no seconds are known."""

    why: str = ""
    """Why bytes or seconds are not known."""

    doubts: tuple[str, ...] = ()
    """What the rehearsal of the recipe had to assume."""

    @property
    def key(self) -> str:
        """The GPU's, in the table."""
        return self.gpu.key

    @property
    def lacking_bytes(self) -> int:
        """How much memory there is too little; negative where something fits, 0 where that is not known."""
        return self.choice.needed_bytes - (self.gpu.memory_bytes or 0) if self.choice else 0

    @property
    def tight(self) -> bool:
        """Whether the recipe fits and leaves less than the headroom: then none leaves it."""
        return bool(self.fits) and -self.lacking_bytes < self.headroom_bytes

    def pace(self, steps: int | None) -> float | None:
        """Seconds a step on a run of so many (`Choice.pace`), where that is known and fits."""
        known = self.choice if self.fits and self.choice and self.choice.step_seconds else None
        return known.pace(steps) if known else None


@dataclass(frozen=True, kw_only=True)
class GpuPlans:
    """The answers for many GPUs."""

    job: Job
    """What must be trained."""

    fidelity: str
    """The least exact that the user allows."""

    objective: str
    """What is best on each GPU: `speed`, `memory` or `cost` (which on one GPU is `speed`)."""

    steps: int | None = None
    """The run's length, over which the start-up was spread; None where it was not said."""

    answers: tuple[OnGpu, ...]
    """In the order in which the GPUs were asked about."""

    kept: tuple[KeptSlot, ...] = ()
    """Slots that were not searched."""

    counts: tuple[Counts, ...] = ()
    """How much each of the searches searched; GPUs that run the same kernels share one."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages that it was made with."""

    @property
    def fitting(self) -> tuple[OnGpu, ...]:
        """The answers for GPUs that something fits."""
        return tuple(answer for answer in self.answers if answer.fits)

    @property
    def smallest(self) -> OnGpu | None:
        """The GPU of the least memory that trains this; of several the fastest."""
        return min(
            self.fitting,
            key=lambda on_gpu: (on_gpu.gpu.memory_bytes or 0, on_gpu.pace(self.steps) or 0.0, on_gpu.key),
            default=None,
        )

    @property
    def fastest(self) -> OnGpu | None:
        """The GPU with the shortest step, or where its length is known the shortest run."""
        timed = (on_gpu for on_gpu in self.fitting if on_gpu.pace(self.steps))
        return min(timed, key=lambda on_gpu: (on_gpu.pace(self.steps) or 0.0, on_gpu.key), default=None)

    def speed(self, answer: OnGpu) -> StepSpeed | None:
        """How fast the recipe of one of its answers is; None where there is none, or its seconds are not
        known."""
        seconds = answer.choice.step_seconds if answer.choice else 0.0
        if not seconds:
            return None
        return speed_of(seconds, self.job, measured_rates=answer.measured_rates, mfu=answer.mfu)

    def to_json(self) -> dict[str, Any]:
        """The document that `snugfit gpus --for MODEL --json` prints; `GpuPlans.from_json` reads it back."""
        answers = [encode_fields(answer, timing=encode(self.speed(answer))) for answer in self.answers]
        keys: dict[str, Any] = {
            "answers": answers,
            "smallest": self.smallest.key if self.smallest else None,
            "fastest": self.fastest.key if self.fastest else None,
        }
        return {"schema": SCHEMA, "what": "plans for many GPUs", **encode_fields(self, **keys)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The answers that `to_json` wrote. Raises `UsageError` for anything else."""
        if document.get("what") != "plans for many GPUs" or document.get("schema") != SCHEMA:
            raise UsageError("These are not plans of this version of snugfit.")
        try:
            return decode_fields(cls, document)
        except (KeyError, TypeError) as damaged:
            raise UsageError(f"These plans are damaged: {damaged}.") from None
