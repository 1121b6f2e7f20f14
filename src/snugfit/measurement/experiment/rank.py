"""One process of an experiment after its exit: its bytes, and the contamination of its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snugfit.measurement import contamination
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.clock import clock_between
from snugfit.measurement.contamination import GpuBaseline
from snugfit.measurement.experiment.request import MeasurementRequest
from snugfit.measurement.process import ChildExit
from snugfit.measurement.sampler import Sampler
from snugfit.measurement.stopwatch import timing_of
from snugfit.measurement.target import Target
from snugfit.results.footprint import Footprint, Timing
from snugfit.results.measurement import GpuClock, RankMeasured
from snugfit.step.applier import group_bytes
from snugfit.step.host_link import managed_on_gpu


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The request, device, report and exit of one process."""

    request: MeasurementRequest
    target: Target
    baseline: GpuBaseline | None
    """The state of its GPU before the run; None on the CPU, and without NVML."""
    sampler: Sampler | None
    result: ChildResult
    exited: ChildExit
    quiet: Sequence[bool]
    """For each of its steps: True if it was not disturbed (`quiet_on_all`)."""

    def footprint(self) -> Footprint | None:
        """Return its bytes at their peak; None without a result."""
        peak = None
        if self.baseline and self.sampler:
            peak = self.baseline.growth(self.sampler.peak_until(self.result.peaks_at))
        return measured_footprint(self.result, peak)

    def timing(self) -> Timing | None:
        """Return the seconds of its steps, in each of which all ranks together process a global batch."""
        return timing_of(self.result.seconds, self.request.job.batch_size, self.quiet)

    def clock(self) -> GpuClock | None:
        """Return its GPU's clock while its steps were timed; None on a CPU, and where NVML does not report
        it."""
        if self.target.card is None or self.sampler is None:
            return None
        result = self.result
        return clock_between(self.sampler.clocks, self.target.card, result.timed_from, result.timed_until)

    def contamination(self) -> str | None:
        """Return the reason why its GPU was shared, or could not be proven clean; None for a clean GPU.
        Memory of the process group belongs to the run."""
        target, result = self.target, self.result
        if target.card is None or self.baseline is None or self.sampler is None:
            doubt = target.doubt
            return f"it is not known whether other processes used the GPU: {doubt}" if doubt else None
        return contamination.first_reason(
            target.card,
            self.baseline,
            self.sampler,
            reserved_bytes=result.reserved_bytes,
            context_bytes=result.first_context_bytes,
            outside_bytes=group_bytes(self.request.setup, self.request.loop)
            + (result.communication_bytes or 0)
            + managed_on_gpu(result.paged_bytes or 0),
            until=result.peaks_at,
        )

    def to_measured(self, rank: int, footprint: Footprint | None, contaminated: str | None) -> RankMeasured:
        """Return the entry of this rank in a measurement."""
        timing = self.timing()
        on_gpu = self.target.type != "cpu"
        return RankMeasured(
            rank=rank,
            gpu_index=self.target.index if on_gpu else None,
            uuid=self.target.card.uuid if self.target.card else None,
            footprint=footprint,
            step_seconds=timing.step_seconds if timing else None,
            contaminated=contaminated,
            crowded=self.result.crowded,
            disturbed=self.result.disturbed,
        )


def quiet_on_all(results: Sequence[ChildResult]) -> list[bool]:
    """Return True for each step in which the cores that launch kernels were quiet in all processes. Processes
    wait for each other, so a disturbance of one lengthens the step in all."""
    return [all(calm) for calm in zip(*(result.quiet for result in results), strict=False)]


def worst_of(footprints: Sequence[Footprint | None]) -> int:
    """Return the index of the footprint with the largest NVML, else reserved, else host bytes."""

    def needs(number: int) -> tuple[int, int, int]:
        one = footprints[number]
        if one is None:
            return (-1, -1, -1)
        return (one.nvml_bytes or 0, one.reserved_bytes or 0, one.host_bytes or 0)

    return max(range(len(footprints)), key=needs)


def slowest_of(runs: Sequence[RankRun]) -> int:
    """Return the index of the rank with the longest steps. Ranks wait for each other, so they differ
    little."""
    timings = [run.timing() for run in runs]
    return max(range(len(runs)), key=lambda number: getattr(timings[number], "step_seconds", 0.0))


def measured_footprint(result: ChildResult, nvml_bytes: int | None) -> Footprint | None:
    """Return the measured bytes; None without a result.

    Context and managed memory are NVML's bytes beyond the allocator's segments and the process group, if all
    of them peaked together. They did without retries: the allocator then never returns a segment. Pages count
    as on the GPU as far as these bytes exceed the first context.
    """
    if result.host_bytes is None:
        return None
    context, managed = result.first_context_bytes, 0
    communication = result.communication_bytes or 0
    if nvml_bytes is not None and result.reserved_bytes is not None and not result.retries:
        beyond = max(0, nvml_bytes - result.reserved_bytes - communication)
        managed = min(managed_on_gpu(result.paged_bytes or 0), max(0, beyond - (context or 0)))
        context = beyond - managed
    return Footprint(
        requested_bytes=result.requested_bytes,
        allocated_bytes=result.allocated_bytes,
        reserved_bytes=result.reserved_bytes,
        nvml_bytes=nvml_bytes,
        context_bytes=context,
        communication_bytes=communication,
        managed_bytes=managed,
        host_bytes=result.host_bytes,
        retries=result.retries or 0,
    )
