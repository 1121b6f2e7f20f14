"""Timers of a plan: compute the seconds of a step's trace on each of several GPUs, with cached kernel times.

The seconds equal those of `prediction/seconds.py`, with the same rates and the same queue. A plan times
thousands of traces of the same few kernels, and needs only the length of the step. The time of each kernel is
therefore cached.

Between two waits the queue has a closed form (`queue.py`). A step is thus a few segments per GPU, from which
the seconds follow. Concurrent copies have no closed form. Segments omit them, which gives a lower bound. The
exact time is simulated kernel by kernel.
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
    at_power_limit,
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
"""Type of a function that returns the seconds of a trace's last step on each GPU. It reads the trace's
kernels and the host's waits.
"""

CACHED_TIMINGS = 1_000
"""Largest number of cached timings. A timing has the launch and run seconds of a part of a step, such as the
update.
"""

CACHED_KERNELS = 100_000
"""Largest number of kernel objects whose properties are cached by the object's id."""


@runtime_checkable
class ComposableTimer(Protocol):
    """Protocol: a timer that computes a step's seconds from queue segments of its parts, such as passes and
    update."""

    def segments(self, work: Work) -> Sequence[QueueSegment]:
        """Return the queue segments of these kernels between the host's waits, without concurrent copies.
        Everything between the first and the last wait is one segment.
        """

    def device_seconds(self, work: Work) -> Any:
        """Return the seconds in which each GPU runs these kernels, without concurrent copies, of shape
        (GPUs,)."""

    def has_copies(self, work: Work) -> bool:
        """Return True if this sequence of kernels contains copies that run in parallel to others."""

    def simulate(self, segments: Sequence[QueueSegment]) -> Any:
        """Return the seconds (..., GPUs) of a step with these queue segments."""


def seconds_of(timer: Timer, works: Sequence[Work]) -> Sequence[float]:
    """Return a step's seconds on each GPU. The step consists of these sequences of kernels, in order.

    A `ComposableTimer` joins cached segments of the parts. All kernels are simulated instead for another
    timer, or if copies run in parallel.
    """
    if isinstance(timer, ComposableTimer) and not any(map(timer.has_copies, works)):
        return tuple(timer.simulate(join(map(timer.segments, works))).tolist())
    kernels = tuple(kernel for work in works for kernel in work.kernels)
    return timer(Trace((), (), (), kernels, tuple(_waits_of(works)), ()))


def _waits_of(works: Iterable[Work]) -> Iterator[int]:
    """Yield the indices of kernels before which the host waits, in the concatenated parts of a step."""
    before = 0
    for work in works:
        yield from (before + index for index in work.waits)
        before += len(work.kernels)


@dataclass(frozen=True)
class SingleGpuTimer:
    """Timer for one GPU. It wraps a function that returns the seconds of a step from its trace."""

    seconds: Callable[[Trace], float]

    def __call__(self, trace: Trace) -> tuple[float]:
        """Return the seconds of a step of this trace, as a tuple of one."""
        return (self.seconds(trace),)


@dataclass(frozen=True)
class PerGpuTimers:
    """Timer for several GPUs. It wraps, for each, a function that returns the seconds of a step from its
    trace.
    """

    timers: tuple[Callable[[Trace], float], ...]

    def __call__(self, trace: Trace) -> tuple[float, ...]:
        """Return the seconds of a step of this trace on each GPU."""
        return tuple(timer(trace) for timer in self.timers)


