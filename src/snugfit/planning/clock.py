"""The clock of a plan: the seconds of a tape on each of some GPUs, kernel by kernel remembered.

The seconds are `prediction/seconds.py`'s: the same rates, the same queue. A plan asks about thousands of
tapes of the same few kernels, and only for the length of the step, so what one kernel takes is looked up.

Between two waits the queue has a closed form. With `a` the time until the first kernels up to this one have
been asked for and `w` the device's time for all those before it, the device ends a stretch at

    all its work + max(when it was free, when the host began + max(a - w))

for it never stops but to wait for a kernel, and the last one that it waits for settles the end. So a stretch
is three numbers for each GPU, and the rounds of `play` need no more than those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import ROUNDS, asking

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.rehearsal.tape import Kernel, Tape


@dataclass(frozen=True)
class Alone:
    """A clock of one GPU, as one of several would answer."""

    clock: Callable[[Tape], float]

    def __call__(self, tape: Tape) -> tuple[float]:
        """Seconds of the tape's steady step."""
        return (self.clock(tape),)


class GpuClocks:
    """Seconds of a step on each of these GPUs; it travels between processes. Raises `GpuError` when the table
    does not say how fast one of them is."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self.rates: tuple[Rates, ...] = tuple(rates_for(gpu) for gpu in gpus)
        self._clocks = [KernelClock(rates) for rates in self.rates]
        self._places: dict[Kernel, int] = {}
        self._known: Any = np.empty((2, 0, len(self.rates)))  # device and asked, by kernel and GPU

    def __call__(self, tape: Tape) -> tuple[float, ...]:
        """Seconds of the tape's steady step on each GPU."""
        places = [self._place(kernel) for kernel in tape.kernels]
        device, asked = self._known[:, places]
        hosts = [rates.host for rates in self.rates]
        waiting, beginning = np.array([(host.wait, host.step) for host in hosts]).T
        stretches = [*_stretches(device, asked, tape.waits)]
        now = free = last = length = np.zeros(len(hosts))
        for _ in range(ROUNDS):
            now = now + beginning
            for number, (asks, works, latest) in enumerate(stretches):
                if number:
                    now = np.maximum(now, free) + waiting
                free = works + np.maximum(free, now + latest)
                now = now + asks
            end = np.maximum(now, free)
            length, last = end - last, end
        return tuple(length.tolist())

    def _place(self, kernel: Kernel) -> int:
        place = self._places.get(kernel)
        if place is None:
            place = self._places[kernel] = len(self._places)
            self._learn(place, kernel)
        return place

    def _learn(self, place: int, kernel: Kernel) -> None:
        if place >= self._known.shape[1]:
            larger = np.empty((2, 2 * place + 64, len(self.rates)))
            larger[:, :place] = self._known[:, :place]
            self._known = larger
        self._known[0, place] = [clock.seconds(kernel) for clock in self._clocks]
        self._known[1, place] = [asking(kernel, rates.host) for rates in self.rates]


def _stretches(device: Any, asked: Any, waits: Sequence[int]) -> Iterable[tuple[Any, Any, Any]]:
    """Of the kernels before, between and after the waits: the host's time, the device's, and the latest that
    the device may wait for work, on each GPU."""
    cuts = [0, *(min(place, len(device)) for place in sorted(waits)), len(device)]
    nothing = np.zeros(device.shape[1])
    for start, end in pairwise(cuts):
        if start == end:
            yield nothing, nothing, nothing - np.inf
            continue
        asks, works = np.cumsum(asked[start:end], axis=0), np.cumsum(device[start:end], axis=0)
        latest = asks.copy()
        latest[1:] -= works[:-1]
        yield asks[-1], works[-1], latest.max(axis=0)
