"""The speed of a step: its seconds with their spread, samples and tokens a second, and MFU.

The spread is the range of nine in ten measured steps, as multiples of the predicted seconds. The multiples of
measured GPUs are from recorded steps (`results/recorded-seconds-2026-11-30.json`). A host without calibration
is a fast desktop core at best and a cloud vCPU at worst.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snugfit.job.job import Job

HOST, LOADING = "host", "loading"

GPU_BOUND = (0.93, 1.09)
"""Smallest and largest seconds of a step that the GPU bounds, as multiples of the predicted ones."""

THIS_HOST = (0.8, 1.25)
"""The same for a step that a calibrated host bounds."""

FAST_DESKTOP_CORE, CLOUD_VCPU = 0.7, 1.85
"""Seconds of launches on two other hosts, as multiples of the packaged ones.

The first is chosen. The second is that of 95 % of the recorded steps on rented hosts.
"""

ANY_BOUND = (0.85, 1.2), (0.85, 1.6)
"""The multiples for a step without a predicted bottleneck, on a calibrated host and on another one."""

SCALED = (1 / 1.35, 1 / 0.65)
"""The multiples for a GPU with rates scaled by data sheet. The speeds of a V100 in Hugging Face's guide are
within them (dev/seconds.md).
"""

OTHER_HOSTS = "fast desktop core to cloud vCPU"
"""Assumption of a range that depends on the host."""

_ANY_HOST = (FAST_DESKTOP_CORE, CLOUD_VCPU)

_MULTIPLES = {
    (HOST, False): THIS_HOST,
    (LOADING, False): THIS_HOST,
    ("", False): ANY_BOUND[0],
    (HOST, True): _ANY_HOST,
    (LOADING, True): _ANY_HOST,
    ("", True): ANY_BOUND[1],
}
"""Multiples by bottleneck, and for a host that was calibrated (False) or not."""


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

    assumption: str = ""
    """Hosts between which the seconds lie; empty if the range does not depend on the host."""

    @property
    def samples_range(self) -> tuple[float, float] | None:
        """Samples per second at `high_seconds` and at `low_seconds`; None if the spread is unknown."""
        if self.low_seconds is None or self.high_seconds is None:
            return None
        samples = self.samples_per_second * self.step_seconds
        return samples / self.high_seconds, samples / self.low_seconds


def speed_of(
    seconds: float,
    job: Job,
    *,
    measured_rates: bool | None,
    bound: str = "",
    mfu: float | None = None,
    assumed_host: bool = True,
    host_seconds: float = 0.0,
) -> StepSpeed:
    """Return the speed of a step of the job with `seconds` as its predicted length.

    `bound` is the bottleneck of the step (`StepSeconds.bound`; empty for none). `measured_rates` is True for
    a measured GPU and False for scaled rates; None gives no spread. `assumed_host` is False for a calibrated
    host. `host_seconds` are those of the host, which may be the bottleneck on a slower host.
    """
    speed = StepSpeed(
        step_seconds=seconds,
        samples_per_second=job.batch_size / seconds if seconds else 0.0,
        tokens_per_second=job.tokens / seconds if job.tokens and seconds else None,
        mfu=mfu,
    )
    if measured_rates is None or seconds <= 0:
        return speed
    low, high = _MULTIPLES.get((bound, assumed_host), GPU_BOUND) if measured_rates else SCALED
    by_device = seconds * high
    by_host = measured_rates * assumed_host * CLOUD_VCPU * host_seconds
    depends = (bound, measured_rates, assumed_host) == (HOST, True, True)
    return replace(
        speed,
        low_seconds=seconds * low,
        high_seconds=max(by_device, by_host),
        assumption=OTHER_HOSTS * (depends | (by_host > by_device)),
    )
