"""The clock of a plan: the seconds of a tape on each of some GPUs, kernel by kernel remembered.

The seconds are `prediction/seconds.py`'s: the same rates, the same queue. A plan asks about thousands of
tapes of the same few kernels, and only for the length of the step, so what one kernel takes is looked up.

Between two waits the queue has a closed form. With `a` the time until the first kernels up to this one have
been asked for and `w` the device's time for all those before it, the device ends a stretch at

    all its work + max(when it was free, when the host began + max(a - w))

for it never stops but to wait for a kernel, and the last one that it waits for settles the end. So a stretch
is three numbers for each GPU, and the rounds of `play` need no more than those. Two stretches without a wait
between are one again, so what a piece of a step takes is worked out once, wherever the piece stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from snugfit.planning.lines import waits_of
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import ROUNDS, all_waits, asking, making_seconds
from snugfit.rehearsal.tape import Tape

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.rehearsal.sizes import Work
    from snugfit.rehearsal.tape import Kernel

Clock = Callable[[Tape], Sequence[float]]
"""Seconds of a tape's steady step on each GPU, from its kernels and waits."""

REMEMBERED_WORKS = 1_000
"""Pieces of steps whose stretches are kept."""


@runtime_checkable
class Joining(Protocol):
    """A clock that knows what a step takes from what its pieces do."""

    def of(self, works: Sequence[Work]) -> Sequence[float]:
        """Seconds of a steady step that does these one after the other, on each GPU."""


def seconds_of(clock: Clock, works: Sequence[Work]) -> Sequence[float]:
    """The same of any clock: one that does not join is given a tape."""
    if isinstance(clock, Joining):
        return clock.of(works)
    kernels = tuple(kernel for work in works for kernel in work.kernels)
    return clock(Tape((), (), (), kernels, tuple(waits_of(works)), ()))


class Stretch(NamedTuple):
    """What happens between two waits, on each GPU."""

    asks: Any
    """The host's seconds."""
    works: Any
    """The device's."""
    latest: Any
    """From the host's beginning, the latest that the device would begin if it did nothing but wait."""
    makes: Any
    """Worker processes' seconds."""

    def then(self, other: Stretch) -> Stretch:
        """This, and the other after it without a wait."""
        latest = np.maximum(self.latest, self.asks + other.latest - self.works)
        return Stretch(self.asks + other.asks, self.works + other.works, latest, self.makes + other.makes)


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
        self._works: dict[int, tuple[Work, list[Stretch]]] = {}  # by id, with the work that it is the id of
        self._known: Any = np.empty((3, 0, len(self.rates)))  # device, asked, made, by kernel and GPU

    def __call__(self, tape: Tape) -> tuple[float, ...]:
        """Seconds of the tape's steady step on each GPU."""
        return self._played(self._stretches(tape.kernels, tape.waits))

    def of(self, works: Sequence[Work]) -> tuple[float, ...]:
        """Seconds of a steady step that does these one after the other, on each GPU."""
        first, *others = map(self._remembered, works)
        stretches = list(first)
        for more in others:
            stretches[-1:] = stretches[-1].then(more[0]), *more[1:]
        return self._played(stretches)

    def _remembered(self, work: Work) -> list[Stretch]:
        known = self._works.get(id(work))
        if known is None:
            if len(self._works) >= REMEMBERED_WORKS:
                self._works.clear()
            known = self._works[id(work)] = work, self._stretches(work.kernels, work.waits)
        return known[1]

    def _played(self, stretches: Sequence[Stretch]) -> tuple[float, ...]:
        """As `prediction/seconds.py:play` does it."""
        hosts = [rates.host for rates in self.rates]
        waiting, beginning = np.array([(host.wait, host.step) for host in hosts]).T
        now = free = last = length = np.zeros(len(hosts))
        for _ in range(ROUNDS):
            now = now + beginning
            for number, stretch in enumerate(stretches):
                if number:
                    now = np.maximum(now, free) + waiting
                free = stretch.works + np.maximum(free, now + stretch.latest)
                now = now + stretch.asks
            end = np.maximum(now, free)
            length, last = end - last, end
        made = sum(stretch.makes for stretch in stretches)
        return tuple(np.maximum(length, made).tolist())

    def _stretches(self, kernels: Sequence[Kernel], waits: Sequence[int]) -> list[Stretch]:
        places = [self._place(kernel) for kernel in kernels]
        device, asked, made = self._known[:, places]
        return [*_cut(device, asked, made, all_waits(kernels, waits))]

    def _place(self, kernel: Kernel) -> int:
        place = self._places.get(kernel)
        if place is None:
            place = self._places[kernel] = len(self._places)
            self._learn(place, kernel)
        return place

    def _learn(self, place: int, kernel: Kernel) -> None:
        if place >= self._known.shape[1]:
            larger = np.empty((3, 2 * place + 64, len(self.rates)))
            larger[:, :place] = self._known[:, :place]
            self._known = larger
        self._known[0, place] = [clock.seconds(kernel) for clock in self._clocks]
        self._known[1, place] = [asking(kernel, rates.host) for rates in self.rates]
        self._known[2, place] = [making_seconds(kernel, rates.host) for rates in self.rates]


def _cut(device: Any, asked: Any, made: Any, waits: Sequence[int]) -> Iterator[Stretch]:
    """What is before, between and after the waits."""
    cuts = [0, *(min(place, len(device)) for place in sorted(waits)), len(device)]
    nothing = np.zeros(device.shape[1])
    for start, end in pairwise(cuts):
        if start == end:
            yield Stretch(nothing, nothing, nothing - np.inf, nothing)
            continue
        asks, works = np.cumsum(asked[start:end], axis=0), np.cumsum(device[start:end], axis=0)
        latest = asks.copy()
        latest[1:] -= works[:-1]
        yield Stretch(asks[-1], works[-1], latest.max(axis=0), made[start:end].sum(axis=0))
