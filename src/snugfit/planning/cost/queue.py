"""The queue of host and device in closed form: what is between two waits is four numbers for each GPU.

With `a` the time until the first kernels up to this one have been asked for and `w` the device's time for all
those before it, the device ends a stretch at

    all its work + max(when it was free, when the host began + max(a - w))

for it never stops but to wait for a kernel, and the last one that it waits for settles the end. Two stretches
without a wait between are one again, so what a piece of a step takes is worked out once, wherever the piece
stands.

Where a step waits more than once, as an optimizer does that reads a value for each parameter, host and device
begin together after each wait. So all between the first wait and the last is a sum, which does not depend on
what went before, and any piece of a step is three stretches at most, however often it waits.

The numbers of deeper models follow from those of two shallow ones. What is asked and worked grows evenly with
the layers; `max(a - w)` is a largest of such, so the line through two depths is never more than it, and
neither is what is played with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from snugfit.prediction.seconds import SIMULATED_STEPS


class Stretch(NamedTuple):
    """What happens between two waits, on each GPU (the last axis of each array)."""

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


def joined(pieces: Iterable[Sequence[Stretch]]) -> list[Stretch]:
    """These pieces one after the other, without waits between them."""
    first, *others = pieces
    stretches = list(first)
    for more in others:
        stretches[-1:] = stretches[-1].then(more[0]), *more[1:]
    return stretches


def cut(device: Any, asked: Any, made: Any, waits: Sequence[int]) -> Iterator[Stretch]:
    """What is before, between and after the waits; of each kernel the seconds on each GPU."""
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


def shortened(stretches: Sequence[Stretch], waiting: Any) -> list[Stretch]:
    """No more than three that take as long: what is between the first wait and the last is one number. At
    each of those waits, which takes the host `waiting` seconds, the device has nothing left to do."""
    if len(stretches) < 3:
        return list(stretches)
    first, *middle, last = stretches
    takes = sum(np.maximum(each.asks, each.works + each.latest) + waiting for each in middle) - waiting
    nothing = np.zeros_like(takes)
    return [first, Stretch(takes, nothing, nothing - np.inf, sum(each.makes for each in middle)), last]


def played(stretches: Sequence[Stretch], beginning: Any, waiting: Any) -> Any:
    """Seconds of a steady step of these stretches, with waits between them, as
    `prediction/seconds.py:simulate_queue` has it: what the host takes to begin a step, and at each wait."""
    now = free = last = length = np.zeros_like(waiting)
    for _ in range(SIMULATED_STEPS):
        now = now + beginning
        for number, stretch in enumerate(stretches):
            if number:
                now = np.maximum(now, free) + waiting
            free = stretch.works + np.maximum(free, now + stretch.latest)
            now = now + stretch.asks
        end = np.maximum(now, free)
        length, last = end - last, end
    return length


def lined(seen: Sequence[Sequence[Stretch]], line: Callable[[Sequence[Any]], Any]) -> list[Stretch] | None:
    """The stretches on the line through those of these depths; None where those do not wait alike."""
    if len({tuple(bool(np.isinf(each.latest).any()) for each in stretches) for stretches in seen}) != 1:
        return None
    found = []
    for same in zip(*seen, strict=True):
        asks, works, latest, makes = zip(*same, strict=True)
        never = bool(np.isinf(latest[0]).any())
        found.append(Stretch(line(asks), line(works), latest[0] if never else line(latest), line(makes)))
    return found


def side_by_side(seen: Sequence[Sequence[Stretch]]) -> list[Stretch]:
    """As many stretches each, as one whose arrays have a first axis for which of these it was."""
    return [
        Stretch(*(np.stack(values) for values in zip(*same, strict=True))) for same in zip(*seen, strict=True)
    ]
