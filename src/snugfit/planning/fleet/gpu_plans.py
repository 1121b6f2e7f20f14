"""Results of one plan for many GPU models: the best recipe on each, with its bytes and speed.

The price of a run is not included, since users give prices. `prices.py` combines prices with these results. A
GPU whose bytes or seconds are unknown is listed with the reason.
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
    """A plan's best recipe on one GPU model, or the reason why none was found."""

    gpu: Gpu
    """The requested GPU."""

    fits: bool | None
    """True if a recipe fits the GPU's memory; None if unknown."""

    headroom_bytes: int = 0
    """Bytes of the GPU's memory that should stay free."""

    choice: Choice | None = None
    """Best recipe, or the one closest to fitting if nothing fits. Its seconds are 0 if they are unknown."""

    verified: bool | None = None
    """True if a full simulation of the recipe gave the search's bytes and seconds; None without a recipe. The
    bytes may differ by this GPU's own workspaces and temporary buffers.
    """

    rates: str = ""
    """Sentence on the source of the GPU's rates (speeds of kernels)."""

    measured_rates: bool | None = None
    """True if the GPU's rates were measured, and False if they were scaled from another GPU's by data sheet.
    It is None without seconds.
    """

    mfu: float | None = None
    """Model FLOPs utilisation (MFU) of a step, from 0 to 1; None if the peak FLOP/s or the seconds are
    unknown.
    """

    why: str = ""
    """Reason why the bytes or the seconds of a recipe are unknown."""

    doubts: tuple[str, ...] = ()
    """Warnings about assumptions of the recipe's simulation, as sentences."""

    @property
    def key(self) -> str:
        """Key of the GPU in the table."""
        return self.gpu.key

    @property
    def lacking_bytes(self) -> int:
        """Bytes of GPU memory that the recipe lacks; negative if it fits, 0 if unknown."""
        return self.choice.needed_bytes - (self.gpu.memory_bytes or 0) if self.choice else 0

    @property
    def tight(self) -> bool:
        """True if the recipe fits but leaves less memory free than `headroom_bytes`, as every recipe does on
        this GPU.
        """
        return bool(self.fits) and -self.lacking_bytes < self.headroom_bytes

    def pace(self, steps: int | None) -> float | None:
        """Return the recipe's seconds per step, including the start-up spread over a run of `steps` steps
        (`Choice.pace`). None if they are unknown or nothing fits."""
        known = self.choice if self.fits and self.choice and self.choice.step_seconds else None
        return known.pace(steps) if known else None


@dataclass(frozen=True, kw_only=True)
class GpuPlans(JsonDocument):
    """The best recipes on many GPU models."""

    what: ClassVar = "plans for many GPUs"

    job: Job
    """The training job of the plans."""

    fidelity: str
    """Lowest fidelity (numerical closeness to the plain step) that the user allows."""

    objective: str
    """Criterion for the best recipe on each GPU: `speed`, `memory` or `cost` (on one GPU the same as
    `speed`)."""

    steps: int | None = None
    """Length of the training run in steps, over which the start-up is spread; None if it was not given."""

    answers: tuple[OnGpu, ...]
    """Results in the order of the requested GPUs."""

    kept: tuple[KeptSlot, ...] = ()
    """Slots (choices of a recipe, such as precision) that the search left unchanged."""

    counts: tuple[Counts, ...] = ()
    """Numbers of recipes that each search considered. GPUs that run the same kernels share a search."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that computed the plans."""

    @property
    def fitting(self) -> tuple[OnGpu, ...]:
        """The results for GPUs on which a recipe fits."""
        return tuple(answer for answer in self.answers if answer.fits)

    @property
    def smallest(self) -> OnGpu | None:
        """The GPU with the least memory on which a recipe fits; among equals, the fastest."""
        return min(
            self.fitting,
            key=lambda on_gpu: (on_gpu.gpu.memory_bytes or 0, on_gpu.pace(self.steps) or 0.0, on_gpu.key),
            default=None,
        )

    @property
    def fastest(self) -> OnGpu | None:
        """The GPU with the fewest seconds per step, including the start-up if the run's length is known."""
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
