"""Seconds of a predicted step: how long it takes, in which phases, and what bounds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

COMMUNICATION = "communication"
"""`StepSeconds.bound` of a step that would be shorter if its GPUs exchanged nothing."""

PIPELINE = "pipeline"
"""`StepSeconds.bound` of a step in which the GPU waits for other stages most of the time that it does not
work."""

LINK = "link"
"""`StepSeconds.bound` of a step that would be shorter if its activations did not travel."""


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """Seconds of one operator group in one phase of the steady step."""

    phase: str
    """`load`, `forward`, `backward`, `clip` or `update`."""

    group: str
    """The operator group, as `rehearsal/record/kernels.py` names it."""

    device_seconds: float
    """Of the kernels on the device, added up."""

    host_seconds: float
    """Of the host to launch them, added up."""

    roofline_seconds: float
    """What the data sheet would allow: by kernel the larger of arithmetic and memory traffic at its peaks."""


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """One passage of a phase on the host or the device, in seconds since the host began the steady step."""

    lane: str
    """Who works: `host` or `device`."""

    phase: str
    """`load`, `forward`, `backward`, `clip` or `update`."""

    start_seconds: float
    """When its first kernel is being launched, or begins to run."""

    end_seconds: float
    """When its last kernel is launched, or has run."""

    busy_seconds: float
    """Of that, in which the host or the device works rather than waits."""


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """How long a step takes, and why."""

    step_seconds: float
    """Between the ends of two steady steps."""

    samples_per_second: float
    """Global batch over `step_seconds`."""

    device_seconds: float
    """Of the step, in which the device works."""

    host_seconds: float
    """Of the step, in which the host works, without its waiting for the device."""

    phases: tuple[PhaseSeconds, ...]
    """The same by phase and operator group."""

    bound: str
    """`host` when the device waits for work most of the time that it does not work, `loading` when all wait
    for the processes that make batches, `link` when the device waits for activations that travel between it
    and the host's memory, `communication` when it waits for other GPUs, `pipeline` when these have other
    stages of the layers, else the operator group that keeps the device longest."""

    measured_rates: bool
    """Whether the GPU's rates were measured; else they were scaled from another's by data sheet."""

    peak_seconds: float = 0.0
    """What the model's arithmetic would take at the data sheet's peaks: the contractions of its forward and
    backward passes, each in its precision; what is computed again does not count. 0: no peak is known."""

    link_seconds: float = 0.0
    """Of the step, in which activations travel to the host's memory or back, beside the computation."""

    communication_seconds: float = 0.0
    """Of exchanges with other GPUs, each as long as it takes alone, added up."""

    exposed_communication_seconds: float = 0.0
    """Of the step, by which it is longer than if exchanges took no time: what is not hidden behind the
    computation."""

    idle_seconds: float = 0.0
    """Of the step, in which this GPU waits for those that have other stages of the layers."""

    bubble: float = 0.0
    """The share of all GPUs' time in which they wait for other stages, in [0, 1)."""

    @property
    def scaling_efficiency(self) -> float | None:
        """The share of the step that it would take if exchanges took no time; None where there are none."""
        if not self.communication_seconds or not self.step_seconds:
            return None
        return 1 - self.exposed_communication_seconds / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the step that the model's arithmetic would take at the data
        sheet's peaks (Chowdhery et al., arXiv 2204.02311); None where no peak is known."""
        return self.peak_seconds / self.step_seconds if self.peak_seconds and self.step_seconds else None

    def to_json(self) -> dict[str, Any]:
        """The JSON object that a prediction holds as `timing`."""
        return asdict(self)
