"""The prediction of a step: peak bytes, seconds, and their parts by category (weights, activations, ...),
module and operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from snugfit.documents import JsonDocument, encode
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.results.footprint import Footprint, Startup
from snugfit.results.frame import Tabular
from snugfit.results.speed import StepSpeed, speed_of
from snugfit.results.step_seconds import PhaseSpan, StepSeconds
from snugfit.results.ways_out import WaysOut
from snugfit.techniques.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class KindLine:
    """Bytes of one category (weights, activations, ...) at the peak of a step, with the reason for them."""

    kind: str
    bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class TensorLine:
    """All tensors of one module, operator and dtype that are alive at the peak."""

    module: str
    """Dotted name of the modules. Layers of one stack share a name: `bert.encoder.layer.*.attention`."""
    operator: str
    phase: str
    kind: str
    bytes: int
    count: int
    dtype: str = ""
    """Dtype of the tensors; empty for the temporary buffer of a kernel."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Live bytes by category (weights, activations, ...) after one event (allocation or free) of a step."""

    position: float
    """Share of the step's allocations and frees up to this point, in [0, 1]."""
    phase: str
    live_bytes: int
    reserved_bytes: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Allocated bytes by kind, such as weights or activations; their sum is `live_bytes`."""


@dataclass(frozen=True, kw_only=True)
class ModuleLine:
    """Bytes of one category (weights, activations, ...), at the peak, that one module of the model
    allocated.
    """

    module: str
    """Dotted name of the modules, with one name for the layers of a stack as in `TensorLine`; empty for the
    training loop.
    """
    kind: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class OperatorLine:
    """Number of kernels, FLOPs and bytes of one group of operators in one phase of a step."""

    group: str
    """Operator group: `tensor contractions`, `statistical normalisations` or `element-wise`."""
    phase: str
    kernels: int
    flops: int
    bytes: int
    """Bytes that the kernels read and write."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The composition of the bytes at the peak by category, module and tensor, and the kernels of the
    step.
    """

    kinds: tuple[KindLine, ...]
    largest: tuple[TensorLine, ...]
    curve: tuple[CurvePoint, ...]
    operators: tuple[OperatorLine, ...]
    syncs: int
    """Number of waits of the host for the device in a steady step (`.item()` and similar calls)."""
    modules: tuple[ModuleLine, ...] = ()
    """All bytes at the peak of a step, by module and kind, in descending order."""


@dataclass(frozen=True, kw_only=True)
class RankPredicted:
    """Predicted bytes of one rank (process), if ranks differ. Ranks of one pipeline stage have the same
    bytes.
    """

    rank: int
    """Number of the first rank of this pipeline stage."""
    stage: int
    """Pipeline stage of the rank, from 0. If the rank has several stages, it is the first of them."""
    layers: int
    """Number of the model's layers that the rank computes."""
    requested_bytes: int
    """Bytes requested by the rank's tensors and kernels at the peak, as in `Footprint`."""
    allocated_bytes: int
    """Peak of the bytes of the rank's allocated blocks, as in `Footprint`."""
    reserved_bytes: int
    """Peak of the bytes that the rank's caching allocator reserves on the device."""
    nvml_bytes: int | None
    """GPU bytes (as NVML counts) in use by the rank; None if the size of the CUDA context is unknown."""
    idle_seconds: float | None = None
    """Seconds of the step in which the rank waits for other pipeline stages; None if seconds are not
    predicted.
    """


@dataclass(frozen=True, kw_only=True)
class Prediction(JsonDocument, Tabular):
    """Predicted bytes and seconds of a job under a recipe, and their comparison with the memory limit."""

    what: ClassVar = "prediction"

    job: Job
    recipe: Recipe
    loop: str
    gpu: Gpu | None
    """Model of the GPU, or of each of several GPUs."""
    memory_bytes: int | None
    """Limit of the memory in bytes: the GPU's memory without the driver's reserve, or the user's limit."""
    footprint: Footprint
    anatomy: Anatomy
    versions: Mapping[str, str]
    """Versions of the packages with which the step was simulated."""
    doubts: tuple[str, ...] = ()
    """Warnings about the less certain parts of this prediction, as sentences."""
    read_in_full: bool = True
    """False if parts of the user's configuration were not read that may change the prediction."""
    timing: StepSeconds | None = None
    """Seconds of the steady step (equal to all later ones); None without a GPU model, or if its rates are
    unknown.
    """
    headroom_bytes: int = 0
    """Bytes of the memory limit that should stay free."""
    startup: Startup | None = None
    """Seconds of the start-up; None if seconds are not predicted, and for other loops than the plain one."""
    timeline: tuple[PhaseSpan, ...] = ()
    """Times at which host and device work on each phase of the steady step; empty if seconds are not
    predicted.
    """
    gpus: int = 1
    """Number of GPUs that train one model together. Bytes and kernels are those of one GPU; samples per
    second are those of all.
    """
    rank: int = 0
    """Number of the rank with these bytes. If ranks differ, it is the one that needs the most memory."""
    ranks: tuple[RankPredicted, ...] = ()
    """One prediction for each pipeline stage with different work: the first stage, the stages between, the
    last stage. Empty if all ranks have equal work.
    """
    software: str = "installed"
    """`installed`, or the name of the software profile (versions of packages) that the prediction emulates.
    """
    ways_out: WaysOut | None = None
    """Cheapest changes of the recipe with which the step would fit; None if it fits, or if they were not
    computed.
    """

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the device: NVML bytes without managed memory. If the context's size is
        unknown, they are the allocator's reserved bytes.
        """
        footprint = self.footprint
        # Managed memory pages may stay on the host, so a step fits without them.
        fixed = (footprint.nvml_bytes or 0) - footprint.managed_bytes
        return fixed or footprint.reserved_bytes or footprint.requested_bytes or 0

    @property
    def spare_bytes(self) -> int | None:
        """Free bytes of the memory limit, negative if the step does not fit; None without a limit."""
        return None if self.memory_bytes is None else self.memory_bytes - self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """True if the step fits in the memory; None without a memory limit."""
        return None if self.spare_bytes is None else self.spare_bytes >= 0

    @property
    def tight(self) -> bool | None:
        """True if the step fits and leaves less than the headroom; None without a memory limit."""
        return None if self.spare_bytes is None else 0 <= self.spare_bytes < self.headroom_bytes

    @property
    def speed(self) -> StepSpeed | None:
        """Speed of the step; None if its seconds are not predicted."""
        timing = self.timing
        if timing is None:
            return None
        return speed_of(
            timing.step_seconds,
            self.job,
            measured_rates=timing.measured_rates,
            bound=timing.bound,
            mfu=timing.mfu,
            assumed_host=timing.assumed_host,
            host_seconds=timing.host_seconds,
        )

    @property
    def phase_results(self) -> Any:
        """Results of another use of the model (phase) than training, such as seconds of text generation; None
        for training.
        """
        added = self.job.added_phase
        return None if added is None else added.summary(self)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row of bytes at the peak for each category, such as weights."""
        return [asdict(line) | {"kind": str(line.kind)} for line in self.anatomy.kinds]

    def derived_keys(self) -> dict[str, Any]:
        """Return the computed values of the JSON document: the seconds with their speed, and the comparison
        with the memory limit.
        """
        timing = self.timing and self.speed and self.timing.to_json() | asdict(self.speed)
        verdict: dict[str, Any] = {"fits": self.fits, "tight": self.tight, "spare_bytes": self.spare_bytes}
        if (results := self.phase_results) is not None:
            verdict["phase_results"] = encode(results)
        return {"timing": timing, **verdict}
