"""Timing of training steps by times at their boundaries, without the first steps, and the number of steps to
time.

On a GPU, a CUDA event is recorded at each boundary between two steps, and read only after the run. A
synchronisation after each step would leave the device without work. The next step would then include the time
to fill its queue again, which a real loop does not need. The time between two boundaries includes all work of
the loop, such as loading data. On the CPU the clock is read. The start-up is timed in the same way. It begins
with the creation of the stopwatch on an idle device. Further times are those of the built model, the end of
the first step, and the first boundary.

The time of a step is the mean of the middle nine tenths of all steps. Means add up to the length of a run. A
shared host alternates between slow and fast periods of some tenths of a second to some seconds. Their median
would be either a slow or a fast step. At least a minimum total time is therefore measured, even for short
steps (`steady_steps`). Steps that the device limits take equally long each time. The spread is (90th
percentile - 10th percentile) / mean.

In some steps, another process disturbs the core that launches kernels (`measurement/quiet_core.py`). The mean
excludes them if enough other steps remain. The result is then independent of other users of the machine. The
choice of these steps does not depend on their length. `every_seconds` is the mean of all steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.results.footprint import Startup, Timing
from snugfit.step.step import Observer

if TYPE_CHECKING:
    import torch

    from snugfit.measurement.quiet_core import QuietCore

MAX_STABLE_SPREAD = 0.10
"""Relative spread of step times above which their mean counts as unstable (chosen, not measured). A host that
is always crowded makes every step equally slow, without a spread; `host.crowding` detects that."""

TRIMMED_SHARE = 0.05
"""Share of the shortest steps, and of the longest steps, that the mean excludes."""

MIN_QUIET_STEPS, MIN_QUIET_SHARE = 5, 0.1
"""Least number and share of undisturbed steps for a mean over these alone, instead of all steps (chosen)."""

WARMUP = 3
"""Number of steps before the timed ones. Optimizer states are created at the end of the first step, and the
second is like all later ones."""

MIN_STEPS, MAX_STEPS = 8, 400
HOST_BOUND_SECONDS, DEVICE_BOUND_SECONDS = 2.0, 1.0
"""Total seconds of the timed steps: if the host limits a step's speed, and if the device does."""


def steady_steps(step_seconds: float | None, *, host: bool = True) -> int:
    """Return the number of steps to time, for a predicted length of `step_seconds`. `host` is True for a step
    whose speed the host limits.
    """
    if not step_seconds:
        return MIN_STEPS
    seconds = HOST_BOUND_SECONDS if host else DEVICE_BOUND_SECONDS
    return max(MIN_STEPS, min(MAX_STEPS, math.ceil(seconds / step_seconds)))


class _Boundary(NamedTuple):
    """The boundary between two timed steps: the end of one and the beginning of the next."""

    mark: Any
    disturbed_before: int
    """Number of checks until this boundary in which other processes disturbed the core."""
    disturbed_after: int
    """Number of such checks, including the check at this boundary."""
    cpu: float
    """CPU seconds of all threads of this process until this boundary."""


