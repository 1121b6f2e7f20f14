"""The timers of a plan: seconds of a trace on each of some GPUs, kernel by kernel remembered.

The seconds are `prediction/seconds.py`'s: the same rates, the same queue. A plan asks about thousands of
traces of the same few kernels, and only for the length of the step, so what one kernel takes is looked up.

Between two waits the queue has a closed form (`queue.py`), so a step is a few segments for each GPU, and
the steps of `simulate_queue` need no more than those. Copies beside the computation have none: segments leave
them out, which is the least that a step takes, and what it takes is simulated kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np

from snugfit.errors import GpuError
from snugfit.planning.cost.queue import QueueSegment, cut_at_waits, join, merge_inner, simulate
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import (
    launch_seconds,
    loader_seconds,
    queue_roles,
    simulate_queue,
    sync_points,
)
from snugfit.rehearsal.trace.trace import COPIES, Trace

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.rehearsal.trace.trace import Kernel, Work

Timer = Callable[[Trace], Sequence[float]]
"""Seconds of a trace's steady step on each GPU, from its kernels and waits."""

REMEMBERED_WORKS = 1_000
"""Pieces of steps whose segments are kept."""

REMEMBERED_KERNELS = 100_000
"""Kernels that are known again by their identity."""


@runtime_checkable
class ComposableTimer(Protocol):
    """A timer that knows what a step takes from what its pieces do."""

    def segments(self, work: Work) -> Sequence[QueueSegment]:
        """What this does between the waits, but for copies beside it; all between the first and the last is
        one."""

    def device_seconds(self, work: Work) -> Any:
        """Seconds (GPUs,) that the device works for this, without copies beside it."""

    def has_copies(self, work: Work) -> bool:
        """Whether copies go beside it."""

    def simulate(self, segments: Sequence[QueueSegment]) -> Any:
        """Seconds (..., GPUs) of a steady step of these segments."""


def seconds_of(timer: Timer, works: Sequence[Work]) -> Sequence[float]:
    """Seconds on each GPU of a steady step that does these one after the other; a timer that does not compose
    is given a trace."""
    if isinstance(timer, ComposableTimer) and not any(map(timer.has_copies, works)):
        return tuple(timer.simulate(join(map(timer.segments, works))).tolist())
    kernels = tuple(kernel for work in works for kernel in work.kernels)
    return timer(Trace((), (), (), kernels, tuple(_waits_of(works)), ()))


def _waits_of(works: Iterable[Work]) -> Iterator[int]:
    """Before which kernels the host waits, when these are done one after the other."""
    before = 0
    for work in works:
        yield from (before + index for index in work.waits)
        before += len(work.kernels)


@dataclass(frozen=True)
class SingleGpuTimer:
    """A function of a trace, as a timer of several GPUs would answer."""

    seconds: Callable[[Trace], float]

    def __call__(self, trace: Trace) -> tuple[float]:
        """Seconds of the trace's steady step."""
        return (self.seconds(trace),)


@dataclass(frozen=True)
class PerGpuTimers:
    """A function of a trace for each GPU, asked one after the other."""

    timers: tuple[Callable[[Trace], float], ...]

    def __call__(self, trace: Trace) -> tuple[float, ...]:
        """Seconds of the trace's steady step on each GPU."""
        return tuple(timer(trace) for timer in self.timers)


