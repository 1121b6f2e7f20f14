"""Seconds of a predicted step: its length, its phases and the hardware limit of its speed."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.documents import JsonFields

COMMUNICATION = "communication"
"""`StepSeconds.bound` of a step that would be shorter without exchanges between its GPUs."""

PIPELINE = "pipeline"
"""`StepSeconds.bound` of a step in which the GPU waits for other pipeline stages in most of its idle time."""

LINK = "link"
"""`StepSeconds.bound` of a step that would be shorter without transfers of its activations."""


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """Seconds of one group of operators, such as matrix products, in one phase of a step."""

    phase: str
    """`load`, `forward`, `backward`, `clip` or `update`."""

    group: str
    """The operator group, by its name in `rehearsal/record/kernels.py`."""

    device_seconds: float
    """Sum of the kernels' seconds on the device."""

    host_seconds: float
    """Sum of the host's seconds to launch the kernels."""

    roofline_seconds: float
    """Lower limit by data sheet: for each kernel the larger of arithmetic and memory traffic at its peaks."""


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """One contiguous part of a phase on the host or the device, in seconds since the host began the step."""

    lane: str
    """Resource that works: `host` or `device`."""

    phase: str
    """`load`, `forward`, `backward`, `clip` or `update`."""

    start_seconds: float
    """Start of the launch, or of the run on the device, of the phase's first kernel."""

    end_seconds: float
    """End of the launch, or of the run on the device, of the phase's last kernel."""

    busy_seconds: float
    """Part of the span in which the host or the device works rather than waits."""


@dataclass(frozen=True, kw_only=True)
class StepSeconds(JsonFields):
    """Predicted seconds of a step, with their causes."""

    step_seconds: float
    """Seconds between the ends of two steady steps."""

    samples_per_second: float
    """Global batch size divided by `step_seconds`."""

    device_seconds: float
    """Seconds of the step in which the device works."""

    host_seconds: float
    """Seconds of the step in which the host works, without its waits for the device."""

    phases: tuple[PhaseSeconds, ...]
    """Seconds by phase and operator group."""

    bound: str
    """The limit of the step: the cause of most of the device's idle time, or else its longest operator group.

    `host`: the device waits for the host to launch work. `loading`: all wait for the worker processes that
    make batches. `link`: the device waits for activations between it and the host's memory. `communication`:
    it waits for exchanges with other GPUs. `pipeline`: it waits for other stages of the layers.
    """

    measured_rates: bool
    """True if the GPU's rates were measured; False if they were scaled from another GPU by data sheet."""

    peak_seconds: float = 0.0
    """Seconds of the model's arithmetic at the data sheet's peaks. Counted are the contractions of forward
    and backward passes, each in its precision, without recomputation. 0: no peak is available."""

    link_seconds: float = 0.0
    """Seconds of transfers of activations to or from the host's memory, in parallel with the computation."""

    communication_seconds: float = 0.0
    """Sum of the seconds of exchanges with other GPUs, each run alone."""

    exposed_communication_seconds: float = 0.0
    """Seconds of exchanges that the computation does not hide: they lengthen the step."""

    idle_seconds: float = 0.0
    """Seconds of the step in which this GPU waits for other pipeline stages."""

    bubble: float = 0.0
    """The share of all GPUs' time spent in waits for other stages, in [0, 1)."""

    @property
    def scaling_efficiency(self) -> float | None:
        """Seconds of the step without waits for collectives, as a fraction of its seconds; None without
        collectives.
        """
        if not self.communication_seconds or not self.step_seconds:
            return None
        # Hidden exchanges do not lengthen the step.
        return 1 - self.exposed_communication_seconds / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the seconds of the model's arithmetic at the data sheet's peak rates, as a
        fraction of the step. Definition: Chowdhery et al., arXiv 2204.02311. None if the data sheet has no
        peak rate.
        """
        return self.peak_seconds / self.step_seconds if self.peak_seconds and self.step_seconds else None
