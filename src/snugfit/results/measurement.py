"""A measurement: the footprint and the timing of one experiment, and how its process ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from snugfit.documents import decode_fields, encode_fields, finite_or_null, null_to_nan
from snugfit.job.job import Job
from snugfit.results.footprint import Footprint, Startup, Timing
from snugfit.results.frame import Tabular
from snugfit.techniques.recipe import Recipe

SCHEMA = 1

LOWERED = 0.97
"""Of its highest clock: a mean below that is said. A choice."""

HIGH_DISTURBANCE = 0.2
"""Share of disturbed checks of a core from which a measurement says so. A choice."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device a measurement ran on, as it names itself."""

    type: str
    """`cuda` or `cpu`, as torch calls it."""
    name: str
    uuid: str | None = None
    driver: str | None = None
    total_bytes: int | None = None
    """By NVML, or by torch where NVML does not answer."""
    reserve_bytes: int | None = None
    """Held by the driver itself; no process can use it."""


@dataclass(frozen=True, kw_only=True)
class GpuClock:
    """The clock of a GPU's multiprocessors while steps were timed, by NVML."""

    mean_mhz: float
    """The mean of all readings."""
    lowest_mhz: int
    """The lowest of them."""
    highest_mhz: int
    """The highest that this GPU may have."""
    readings: int
    """How often it was read."""
    reasons: Mapping[str, float] = field(default_factory=dict)
    """Why it was not higher, as NVML says, with the share of the readings: `power`, `heat`, `the hardware`,
    `its settings`."""

    @property
    def fall(self) -> str | None:
        """That it was lowered, in words; None where it was not, by more than `LOWERED`, or NVML says no
        reason."""
        if not self.reasons or self.mean_mhz >= LOWERED * self.highest_mhz:
            return None
        why = ", ".join(
            f"{name} in {100 * share:.0f} % of {self.readings} readings"
            for name, share in sorted(self.reasons.items(), key=lambda one: -one[1])
        )
        return (
            f"{self.mean_mhz:,.0f} of {self.highest_mhz:,} MHz on average, {self.lowest_mhz:,} at the lowest "
            f"({why})"
        )


@dataclass(frozen=True, kw_only=True)
class RankMeasured:
    """One of several processes that trained together; what it did not live to report is None."""

    rank: int
    """Its number, from 0."""
    gpu_index: int | None
    """Of its GPU, as CUDA counts; None on a CPU."""
    uuid: str | None
    """Of its GPU; None on a CPU, and where NVML does not answer."""
    footprint: Footprint | None
    """Its bytes at their peak."""
    step_seconds: float | None
    """The mean of its steady steps, as in `Timing`."""
    contaminated: str | None = None
    """Why its GPU was not this run's alone, when it was not."""
    crowded: str | None = None
    """What other processes took of the host's cores, as in `Measurement`."""
    disturbed: float | None = None
    """Share of the checks that found this rank's core disturbed, as in `Measurement`."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Tabular):
    """The result of one experiment in a process of its own."""

    job: Job
    recipe: Recipe
    loop: str
    device: Device
    outcome: str
    """`ok`, or the cause of death: `oom:torch`, `host-oom`, `signal:SEGV`, `timeout`, `exit:1`, `no-result`,
    `bad-result`."""
    footprint: Footprint | None
    """Of several ranks: of the one that needs the most, by NVML, else reserved, else on the host; `device` is
    its GPU."""
    timing: Timing | None
    """Of several ranks: of the slowest."""
    versions: Mapping[str, str]
    when: str
    """Start, ISO 8601 in UTC."""
    startup: Startup | None = None
    """What came before the steady steps; None for a run that died, and in results older than this field."""
    first_context_bytes: int | None = None
    """NVML bytes right after the first tiny tensor, before any kernel of the step was loaded."""
    smi_bytes: int | None = None
    """nvidia-smi's used memory at the one moment the two were compared, next to `smi_nvml_bytes`."""
    smi_nvml_bytes: int | None = None
    contaminated: str | None = None
    """Why the GPU was not this run's alone, when it was not."""
    losses: tuple[float, ...] = ()
    crowded: str | None = None
    """What other processes took of the host's cores while steps were timed, when none was left: the seconds
    are then too long, however stable they look."""
    disturbed: float | None = None
    """Share of the checks in which somebody else disturbed the core that launches kernels
    (`measurement/quiet_core.py`); None on a CPU."""
    clock: GpuClock | None = None
    """Of the GPU while steps were timed; None on a CPU, where NVML does not tell, for steps that are timed
    in less than a twentieth of a second, and in results older than this field. Of several ranks: of the
    slowest's."""
    host_loop_seconds: float | None = None
    """How fast that core was while steps ran: seconds of a short loop of pure Python on it, the median; None
    on a CPU and in older measurements."""
    message: str = ""
    """For a run that died: the last lines it wrote."""
    gpus: int = 1
    """How many trained together."""
    ranks: tuple[RankMeasured, ...] = ()
    """Each of several processes; empty for one alone."""
    fabric_seconds: float | None = None
    """Seconds a step that kernels of NCCL ran on the first rank, in steps after the timed ones, under torch's
    profiler: the exchange of tensors, and waiting for other ranks. None for one GPU, and on a CPU."""
    exposed_fabric_seconds: float | None = None
    """Of these: while no other kernel ran."""

    @property
    def ok(self) -> bool:
        """Whether the run ended as it should."""
        return self.outcome == "ok"

    def to_rows(self) -> list[dict[str, Any]]:
        """One row: how the run ended, its bytes at the peak, and its seconds."""
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

    def to_json(self) -> dict[str, Any]:
        """The document that the ledger keeps."""
        fields = encode_fields(self, losses=finite_or_null(self.losses))
        return {"schema": SCHEMA, "what": "measurement", **fields}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The measurement that `to_json` wrote."""
        return decode_fields(cls, {**document, "losses": null_to_nan(document["losses"])})