class GpuTimers:
    """A timer that returns the seconds of a step on each of these GPUs, by their rates. Instances can be
    pickled.

    Raises `GpuError` if the table lacks the rates of one of them.
    """

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self.rates: tuple[Rates, ...] = tuple(rates_for(gpu) for gpu in gpus)
        self._clocks = [KernelClock(rates) for rates in self.rates]
        self._hosts = list(dict.fromkeys(rates.host for rates in self.rates))  # most GPUs have the same one
        self._host_of = [self._hosts.index(rates.host) for rates in self.rates]
        self._wait_s = np.array([rates.host.wait for rates in self.rates])
        self._begin_s = np.array([rates.host.step for rates in self.rates])
        self._numbers: dict[Kernel, int] = {}
        self._rows = 0
        self._by_id: dict[int, tuple[Kernel, int]] = {}  # avoids slow hashes of frequent kernels
        self._works: dict[int, tuple[Work, list[QueueSegment], Any]] = {}  # by id of the work
        self._copies: dict[int, tuple[Work, bool]] = {}  # by id of the work
        self._table: Any = np.empty((6, 0, len(self.rates)))  # axes: device, launch, `sums`; kernel; GPU

    def __call__(self, trace: Trace) -> tuple[float, ...]:
        """Return the seconds of a step of this trace on each GPU."""
        if _copies_go(trace.kernels):
            return tuple(map(partial(self._with_copies, trace), self._clocks))
        segments, _ = self._segments(trace.kernels, trace.waits)
        return tuple(self.simulate(segments).tolist())

    def _with_copies(self, trace: Trace, clock: KernelClock) -> float:
        """Return the seconds of a step with concurrent copies, by simulating all kernels. The closed form of
        the queue does not include such copies.
        """
        host, kernels = clock.rates.host, trace.kernels
        launches = [launch_seconds(kernel, host) for kernel in kernels]
        _, device = at_power_limit(clock, kernels, launches)
        waits = sync_points(kernels, trace.waits)
        length = simulate_queue(device, launches, waits, host, queue_roles(kernels))
        return max(length, sum(loader_seconds(kernel, host) for kernel in kernels))

    def has_copies(self, work: Work) -> bool:
        """Return True if this sequence of kernels contains copies that run in parallel to others; the result
        is cached."""
        known = self._copies.get(id(work))
        if known is None:
            if len(self._copies) >= CACHED_TIMINGS:
                self._copies.clear()
            known = self._copies[id(work)] = work, _copies_go(work.kernels)
        return known[1]

    def segments(self, work: Work) -> Sequence[QueueSegment]:
        """Return the cached queue segments of these kernels between the host's waits."""
        return self._timing_of(work)[1]

    def device_seconds(self, work: Work) -> Any:
        """Return the cached seconds in which each GPU runs these kernels, of shape (GPUs,)."""
        return self._timing_of(work)[2]

    def _timing_of(self, work: Work) -> tuple[Work, list[QueueSegment], Any]:
        known = self._works.get(id(work))
        if known is None:
            if len(self._works) >= CACHED_TIMINGS:
                self._works.clear()
            known = self._works[id(work)] = work, *self._segments(work.kernels, work.waits)
        return known

    def simulate(self, segments: Sequence[QueueSegment]) -> Any:
        """Return the seconds (..., GPUs) of a step with these queue segments, or of loading its batches if
        that takes longer.
        """
        length = simulate(segments, self._begin_s, self._wait_s)
        loading, *work = np.moveaxis(sum(segment.sums for segment in segments), -1, 0)
        for gpu, rates in enumerate(self.rates):
            if rates.power:
                own = [part[..., gpu] for part in work]
                clock = rates.power.clock(length[..., gpu], own)
                length[..., gpu] += own[0] * (rates.power.slowdown(clock) - 1)
        return np.maximum(length, loading)

    def _segments(self, kernels: Sequence[Kernel], waits: Sequence[int]) -> tuple[list[QueueSegment], Any]:
        """Return the queue segments between the host's waits, and the device seconds of all kernels, of shape
        (GPUs,).
        """
        if len(self._by_id) > CACHED_KERNELS:
            self._by_id.clear()
        known = [self._by_id.get(id(kernel)) for kernel in kernels]
        numbers = [
            self._number(kernel) if entry is None else entry[1]
            for kernel, entry in zip(kernels, known, strict=True)
        ]
        device, launches, *sums = self._table[:, numbers]
        segments = cut_at_waits(device, launches, np.stack(sums, axis=-1), sync_points(kernels, waits))
        return merge_inner([*segments], self._wait_s), device.sum(axis=0)

    def _number(self, kernel: Kernel) -> int:
        """Return the kernel's row in the table of kernel seconds. Equal kernels of all layers share a row."""
        number = self._numbers.get(kernel)
        if number is None:
            # The seconds of a kernel do not depend on its module.
            without_module = kernel._replace(module="")
            if without_module not in self._numbers:
                self._numbers[without_module] = self._rows
                self._add_row(self._rows, without_module)
                self._rows += 1
            number = self._numbers[kernel] = self._numbers[without_module]
        self._by_id[id(kernel)] = kernel, number
        return number

    def _add_row(self, number: int, kernel: Kernel) -> None:
        # The table doubles in size, so that adding rows stays cheap.
        if number >= self._table.shape[1]:
            larger = np.empty((6, 2 * number + 64, len(self.rates)))
            larger[:, :number] = self._table[:, :number]
            self._table = larger
        # Copies run in parallel to kernels; a step with copies is simulated as a whole (`_with_copies`).
        beside = kernel.operator in COPIES
        self._table[0, number] = [0.0 if beside else clock.seconds(kernel) for clock in self._clocks]
        launches = [(launch_seconds(kernel, host), loader_seconds(kernel, host)) for host in self._hosts]
        self._table[1:3, number] = np.array(launches)[self._host_of].T
        self._table[3:, number] = np.array([clock.work(kernel) for clock in self._clocks]).T


