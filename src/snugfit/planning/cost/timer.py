"""The clock of a plan: the seconds of a trace on each of some GPUs, kernel by kernel remembered.

The seconds are `prediction/seconds.py`'s: the same rates, the same queue. A plan asks about thousands of
traces of the same few kernels, and only for the length of the step, so what one kernel takes is looked up.

Between two waits the queue has a closed form (`queue.py`), so a step is a few stretches for each GPU, and
the steps of `simulate_queue` need no more than those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from snugfit.planning.cost.queue import Stretch, cut, joined, played, shortened
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import launch_seconds, loader_seconds, sync_points
from snugfit.rehearsal.trace.trace import Trace

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.rehearsal.trace.trace import Kernel, Work

Clock = Callable[[Trace], Sequence[float]]
"""Seconds of a trace's steady step on each GPU, from its kernels and waits."""

REMEMBERED_WORKS = 1_000
"""Pieces of steps whose stretches are kept."""


REMEMBERED_KERNELS = 100_000
"""Kernels that are known again by their identity."""


@runtime_checkable
class Joining(Protocol):
    """A clock that knows what a step takes from what its pieces do."""

    def stretches(self, work: Work) -> Sequence[Stretch]:
        """What this does between the waits; all between the first and the last is one."""

    def played(self, stretches: Sequence[Stretch]) -> Any:
        """Seconds of a steady step of these stretches, on each GPU."""


def seconds_of(clock: Clock, works: Sequence[Work]) -> Sequence[float]:
    """Seconds of a steady step that does these one after the other, on each GPU; a clock that does not join
    is given a trace."""
    if isinstance(clock, Joining):
        return tuple(clock.played(joined(map(clock.stretches, works))).tolist())
    kernels = tuple(kernel for work in works for kernel in work.kernels)
    return clock(Trace((), (), (), kernels, tuple(waits_of(works)), ()))


def waits_of(works: Iterable[Work]) -> Iterator[int]:
    """Where the host waits, when these are done one after the other."""
    before = 0
    for work in works:
        yield from (before + place for place in work.waits)
        before += len(work.kernels)


@dataclass(frozen=True)
class Alone:
    """A clock of one GPU, as one of several would answer."""

    clock: Callable[[Trace], float]

    def __call__(self, trace: Trace) -> tuple[float]:
        """Seconds of the trace's steady step."""
        return (self.clock(trace),)


class GpuClocks:
    """Seconds of a step on each of these GPUs; it travels between processes. Raises `GpuError` when the table
    does not say how fast one of them is."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self.rates: tuple[Rates, ...] = tuple(rates_for(gpu) for gpu in gpus)
        self._clocks = [KernelClock(rates) for rates in self.rates]
        self._waiting = np.array([rates.host.wait for rates in self.rates])
        self._beginning = np.array([rates.host.step for rates in self.rates])
        self._places: dict[Kernel, int] = {}
        self._met: dict[int, tuple[Kernel, int]] = {}  # by id: a kernel that hashes slowly comes often
        self._works: dict[int, tuple[Work, list[Stretch]]] = {}  # by id, with the work that it is the id of
        self._known: Any = np.empty((3, 0, len(self.rates)))  # device, asked, made, by kernel and GPU

    def __call__(self, trace: Trace) -> tuple[float, ...]:
        """Seconds of the trace's steady step on each GPU."""
        return tuple(self.played(self._stretches(trace.kernels, trace.waits)).tolist())

    def stretches(self, work: Work) -> Sequence[Stretch]:
        """What this does between the waits, remembered."""
        known = self._works.get(id(work))
        if known is None:
            if len(self._works) >= REMEMBERED_WORKS:
                self._works.clear()
            known = self._works[id(work)] = work, self._stretches(work.kernels, work.waits)
        return known[1]

    def played(self, stretches: Sequence[Stretch]) -> Any:
        """Seconds of a steady step of these stretches on each GPU; making its batches may take longer."""
        length = played(stretches, self._beginning, self._waiting)
        return np.maximum(length, sum(stretch.makes for stretch in stretches))

    def _stretches(self, kernels: Sequence[Kernel], waits: Sequence[int]) -> list[Stretch]:
        if len(self._met) > REMEMBERED_KERNELS:
            self._met.clear()
        met = [self._met.get(id(kernel)) for kernel in kernels]
        places = [
            self._place(kernel) if found is None else found[1]
            for kernel, found in zip(kernels, met, strict=True)
        ]
        device, asked, made = self._known[:, places]
        return shortened([*cut(device, asked, made, sync_points(kernels, waits))], self._waiting)

    def _place(self, kernel: Kernel) -> int:
        place = self._places.get(kernel)
        if place is None:
            place = self._places[kernel] = len(self._places)
            self._learn(place, kernel)
        self._met[id(kernel)] = kernel, place
        return place

    def _learn(self, place: int, kernel: Kernel) -> None:
        if place >= self._known.shape[1]:
            larger = np.empty((3, 2 * place + 64, len(self.rates)))
            larger[:, :place] = self._known[:, :place]
            self._known = larger
        self._known[0, place] = [clock.seconds(kernel) for clock in self._clocks]
        self._known[1, place] = [launch_seconds(kernel, rates.host) for rates in self.rates]
        self._known[2, place] = [loader_seconds(kernel, rates.host) for rates in self.rates]
