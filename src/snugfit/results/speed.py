"""The speed of a step: its seconds with their spread, samples and tokens a second, and MFU.

The spread is the range of nine in ten measured steps. The errors are `predicted / measured - 1`, grouped by
the predicted bottleneck of the step. They come from the 66 drawn steps of seed 20261124 on an H200, predicted
after its calibration (README.md and docs/accuracy.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snugfit.job.job import Job

GPU_BOUND = 0.064
HOST_BOUND = 0.204
ANY_BOUND = 0.170
"""Relative spread of predicted seconds around measured ones, for a step without a predicted bottleneck."""

SCALED = 0.35
"""Relative spread of predicted seconds around measured ones, for a GPU with rates scaled by data sheet. The
speeds of a V100 in Hugging Face's guide are within it (dev/seconds.md).
"""

_ERRORS = {"host": HOST_BOUND, "loading": HOST_BOUND, "": ANY_BOUND}


@dataclass(frozen=True, kw_only=True)
class StepSpeed:
    """The speed of a predicted step; None for each value that is not predicted."""

    step_seconds: float
    """Seconds of the steady step (equal to all later ones); 0 if they are not predicted."""

    low_seconds: float | None = None
    """Lower limit of the seconds of nine in ten measured steps; None if the spread is unknown."""

    high_seconds: float | None = None
    """Upper limit of the seconds of nine in ten measured steps; None if the spread is unknown."""

    samples_per_second: float
    """Global batch size divided by `step_seconds`."""

    tokens_per_second: float | None = None
    """Tokens per second, with padding; None if a batch has no tokens."""

    mfu: float | None = None
    """Model FLOPs utilisation (`StepSeconds.mfu`), from 0 to 1; None without a peak FLOP/s in the data sheet.
    """

    @property
    def samples_range(self) -> tuple[float, float] | None:
        """Samples per second at `high_seconds` and at `low_seconds`; None if the spread is unknown."""
        if self.low_seconds is None or self.high_seconds is None:
            return None
        samples = self.samples_per_second * self.step_seconds
        return samples / self.high_seconds, samples / self.low_seconds


def speed_of(
    seconds: float, job: Job, *, measured_rates: bool | None, bound: str = "", mfu: float | None = None
) -> StepSpeed:
    """Return the speed of a step of the job with `seconds` as its predicted length.

    `bound` is the bottleneck of the step (`StepSeconds.bound`; empty for none). `measured_rates` is True for
    a measured GPU and False for scaled rates; None gives no spread.
    """
    error = _ERRORS.get(bound, GPU_BOUND) if measured_rates else SCALED
    known = measured_rates is not None and seconds > 0
    return StepSpeed(
        # The error is `predicted / measured - 1`, so measured seconds are the predicted ones divided by 1 +
        # error.
        step_seconds=seconds,
        low_seconds=seconds / (1 + error) if known else None,
        high_seconds=seconds / (1 - error) if known else None,
        samples_per_second=job.batch_size / seconds if seconds else 0.0,
        tokens_per_second=job.tokens / seconds if job.tokens and seconds else None,
        mfu=mfu,
    )
