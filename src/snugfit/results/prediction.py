"""The prediction: footprint and timing of a step, and the anatomy that explains them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from snugfit.documents import decode_fields, encode_fields
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.results.footprint import Footprint, Startup
from snugfit.results.frame import Tabular
from snugfit.results.speed import StepSpeed, speed_of
from snugfit.results.step_seconds import PhaseSpan, StepSeconds
from snugfit.techniques.recipe import Recipe

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class KindLine:
    """Bytes of one kind at the peak, and why they are there."""

    kind: str
    bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class TensorLine:
    """Tensors alive at the peak that one module and operator allocated, together."""

    module: str
    """Dotted name; layers of one stack are folded: `bert.encoder.layer.*.attention`."""
    operator: str
    phase: str
    kind: str
    bytes: int
    count: int


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Bytes after one event of the steady step."""

    position: float
    """Share of the step's events that have passed, in [0, 1]."""
    phase: str
    live_bytes: int
    reserved_bytes: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Live bytes by kind; they add up to `live_bytes`."""


@dataclass(frozen=True, kw_only=True)
class ModuleLine:
    """Bytes of one kind at the peak that one module allocated, all its operators together."""

    module: str
    """Dotted name, folded as in `TensorLine`; empty for the loop."""
    kind: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class OperatorLine:
    """Work of one operator group in one phase of the steady step."""

    group: str
    """`tensor contractions`, `statistical normalisations` or `element-wise`."""
    phase: str
    kernels: int
    flops: int
    bytes: int
    """Bytes that the kernels read and write."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Where the bytes are at the peak, and which kernels the step runs."""

    kinds: tuple[KindLine, ...]
    largest: tuple[TensorLine, ...]
    curve: tuple[CurvePoint, ...]
    operators: tuple[OperatorLine, ...]
    syncs: int
    """How often the steady step waits for the device (`.item()` and the like)."""
    modules: tuple[ModuleLine, ...] = ()
    """All bytes at the peak, by module and kind, the largest first."""


@dataclass(frozen=True, kw_only=True)
class RankPredicted:
    """What one rank of several takes, where they differ: ranks of one stage of the layers take the same."""

    rank: int
    """The first rank of its stage."""
    stage: int
    """Its stage, from 0; of several the first."""
    layers: int
    """How many of the layers it has."""
    requested_bytes: int
    """What its tensors and kernels ask for at the peak, as in `Footprint`."""
    allocated_bytes: int
    """What they are handed."""
    reserved_bytes: int
    """What the allocator takes from the device."""
    nvml_bytes: int | None
    """What the device counts as used; None where no context is known."""
    idle_seconds: float | None = None
    """Of the step, in which it waits for other stages; None where the seconds are not known."""


@dataclass(frozen=True, kw_only=True)
class Prediction(Tabular):
    """What a job under a recipe will take, and whether that fits."""

    job: Job
    recipe: Recipe
    loop: str
    gpu: Gpu | None
    """Each of the GPUs, where there are several."""
    memory_bytes: int | None
    """What may be used: the GPU's memory without the driver's reserve, or what the user named."""
    footprint: Footprint
    anatomy: Anatomy
    versions: Mapping[str, str]
    """Package versions the rehearsal ran with."""
    doubts: tuple[str, ...] = ()
    """Sentences on what in this prediction is less certain than the rest."""
    timing: StepSeconds | None = None
    """Seconds of the steady step; None when no GPU was named, or its rates are not known."""
    headroom_bytes: int = 0
    """How much of the memory should stay free."""
    startup: Startup | None = None
    """The start-up; None where the seconds are not known, and outside the plain loop."""
    timeline: tuple[PhaseSpan, ...] = ()
    """When host and device work in the steady step, phase by phase; empty where the seconds are not known."""
    gpus: int = 1
    """How many train together. Bytes are those of one of them, and so are the kernels; samples per second
    are of all."""
    rank: int = 0
    """Which of them the bytes are of: the one that needs the most, where they differ."""
    ranks: tuple[RankPredicted, ...] = ()
    """Ranks that differ: the first stage's, the last one's, and what stands for those between; empty where
    all are alike."""
    software: str = "installed"
    """`installed`, or the name of a software profile that was emulated."""

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the device: NVML bytes without managed memory, or reserved bytes where
        no context is known."""
        footprint = self.footprint
        fixed = (footprint.nvml_bytes or 0) - footprint.managed_bytes
        return fixed or footprint.reserved_bytes or footprint.requested_bytes or 0

    @property
    def spare_bytes(self) -> int | None:
        """Bytes to spare, negative when the step does not fit; None when no memory was named."""
        return None if self.memory_bytes is None else self.memory_bytes - self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the step fits in the memory; None when no memory was named."""
        return None if self.spare_bytes is None else self.spare_bytes >= 0

    @property
    def tight(self) -> bool | None:
        """Whether the step fits and leaves less than the headroom; None when no memory was named."""
        return None if self.spare_bytes is None else 0 <= self.spare_bytes < self.headroom_bytes

    @property
    def speed(self) -> StepSpeed | None:
        """How fast the step is; None where its seconds are not known."""
        timing = self.timing
        if timing is None:
            return None
        return speed_of(
            timing.step_seconds,
            self.job,
            measured_rates=timing.measured_rates,
            bound=timing.bound,
            mfu=timing.mfu,
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Bytes by kind at the peak, a row each."""
        return [asdict(line) | {"kind": str(line.kind)} for line in self.anatomy.kinds]

    def to_json(self) -> dict[str, Any]:
        """The document that `snugfit predict --json` prints."""
        timing = self.timing and self.speed and self.timing.to_json() | asdict(self.speed)
        verdict = {"fits": self.fits, "tight": self.tight, "spare_bytes": self.spare_bytes}
        fields = encode_fields(self, timing=timing, **verdict)
        return {"schema": SCHEMA, "what": "prediction", **fields}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The prediction that `to_json` wrote. Raises `KeyError`, `TypeError` or `ValueError` for another
        document."""
        if document["what"] != "prediction" or document["schema"] != SCHEMA:
            raise ValueError("another kind of document")
        return decode_fields(cls, document)
