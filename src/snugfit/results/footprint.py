"""Peak bytes and seconds of a training step, in the same types for predictions and measurements.

A prediction and a measurement share `Footprint`, `Timing` and `Startup`, so they can be compared field by
field. A field that one of them cannot fill is None. A measurement has no bytes by category (`kinds`), and a
prediction on a CPU has no NVML bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from snugfit.documents import JsonFields


class Kind(StrEnum):
    """Category of bytes on the device, such as weights, gradients or activations."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer states"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    CACHES = "caches"
    KEY_VALUES = "key-value cache"
    LOGITS = "logits"
    INPUTS = "inputs"
    WORKSPACES = "workspaces"
    GATHERED = "gathered weights"
    COMMUNICATION = "communication"
    CONTEXT = "context"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A point in a training step: the step, phase, module and operator that run."""

    phase: str
    """Phase of a step, or of the preparation: `build`, `load`, `forward`, `backward`, `clip`, `update`, or a
    phase of a feature.
    """

    module: str
    """Dotted name of the module that ran; empty for the training loop itself."""

    operator: str
    """Torch's name of the operator that ran, such as `aten::addmm`."""

    step: int = 1
    """Number of the step in the run, from 1; 0 before the first step."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with a mark that steps count from 1; objects of older versions count
        from 0.
        """
        return asdict(self) | {"counted_from": 1}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the `Moment` (point in a step) that `to_json` of this version or an older one wrote."""
        own = {entry.name: document[entry.name] for entry in fields(cls) if entry.name in document}
        # Documents of older versions count steps from 0, and have no key `counted_from`.
        own["step"] = own.get("step", 0) + 1 - document.get("counted_from", 0)
        return cls(**own)

    def __str__(self) -> str:
        module = f" in {self.module}" if self.module else ""
        return f"{self.phase}{module} ({self.operator})"


@dataclass(frozen=True, kw_only=True)
class Footprint(JsonFields):
    """Peak bytes of a run, from building the model to the last step."""

    requested_bytes: int | None
    """Peak of the bytes that tensors and kernels request: `requested_bytes.all.peak` of the caching
    allocator.
    """

    allocated_bytes: int | None
    """Peak of the bytes of allocated blocks: rounded requests with the remainders of unsplit blocks. It is
    `allocated_bytes.all.peak` of the caching allocator.
    """

    reserved_bytes: int | None
    """Peak of the bytes that the caching allocator reserved on the device: `reserved_bytes.all.peak`."""

    nvml_bytes: int | None
    """Bytes of GPU memory that NVML counts for this process, without the driver's own reserve."""

    context_bytes: int | None = None
    """Part of `nvml_bytes`: the CUDA context and the libraries loaded into it."""

    communication_bytes: int = 0
    """Part of `nvml_bytes`: NCCL's buffers for exchanges with other GPUs. The exchanged tensors are not in
    it; their kind is `communication`.
    """

    managed_bytes: int = 0
    """Part of `nvml_bytes`: memory that the driver moves between host and GPU (paged optimizers), as far as
    it fits on the GPU. A step fits without it.
    """

    host_bytes: int | None = None
    """Peak of the resident bytes of the process in host memory."""

    pinned_bytes: int | None = None
    """Part of `host_bytes`: page-locked memory for offloaded activations and for weights that the host
    updates. It is None if a measurement cannot separate it.
    """

    at: Moment | None = None
    """Moment of the peak of requested bytes; None if a measurement cannot determine it."""

    kinds: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind (such as weights or activations) at the moment of the peak; their sum is
    `requested_bytes`.
    """

    retries: int = 0
    """Number of times that the allocator released its cached blocks to satisfy a request."""


@dataclass(frozen=True, kw_only=True)
class Timing(JsonFields):
    """Seconds of one optimizer step, measured after the first ones."""

    step_seconds: float
    """Mean seconds of the steady steps (those after the start-up). Disturbed steps are left out, and so are
    the shortest and the longest twentieth of the rest.
    """

    spread: float
    """Relative spread of the seconds of steady steps: (90th percentile - 10th percentile) / mean."""

    samples_per_second: float
    """Global batch size divided by `step_seconds`."""

    steps: int
    """Number of steady steps in this mean."""

    unstable: bool = False
    """True if the spread of the seconds is too large to trust the mean."""

    seconds: tuple[float, ...] = ()
    """Seconds of each timed step."""

    every_seconds: float | None = None
    """Mean seconds of the steady steps with the disturbed ones; None in results older than this field."""

    cpu_seconds: tuple[float, ...] = ()
    """CPU seconds of each timed step, summed over the threads of its process; empty in older results."""


@dataclass(frozen=True, kw_only=True)
class Startup(JsonFields):
    """Wall-clock seconds from the start of a process until its steps have their final speed, stage by
    stage.
    """

    imports_seconds: float
    """Seconds from the start of the process until torch and the model's code are imported."""

    context_seconds: float
    """Seconds to create the device's context, and the process group if several ranks train; 0 for one process
    on a CPU.
    """

    build_seconds: float
    """Seconds to construct model and optimizer on the device."""

    first_step_seconds: float
    """Seconds of the first step, to its end on the device. This step loads kernels and starts worker
    processes.
    """

    settling_seconds: float = 0.0
    """Seconds of the steps between the first one and the steady ones."""

    settling_steps: int = 0
    """Number of steps between the first one and the steady ones."""

    def total_seconds(self, step_seconds: float) -> float:
        """Return the seconds that the start-up adds to a run, beyond `step_seconds` for each of its steps."""
        # Steps of the start-up do useful work too, so their steady seconds are subtracted.
        steps = self.first_step_seconds + self.settling_seconds - step_seconds * (1 + self.settling_steps)
        return self.imports_seconds + self.context_seconds + self.build_seconds + max(0.0, steps)
