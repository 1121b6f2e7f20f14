"""A measurement: the bytes and seconds of one measured run, and the outcome of its process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from snugfit.documents import JsonDocument, decode_fields, finite_or_null, null_to_nan
from snugfit.job.job import Job
from snugfit.results.footprint import Footprint, Startup, Timing
from snugfit.results.frame import Tabular
from snugfit.techniques.recipe import Recipe

LOWERED = 0.97
"""Share of the GPU's highest clock. Reports mention a mean clock below it (chosen)."""

HIGH_DISTURBANCE = 0.2
"""Share of disturbed checks of a CPU core. Reports mention a larger share (chosen)."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Name and memory of a measured device."""

    type: str
    """`cuda` or `cpu`, the device type of torch."""
    name: str
    uuid: str | None = None
    driver: str | None = None
    total_bytes: int | None = None
    """Bytes of the device's memory, from NVML, or from torch if NVML is not available."""
    reserve_bytes: int | None = None
    """Bytes reserved by the driver itself; no process can use them."""


@dataclass(frozen=True, kw_only=True)
class GpuClock:
    """The SM clock of a GPU while steps were timed, from NVML."""

    mean_mhz: float
    """Mean of all readings of the clock, in MHz."""
    lowest_mhz: int
    """Lowest of all readings of the clock, in MHz."""
    highest_mhz: int
    """Highest clock that this GPU supports, in MHz."""
    readings: int
    """Number of readings of the clock."""
    reasons: Mapping[str, float] = field(default_factory=dict)
    """Reasons that NVML gives for a lower clock, each with its share of the readings. Keys: `power`, `heat`,
    `the hardware`, `its settings`.
    """
    mean_watts: float | None = None
    """Mean power in watts, if the driver reports it."""
    highest_degrees: float | None = None
    """Highest temperature in degrees Celsius, if the driver reports it."""

    @property
    def fall(self) -> str | None:
        """Sentence on a GPU clock that was lowered during the timed steps, with the reasons. None if the mean
        reaches `LOWERED` of the highest clock, or NVML gives no reason.
        """
        if not self.reasons or self.mean_mhz >= LOWERED * self.highest_mhz:
            return None
        reason = ", ".join(
            f"{name} in {100 * share:.0f} % of {self.readings} readings"
            for name, share in sorted(self.reasons.items(), key=lambda reason_share: -reason_share[1])
        )
        return (
            f"{self.mean_mhz:,.0f} of {self.highest_mhz:,} MHz on average, {self.lowest_mhz:,} at the lowest "
            f"({reason})"
        )


@dataclass(frozen=True, kw_only=True)
class RankMeasured:
    """The result of one rank of several; a value is None if the process ended before it reported it."""

    rank: int
    """Number of the rank, from 0."""
    gpu_index: int | None
    """CUDA index of the rank's GPU; None on a CPU."""
    uuid: str | None
    """UUID of the rank's GPU; None on a CPU, and if NVML is not available."""
    footprint: Footprint | None
    """Peak bytes of the rank."""
    step_seconds: float | None
    """Mean seconds of the rank's steady steps, as in `Timing`."""
    contaminated: str | None = None
    """Description of other processes that used the rank's GPU; None if there were none."""
    crowded: str | None = None
    """Description of other processes that used the host's cores, as in `Measurement`; None if there were
    none.
    """
    disturbed: float | None = None
    """Share of the checks that found this rank's CPU core disturbed by another process, as in `Measurement`.
    """


