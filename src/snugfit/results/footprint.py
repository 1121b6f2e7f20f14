"""What a step takes: bytes at the peak, and seconds. The same types, whether predicted or measured.

A prediction and a measurement hold the same `Footprint`, `Timing` and `Startup`, so that they can be laid
side by side without translating one into the other. What one of them cannot know is None: a measurement
knows no kinds, a prediction on a CPU no NVML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from snugfit.documents import decode_fields, encode_fields


class Kind(StrEnum):
    """What bytes on the device are used for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer states"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    CACHES = "caches"
    INPUTS = "inputs"
    WORKSPACES = "workspaces"
    GATHERED = "gathered weights"
    COMMUNICATION = "communication"
    CONTEXT = "context"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When something happened in a step."""

    phase: str
    """`build`, `load`, `forward`, `backward`, `clip`, `update`."""

    module: str
    """Dotted name of the module that ran, `` for the loop itself."""

    operator: str
    """The operator that ran, by torch's name."""

    step: int = 1
    """Which step of the run, from 1; 0 before the first."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object, which says that its steps count from 1; in older ones they count from 0."""
        return asdict(self) | {"counted_from": 1}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The moment that `to_json` wrote, of this version or an older one."""
        own = {entry.name: document[entry.name] for entry in fields(cls) if entry.name in document}
        own["step"] = own.get("step", 0) + 1 - document.get("counted_from", 0)
        return cls(**own)

    def __str__(self) -> str:
        module = f" in {self.module}" if self.module else ""
        return f"{self.phase}{module} ({self.operator})"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes at the peak of a run, from building the model to the last step."""

    requested_bytes: int | None
    """What tensors and kernels asked for: `requested_bytes.all.peak`."""

    allocated_bytes: int | None
    """What they were handed, after rounding and unsplit blocks: `allocated_bytes.all.peak`."""

    reserved_bytes: int | None
    """What the allocator took from the device: `reserved_bytes.all.peak`."""

    nvml_bytes: int | None
    """What the device counts as used by this process, the driver's own reserve apart."""

    context_bytes: int | None = None
    """Of `nvml_bytes`: the CUDA context and the libraries loaded into it."""

    communication_bytes: int = 0
    """Of `nvml_bytes`: what NCCL keeps to exchange tensors with other GPUs; what the tensors themselves take
    is of the kind `communication`."""

    managed_bytes: int = 0
    """Of `nvml_bytes`: memory that the driver moves between host and GPU (paged optimizers), as far as there
    is room for it. A step fits without it."""

    host_bytes: int | None = None
    """Largest resident memory of the process on the host."""

    pinned_bytes: int | None = None
    """Of the host's: page-locked memory for activations that wait for the backward pass and for weights that
    the host updates; None when a measurement cannot tell."""

    at: Moment | None = None
    """The moment of the requested peak; None when a measurement cannot tell."""

    kinds: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind at that moment; they add up to `requested_bytes`."""

    retries: int = 0
    """How often the allocator had to release its cached blocks to go on."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `Footprint.from_json` reads it back."""
        return encode_fields(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The footprint that `to_json` wrote."""
        return decode_fields(cls, document)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one optimizer step in the steady state."""

    step_seconds: float
    """Mean of the steady steps, without disturbed ones and the shortest and longest twentieths of the
    rest."""

    spread: float
    """(90th percentile - 10th percentile) / mean of the steady steps."""

    samples_per_second: float
    """Global batch over `step_seconds`."""

    steps: int
    """How many steady steps this mean is of."""

    unstable: bool = False
    """True when the spread is too large for the mean to be trusted."""

    seconds: tuple[float, ...] = ()
    """The length of every timed step."""

    every_seconds: float | None = None
    """The mean with disturbed steps in it; None in results older than this field."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `Timing.from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The timing that `to_json` wrote."""
        return decode_fields(cls, document)


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Seconds of the wall clock from a process's beginning to its steady steps, stage by stage."""

    imports_seconds: float
    """Until torch and the model's code are imported."""

    context_seconds: float
    """Until the device has a context; 0 on a CPU."""

    build_seconds: float
    """Until model and optimizer stand on the device."""

    first_step_seconds: float
    """Of the first step, to its end on the device: kernels are loaded and worker processes started in it."""

    settling_seconds: float = 0.0
    """Of the further steps before the steady ones."""

    settling_steps: int = 0
    """How many those are."""

    def total_seconds(self, step_seconds: float) -> float:
        """The whole start-up, less what its steps would take at the steady length `step_seconds`."""
        steps = self.first_step_seconds + self.settling_seconds - step_seconds * (1 + self.settling_steps)
        return self.imports_seconds + self.context_seconds + self.build_seconds + max(0.0, steps)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `Startup.from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The start-up that `to_json` wrote."""
        return cls(**document)
