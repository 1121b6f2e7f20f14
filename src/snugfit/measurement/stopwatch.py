"""The stopwatch: seconds of steady steps, taken at the borders of steps only.

On a GPU an event is put into the stream at each border, and nothing waits until the run is over: a
synchronisation after each step would drain the device and charge the next step for filling it again, which a
real loop does not pay. The time between two borders holds everything a loop does there, the loader too. On
the CPU the clock is read.

What happens once is taken in the same way: from the stopwatch's making, when the device is quiet, to the
built model, the end of the first step, and the first border.

A step's time is stated as the mean of the middle nine tenths. A run's length is made of means: a host that
others use too is slow and fast by turns, and the median of its steps is now one and now the other. A hiccup
in a hundred steps is left out. The spread (90th percentile - 10th percentile) / mean stands beside it.

Steps in which somebody else disturbed the core that asks for kernels (`measurement/quiet_core.py`) are left
out of the mean, when enough others remain: what is stated is what the step takes on this machine, not on its
neighbours' day. How they are told apart has nothing to do with how long they took. The mean of all steps
stands beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from snugfit.results.footprint import Startup, Timing

if TYPE_CHECKING:
    import torch

    from snugfit.measurement.quiet_core import QuietCore

MAX_STABLE_SPREAD = 0.10
"""Above it the mean is called unstable. A convention of ours, not a measured bound. It cannot see a host
that is crowded all the time, which makes every step equally slow; crowd.py looks for that."""

ASIDE = 0.05
"""Share of the shortest steps, and of the longest, that the mean leaves out."""


FEWEST_QUIET, QUIET_SHARE = 5, 0.1
"""Undisturbed steps that are enough to speak for all: so many, and this share of them. Choices."""


class Stopwatch:
    """Watches a step as its `Observer`; `seconds()` afterwards."""

    def __init__(
        self,
        device: torch.device,
        warmup: int,
        *,
        after_step: Callable[[int], None] | None = None,
        core: QuietCore | None = None,
    ) -> None:
        self._device, self._warmup, self._after_step, self._core = device, warmup, after_step, core
        self._began = False
        self._borders: list[Any] = []
        self._felt: list[tuple[int, int]] = []
        """At each border, how often the core was found disturbed before it, and with it."""
        self._starting: list[Any] = [self._mark()]
        """The making of this stopwatch, the built model, the end of the first step."""

    def step_begins(self, index: int) -> None:
        """The first steady step's beginning is a border."""
        if index == self._warmup:
            self._border()

    def step_ends(self, index: int) -> None:
        """Each steady step's end is a border, and the first step's end is the end of a start."""
        if index == 0:
            self._starting.append(self._mark())
            self._began = True
        if index >= self._warmup:
            self._border()
        if self._after_step is not None:
            self._after_step(index)

    def phase(self, name: str) -> None:
        """Phases are not timed, their borders would cost events inside the step; from the second step on
        the loop's thread looks there whether its core is quiet. (In the first one, threads are born.)"""
        if self._core and self._began:
            self._core.look()

    def built(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The end of building."""
        self._starting.append(self._mark())

    def seconds(self) -> list[float]:
        """Seconds of each steady step; waits for the device."""
        return self._between(self._borders)

    def quiet(self) -> list[bool]:
        """Of each steady step, whether its core was quiet at all looks in it and at both its borders."""
        return [end == begin for (begin, _), (_, end) in pairwise(self._felt)]

    def startup(self, *, imports_seconds: float, context_seconds: float) -> Startup:
        """The start of a run whose process took so long before this stopwatch; waits for the device."""
        settles = self._warmup > 0
        build, first, *settling = self._between(self._starting + self._borders[:1] * settles)
        return Startup(
            imports_seconds=imports_seconds,
            context_seconds=context_seconds,
            build_seconds=build,
            first_step_seconds=first,
            settling_seconds=sum(settling),
            settling_steps=self._warmup - 1 if settles else 0,
        )

    def _between(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from each mark to the next."""
        pairs = pairwise(marks)
        if self._device.type != "cuda":
            return [end - begin for begin, end in pairs]
        import torch

        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]

    def _border(self) -> None:
        self._borders.append(self._mark())
        before = self._core.felt if self._core else 0
        if self._core:
            self._core.glance()
        self._felt.append((before, self._core.felt if self._core else 0))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        import torch

        border = torch.cuda.Event(enable_timing=True)
        border.record()
        return border


def timing_of(seconds: Sequence[float], batch_size: int, quiet: Sequence[bool] = ()) -> Timing | None:
    """Mean, spread and samples per second of steady steps, those apart that `quiet` says were disturbed;
    None when none was timed.

    One step alone has no spread, so it cannot be called stable.
    """
    if not seconds:
        return None
    every = tuple(seconds)
    undisturbed = [each for each, calm in zip(every, quiet, strict=False) if calm]
    if len(undisturbed) >= max(FEWEST_QUIET, QUIET_SHARE * len(every)):
        seconds = undisturbed
    mean = _mean(seconds)
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
        seconds=every,
        every_seconds=_mean(every),
    )


def _mean(seconds: Sequence[float]) -> float:
    aside = int(len(seconds) * ASIDE)
    return statistics.fmean(sorted(seconds)[aside : len(seconds) - aside])