class GpuTimers:
    """Seconds of a step on each of these GPUs, by their rates; it can be pickled. Raises `GpuError` when the
    table does not say how fast one of them is."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self.rates: tuple[Rates, ...] = tuple(rates_for(gpu) for gpu in gpus)
        self._clocks = [KernelClock(rates) for rates in self.rates]
        self._hosts = list(dict.fromkeys(rates.host for rates in self.rates))  # most GPUs have the same one
        self._host_of = [self._hosts.index(rates.host) for rates in self.rates]
        self._wait_s = np.array([rates.host.wait for rates in self.rates])
        self._begin_s = np.array([rates.host.step for rates in self.rates])
        self._numbers: dict[Kernel, int] = {}
        self._rows = 0
        self._by_id: dict[int, tuple[Kernel, int]] = {}  # a kernel that hashes slowly comes often
        self._works: dict[int, tuple[Work, list[QueueSegment], Any]] = {}  # by the id of the work beside
        self._copies: dict[int, tuple[Work, bool]] = {}  # likewise
        self._table: Any = np.empty((3, 0, len(self.rates)))  # device, launch, loader; kernel; GPU

    def __call__(self, trace: Trace) -> tuple[float, ...]:
        """Seconds of the trace's steady step on each GPU."""
        if _copies_go(trace.kernels):
            return tuple(map(partial(self._with_copies, trace), self._clocks))
        segments, _ = self._segments(trace.kernels, trace.waits)
        return tuple(self.simulate(segments).tolist())

    def _with_copies(self, trace: Trace, clock: KernelClock) -> float:
        """By the whole queue, of which no part has a closed form."""
        host, kernels = clock.rates.host, trace.kernels
        device = [clock.seconds(kernel) for kernel in kernels]
        launches = [launch_seconds(kernel, host) for kernel in kernels]
        waits = sync_points(kernels, trace.waits)
        length = simulate_queue(device, launches, waits, host, queue_roles(kernels))
        return max(length, sum(loader_seconds(kernel, host) for kernel in kernels))

    def has_copies(self, work: Work) -> bool:
        """Whether copies go beside it, remembered."""
        known = self._copies.get(id(work))
        if known is None:
            if len(self._copies) >= REMEMBERED_WORKS:
                self._copies.clear()
            known = self._copies[id(work)] = work, _copies_go(work.kernels)
        return known[1]

    def segments(self, work: Work) -> Sequence[QueueSegment]:
        """What this does between the waits, remembered."""
        return self._timing_of(work)[1]

    def device_seconds(self, work: Work) -> Any:
        """Seconds (GPUs,) that the device works for this, remembered."""
        return self._timing_of(work)[2]

    def _timing_of(self, work: Work) -> tuple[Work, list[QueueSegment], Any]:
        known = self._works.get(id(work))
        if known is None:
            if len(self._works) >= REMEMBERED_WORKS:
                self._works.clear()
            known = self._works[id(work)] = work, *self._segments(work.kernels, work.waits)
        return known

    def simulate(self, segments: Sequence[QueueSegment]) -> Any:
        """Seconds (..., GPUs) of a steady step of these segments; making its batches may take longer."""
        length = simulate(segments, self._begin_s, self._wait_s)
        return np.maximum(length, sum(segment.loader_s for segment in segments))

    def _segments(self, kernels: Sequence[Kernel], waits: Sequence[int]) -> tuple[list[QueueSegment], Any]:
        """What is between the waits, and the device's seconds (GPUs,) for all of it."""
        if len(self._by_id) > REMEMBERED_KERNELS:
            self._by_id.clear()
        known = [self._by_id.get(id(kernel)) for kernel in kernels]
        numbers = [
            self._number(kernel) if entry is None else entry[1]
            for kernel, entry in zip(kernels, known, strict=True)
        ]
        device, launches, loading = self._table[:, numbers]
        segments = cut_at_waits(device, launches, loading, sync_points(kernels, waits))
        return merge_inner([*segments], self._wait_s), device.sum(axis=0)

    def _number(self, kernel: Kernel) -> int:
        """The kernel's row in the table: one for all layers."""
        number = self._numbers.get(kernel)
        if number is None:
            alike = kernel._replace(module="")
            if alike not in self._numbers:
                self._numbers[alike] = self._rows
                self._add_row(self._rows, alike)
                self._rows += 1
            number = self._numbers[kernel] = self._numbers[alike]
        self._by_id[id(kernel)] = kernel, number
        return number

    def _add_row(self, number: int, kernel: Kernel) -> None:
        if number >= self._table.shape[1]:
            larger = np.empty((3, 2 * number + 64, len(self.rates)))
            larger[:, :number] = self._table[:, :number]
            self._table = larger
        beside = kernel.operator in COPIES
        self._table[0, number] = [0.0 if beside else clock.seconds(kernel) for clock in self._clocks]
        launches = [(launch_seconds(kernel, host), loader_seconds(kernel, host)) for host in self._hosts]
        self._table[1:, number] = np.array(launches)[self._host_of].T


@dataclass(frozen=True)
class TimersWithGaps:
    """The seconds of those GPUs whose rates are known, and 0 for the others."""

    timers: GpuTimers
    """Of those whose rates are known."""
    indices: tuple[int | None, ...]
    """Of each GPU, which of the timers is its; None where its rates are not known."""

    @classmethod
    def on(cls, gpus: Sequence[Gpu]) -> Self:
        """The timers of these GPUs."""
        known: list[Gpu] = []
        indices: list[int | None] = []
        for gpu in gpus:
            if why_unknown(gpu):
                indices.append(None)
            else:
                indices.append(len(known))
                known.append(gpu)
        return cls(GpuTimers(known), tuple(indices))

    def __call__(self, trace: Trace) -> tuple[float, ...]:
        """Seconds of the trace's steady step on each GPU."""
        seconds = self.timers(trace)
        return tuple(0.0 if index is None else seconds[index] for index in self.indices)

    def has_copies(self, work: Work) -> bool:
        """Whether copies go beside it."""
        return self.timers.has_copies(work)

    def segments(self, work: Work) -> Sequence[QueueSegment]:
        """What this does between the waits, on those that are known."""
        return self.timers.segments(work)

    def device_seconds(self, work: Work) -> Any:
        """Seconds (GPUs,) that the device works for this."""
        return self._on_every(self.timers.device_seconds(work))

    def simulate(self, segments: Sequence[QueueSegment]) -> Any:
        """Seconds (..., GPUs) of a steady step of these segments."""
        return self._on_every(self.timers.simulate(segments))

    def _on_every(self, known: Any) -> Any:
        """Seconds (..., GPUs) of all, from those of the known."""
        unknown = np.zeros((*known.shape[:-1], 1))
        every = np.concatenate([known, unknown], axis=-1)
        return every[..., [-1 if index is None else index for index in self.indices]]


def _copies_go(kernels: Sequence[Kernel]) -> bool:
    return any(kernel.operator in COPIES for kernel in kernels)


def why_unknown(gpu: Gpu) -> str:
    """Why this GPU's seconds are not known; nothing where they are."""
    try:
        rates_for(gpu)
    except GpuError as unknown:
        return str(unknown)
    return ""
