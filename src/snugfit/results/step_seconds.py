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
    """Phase of a step: `load`, `forward`, `backward`, `clip` or `update`."""

    group: str
    """Name of the operator group, as in `rehearsal/record/kernels.py`."""

    device_seconds: float
    """Sum of the seconds in which the device runs the kernels of this phase and group."""

    host_seconds: float
    """Sum of the seconds in which the host launches the kernels of this phase and group."""

    roofline_seconds: float
    """Lower limit of the seconds by the GPU's data sheet. For each kernel it is the larger of arithmetic and
    memory traffic at peak speed.
    """


@dataclass(frozen=True, kw_only=True)
class PhaseSpan:
    """One contiguous part of a phase on the host or the device, in seconds since the host began the step."""

    lane: str
    """Resource that works: `host` or `device`."""

    phase: str
    """Phase of a step: `load`, `forward`, `backward`, `clip` or `update`."""

    start_seconds: float
    """Second of the step at which the launch, or the run on the device, of the phase's first kernel begins.
    """

    end_seconds: float
    """Second of the step at which the launch, or the run on the device, of the phase's last kernel ends."""

    busy_seconds: float
    """Seconds of the span in which the host or the device works and does not wait."""


@dataclass(frozen=True, kw_only=True)
class StepSeconds(JsonFields):
    """Predicted seconds of a step, with their causes."""

    step_seconds: float
    """Seconds between the ends of two steady steps (those after the start-up, all equal)."""

    samples_per_second: float
    """Global batch size divided by `step_seconds`."""

    device_seconds: float
    """Seconds of the step in which the device runs kernels."""

    host_seconds: float
    """Seconds of the step in which the host works, without its waits for the device."""

    phases: tuple[PhaseSeconds, ...]
    """Seconds by phase and operator group."""

    bound: str
    """Bottleneck of the step: the cause of most of the device's idle time, or else the operator group with
    the most seconds.

    `host`: the device waits for the host to launch work. `loading`: host and device wait for the worker
    processes that prepare batches. `link`: the device waits for copies of activations to or from host memory.
    `communication`: it waits for exchanges with other GPUs. `pipeline`: it waits for other pipeline stages.
    """

    measured_rates: bool
    """True if the GPU's rates (speeds of kernels) were measured; False if they were scaled from another GPU's
    by data sheet.
    """

    rough_seconds: float = 0.0
    """Seconds of `device_seconds` in kernels without a measured rate, such as convolutions."""

    assumed_host: bool = True
    """False if the host was calibrated; True for the packaged seconds of launches, from rented hosts."""

    peak_seconds: float = 0.0
    """Seconds of the model's arithmetic at the peak FLOP/s of the data sheet; 0 if it has none. The
    arithmetic is the contractions of forward and backward passes, each in its precision, without
    recomputation.
    """

    link_seconds: float = 0.0
    """Seconds of copies of activations to or from host memory, in parallel with the computation."""

    communication_seconds: float = 0.0
    """Sum of the seconds of exchanges with other GPUs, if each ran alone."""

    exposed_communication_seconds: float = 0.0
    """Seconds by which exchanges with other GPUs lengthen the step, since no computation runs in parallel."""

    limited_mhz: float | None = None
    """Predicted clock of a GPU at its power limit, in MHz; None below the limit, or if the GPU's power is not
    known.
    """

    idle_seconds: float = 0.0
    """Seconds of the step in which this GPU waits for other pipeline stages."""

    bubble: float = 0.0
    """Share of all GPUs' time in which they wait for other pipeline stages, in [0, 1)."""

    @property
    def scaling_efficiency(self) -> float | None:
        """Seconds of the step without waits for collectives, as a fraction of its seconds; None without
        collectives.
        """
        if not self.communication_seconds or not self.step_seconds:
            return None
        # Exchanges that run in parallel to computation do not lengthen the step.
        return 1 - self.exposed_communication_seconds / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the seconds of the model's arithmetic at the data sheet's peak rates, as a
        fraction of the step. Definition: Chowdhery et al., arXiv 2204.02311. None if the data sheet has no
        peak rate.
        """
        return self.peak_seconds / self.step_seconds if self.peak_seconds and self.step_seconds else None