@dataclass(frozen=True)
class TimersWithGaps:
    """A timer that returns the seconds of GPUs with known hardware rates, and 0 for all other GPUs."""

    timers: GpuTimers
    """GPUs with known rates (speeds of kernels), and the functions that compute their seconds."""
    indices: tuple[int | None, ...]
    """Index of each GPU in `timers`; None if the GPU's rates are unknown."""

    @classmethod
    def on(cls, gpus: Sequence[Gpu]) -> Self:
        """Return a timer for some of these GPUs only."""
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
        """Return the seconds of a step of this trace on each GPU; 0 if its rates are unknown."""
        seconds = self.timers(trace)
        return tuple(0.0 if index is None else seconds[index] for index in self.indices)

    def has_copies(self, work: Work) -> bool:
        """Return True if this sequence of kernels contains copies that run in parallel to others."""
        return self.timers.has_copies(work)

    def segments(self, work: Work) -> Sequence[QueueSegment]:
        """Return the queue segments of these kernels between the host's waits, on GPUs with known rates."""
        return self.timers.segments(work)

    def device_seconds(self, work: Work) -> Any:
        """Return the seconds in which each GPU runs these kernels, of shape (GPUs,); 0 for GPUs with unknown
        rates."""
        return self._on_every(self.timers.device_seconds(work))

    def simulate(self, segments: Sequence[QueueSegment]) -> Any:
        """Return the seconds (..., GPUs) of a step with these queue segments; 0 for GPUs with unknown
        rates.
        """
        return self._on_every(self.timers.simulate(segments))

    def _on_every(self, known: Any) -> Any:
        """Return seconds (..., GPUs) for all GPUs: `known` for those with known rates, and 0 for the
        others."""
        # The index -1 below selects this column.
        unknown = np.zeros((*known.shape[:-1], 1))
        every = np.concatenate([known, unknown], axis=-1)
        return every[..., [-1 if index is None else index for index in self.indices]]


def _copies_go(kernels: Sequence[Kernel]) -> bool:
    return any(kernel.operator in COPIES for kernel in kernels)


def why_unknown(gpu: Gpu) -> str:
    """Return the reason why kernel seconds on this GPU are unknown; empty if they are known."""
    try:
        rates_for(gpu)
    except GpuError as unknown:
        return str(unknown)
    return ""