class Stopwatch(Observer):
    """An `Observer` that times steps; `seconds()`, `quiet()` and `startup()` return the results."""

    def __init__(
        self,
        device: torch.device,
        warmup: int,
        *,
        after_step: Callable[[int], None] | None = None,
        core: QuietCore | None = None,
    ) -> None:
        self._device, self._warmup, self._after_step, self._core = device, warmup, after_step, core
        self._first_step_ended = False
        self._boundaries: list[_Boundary] = []
        self.timed_from: float | None = None
        """Time at which the host started the first timed step, in seconds of the monotonic clock."""
        self._starting: list[Any] = [self._mark()]
        """Times during the start-up: this object's creation, the end of building the model, and the end of
        the first step."""

    def step_begins(self, index: int) -> None:
        """Mark the beginning of the first timed step."""
        if index == self._warmup:
            self._add_boundary()

    def step_ends(self, index: int) -> None:
        """Mark the end of each timed step, and of the very first step, which ends the start-up."""
        if index == 0:
            self._starting.append(self._mark())
            self._first_step_ended = True
        if index >= self._warmup:
            self._add_boundary()
        if self._after_step is not None:
            self._after_step(index)

    def phase(self, name: str) -> None:
        """Check at the start of a phase if another process disturbs the core of the loop's thread. Checks
        begin with the second step, because threads are created in the first. No times are recorded within a
        step, since CUDA events there would slow it down.
        """
        if self._core and self._first_step_ended:
            self._core.rebalance()

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Mark the end of the model's build, for the start-up time."""
        self._starting.append(self._mark())

    def seconds(self) -> list[float]:
        """Return the seconds of each timed step; waits for the device."""
        return self._between([boundary.mark for boundary in self._boundaries])

    def cpu_seconds(self) -> list[float]:
        """Return the CPU seconds of each timed step, summed over the threads of this process."""
        return [end.cpu - begin.cpu for begin, end in pairwise(self._boundaries)]

    def quiet(self) -> list[bool]:
        """Return True for each timed step whose core was undisturbed at all checks within the step and at
        both its boundaries.
        """
        return [begin.disturbed_before == end.disturbed_after for begin, end in pairwise(self._boundaries)]

    def startup(self, *, imports_seconds: float, context_seconds: float) -> Startup:
        """Return the seconds of a run's start-up, by stage; wait for the device. The arguments are the
        seconds of the process before this stopwatch.
        """
        settles = self._warmup > 0
        first_boundary = [boundary.mark for boundary in self._boundaries[:1] if settles]
        build, first, *settling = self._between(self._starting + first_boundary)
        return Startup(
            imports_seconds=imports_seconds,
            context_seconds=context_seconds,
            build_seconds=build,
            first_step_seconds=first,
            settling_seconds=sum(settling),
            settling_steps=self._warmup - 1 if settles else 0,
        )

    def _between(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds from each recorded time to the next: differences of CUDA events, or of the CPU's
        clock.
        """
        pairs = pairwise(marks)
        if self._device.type != "cuda":
            return [end - begin for begin, end in pairs]
        import torch

        torch.cuda.synchronize(self._device)
        # CUDA events return milliseconds.
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]

    def _add_boundary(self) -> None:
        mark = self._mark()
        self.timed_from = self.timed_from or time.monotonic()
        before = self._core.disturbed_samples if self._core else 0
        if self._core:
            self._core.sample()
        after = self._core.disturbed_samples if self._core else 0
        self._boundaries.append(_Boundary(mark, before, after, time.process_time()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def timing_of(
    seconds: Sequence[float], batch_size: int, quiet: Sequence[bool] = (), cpu_seconds: Sequence[float] = ()
) -> Timing | None:
    """Return mean, spread and samples per second of the timed steps, without those that were disturbed (False
    in `quiet`).

    None when no step was timed. One step alone has no spread, so it cannot be called stable.
    """
    if not seconds:
        return None
    all_seconds = tuple(seconds)
    # If `quiet` is empty, all steps count.
    undisturbed = [taken for taken, calm in zip(all_seconds, quiet, strict=False) if calm]
    if len(undisturbed) >= max(MIN_QUIET_STEPS, MIN_QUIET_SHARE * len(all_seconds)):
        seconds = undisturbed
    mean = _trimmed_mean(seconds)
    spread = 0.0
    if len(seconds) > 1:
        deciles = statistics.quantiles(seconds, n=10, method="inclusive")
        spread = (deciles[8] - deciles[0]) / mean if mean else 0.0
    return Timing(
        step_seconds=mean,
        spread=spread,
        samples_per_second=batch_size / mean if mean else 0.0,
        steps=len(seconds),
        unstable=len(seconds) < 2 or spread > MAX_STABLE_SPREAD,
        seconds=all_seconds,
        every_seconds=_trimmed_mean(all_seconds),
        cpu_seconds=tuple(cpu_seconds),
    )


def _trimmed_mean(seconds: Sequence[float]) -> float:
    trimmed = int(len(seconds) * TRIMMED_SHARE)
    return statistics.fmean(sorted(seconds)[trimmed : len(seconds) - trimmed])