@dataclass(frozen=True, kw_only=True)
class Measurement(JsonDocument, Tabular):
    """Result of one measured run (experiment) in a separate process."""

    what: ClassVar = "measurement"

    job: Job
    recipe: Recipe
    loop: str
    device: Device
    outcome: str
    """Result of the run: `ok`, or the cause of its end: `oom:torch`, `host-oom`, `signal:SEGV`, `timeout`,
    `exit:1`, `no-result`, `bad-result`.
    """
    footprint: Footprint | None
    """Peak bytes. With several ranks, they are those of the rank with the largest NVML, else reserved, else
    host bytes. `device` is its GPU.
    """
    timing: Timing | None
    """Seconds of the steps; with several ranks, those of the slowest rank."""
    versions: Mapping[str, str]
    when: str
    """Start of the measurement: date and time by ISO 8601, in UTC."""
    startup: Startup | None = None
    """Seconds of the stages before the steady steps; None for a run that failed, and in results older than
    this field.
    """
    first_context_bytes: int | None = None
    """GPU bytes (as NVML counts) right after the first tiny tensor, before any kernel of the step was loaded.
    """
    smi_bytes: int | None = None
    """GPU bytes in use according to nvidia-smi. They are read at the same moment as `smi_nvml_bytes`, for a
    comparison.
    """
    smi_nvml_bytes: int | None = None
    contaminated: str | None = None
    """Description of other processes that used the GPU; None if there were none."""
    losses: tuple[float, ...] = ()
    crowded: str | None = None
    """Sentence on other processes that used all free cores of the host while steps were timed; None
    otherwise. The seconds are then too long, even if they look stable.
    """
    disturbed: float | None = None
    """Share of the checks in which another process disturbed the core that launches kernels
    (`measurement/quiet_core.py`). It is None on a CPU."""
    clock: GpuClock | None = None
    """The GPU's clock while steps were timed; with several ranks, that of the slowest rank.

    It is None on a CPU, without NVML, and for less than 0.05 s of timed steps. Results older than this field
    have None too.
    """
    host_loop_seconds: float | None = None
    """Median seconds of a short Python loop on the core that launches kernels, while steps ran: a measure of
    its speed. It is None on a CPU and in older measurements.
    """
    message: str = ""
    """Last lines that the run wrote before it failed; empty for a successful run."""
    gpus: int = 1
    """Number of GPUs that trained one model together."""
    ranks: tuple[RankMeasured, ...] = ()
    """Measurement of each rank, if several trained; empty for one process."""
    fabric_seconds: float | None = None
    """Seconds per step in which NCCL kernels ran on the first rank: exchanges of tensors, and waits for other
    ranks. torch's profiler measured them in steps after the timed ones. It is None for one GPU, and on a CPU.
    """
    exposed_fabric_seconds: float | None = None
    """Seconds per step in which only NCCL kernels ran: a part of `fabric_seconds`."""

    results: Mapping[str, Any] = field(default_factory=dict)
    """Further results of an evaluation by name, such as its largest error; empty for training."""

    @property
    def ok(self) -> bool:
        """True if the run ended without an error."""
        return self.outcome == "ok"

    @property
    def calls(self) -> dict[str, Any] | None:
        """Seconds of an evaluation's calls (forward passes), their peak bytes and its results, by name.

        The seconds of the set-up include an export, those of the first call a compilation. None for training,
        and for a run that died.
        """
        timing, startup, shape = self.timing, self.startup, self.footprint
        if self.job.trains or timing is None or startup is None:
            return None
        return {
            "setup_seconds": startup.build_seconds,
            "first_call_seconds": startup.first_step_seconds,
            **_percentiles(timing.seconds, "seconds"),
            **_percentiles(timing.cpu_seconds, "cpu_seconds"),
            "peak_bytes": shape and (shape.nvml_bytes or shape.reserved_bytes or shape.host_bytes),
            **self.results,
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row with the outcome, the bytes at the peak and the seconds."""
        shape, timing = self.footprint, self.timing
        return [
            {
                "recipe": str(self.recipe),
                "device": self.device.name,
                "gpus": self.gpus,
                "outcome": self.outcome,
                "requested_bytes": shape and shape.requested_bytes,
                "allocated_bytes": shape and shape.allocated_bytes,
                "reserved_bytes": shape and shape.reserved_bytes,
                "nvml_bytes": shape and shape.nvml_bytes,
                "host_bytes": shape and shape.host_bytes,
                "step_seconds": timing and timing.step_seconds,
                "samples_per_second": timing and timing.samples_per_second,
            }
        ]

    def derived_keys(self) -> dict[str, Any]:
        """Return the losses (null where one is not finite), and the seconds of an evaluation's calls, for the
        JSON document.
        """
        # JSON has no NaN, which the losses of a diverged run contain.
        return {"losses": finite_or_null(self.losses), "calls": self.calls}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the measurement written by `to_json`."""
        return decode_fields(cls, {**document, "losses": null_to_nan(document["losses"])})


def _percentiles(values: Sequence[float], unit: str) -> dict[str, float]:
    """Return the median and the 90th percentile (nearest rank) of seconds, by name; empty without any."""
    ranked = sorted(values)
    return {
        f"{name}_{unit}": ranked[math.ceil(share * len(ranked)) - 1]
        for name, share in (("median", 0.5), ("p90", 0.9))
        if ranked
    }
