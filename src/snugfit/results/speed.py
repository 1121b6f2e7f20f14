"""How fast a step is: its seconds with their spread, samples and tokens a second, and MFU.

The spread is what nine in ten measured steps kept to. The errors are `predicted / measured - 1` of the 66
drawn steps of seed 20261124 on an H200, forecast after its calibration (README.md and docs/accuracy.md), by
what was predicted to bound the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snugfit.job.job import Job

GPU_BOUND = 0.064
HOST_BOUND = 0.204
ANY_BOUND = 0.170
"""Where it is not known what bounds the step."""

SCALED = 0.35
"""On a GPU whose rates were scaled by data sheet: the guide's published speeds of a V100 are within it
(docs/seconds.md)."""

_ERRORS = {"host": HOST_BOUND, "loading": HOST_BOUND, "": ANY_BOUND}


@dataclass(frozen=True, kw_only=True)
class StepSpeed:
    """How fast a predicted step is; what is not known is None."""

    step_seconds: float
    """Of the steady step; 0 where that is not known."""

    low_seconds: float | None = None
    """Nine in ten measured steps took at least that long."""

    high_seconds: float | None = None
    """Nine in ten measured steps took at most that long."""

    samples_per_second: float
    """Global batch over `step_seconds`."""

    tokens_per_second: float | None = None
    """Padding counts too; None where a batch has no tokens."""

    mfu: float | None = None
    """Model FLOPs utilisation (`StepSeconds.mfu`); None where no peak is known."""

    @property
    def samples_range(self) -> tuple[float, float] | None:
        """Samples per second of the slowest and the fastest of those steps; None where they are not known."""
        if self.low_seconds is None or self.high_seconds is None:
            return None
        samples = self.samples_per_second * self.step_seconds
        return samples / self.high_seconds, samples / self.low_seconds


def speed_of(
    seconds: float, job: Job, *, measured_rates: bool | None, bound: str = "", mfu: float | None = None
) -> StepSpeed:
    """The speed of a step of the job that is predicted to take so many seconds. `bound` is what bounds it
    (`StepSeconds.bound`; empty where that is not known), `measured_rates` whether its GPU was measured; with
    None there is no spread."""
    error = _ERRORS.get(bound, GPU_BOUND) if measured_rates else SCALED
    known = measured_rates is not None and seconds > 0
    return StepSpeed(
        step_seconds=seconds,
        low_seconds=seconds / (1 + error) if known else None,
        high_seconds=seconds / (1 - error) if known else None,
        samples_per_second=job.batch_size / seconds if seconds else 0.0,
        tokens_per_second=job.tokens / seconds if job.tokens and seconds else None,
        mfu=mfu,
    )
