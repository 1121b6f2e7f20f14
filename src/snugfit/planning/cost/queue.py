"""The queue of host and device in closed form: what is between two waits is four numbers for each GPU.

With `a` the time until the first kernels up to this one have been launched and `w` the device's time for all
those before it, the device ends a segment at

    all its work + max(when it was free, when the host began + max(a - w))

for it never stops but to wait for a kernel, and the last one that it waits for settles the end. Two segments
without a wait between are one again, so what a piece of a step takes is worked out once, wherever the piece
stands.

Where a step waits more than once, as an optimizer does that reads a value for each parameter, host and device
begin together after each wait. So all between the first wait and the last is a sum, which does not depend on
what went before, and any piece of a step is three segments at most, however often it waits.

The numbers of deeper models follow from those of two shallow ones. Launches and work grow evenly with the
layers; `max(a - w)` is a largest of such, so the line through two depths is never more than it, and neither
is what is simulated with it.

All arrays are seconds, float64, and their last axis is the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from snugfit.prediction.several_gpus.streams import SIMULATED_STEPS


class QueueSegment(NamedTuple):
    """What happens between two waits: arrays of (..., GPUs) seconds."""

    host_s: Any
    """To launch all of its kernels."""
    device_s: Any
    """To run all of them."""
    start_delay_s: Any
    """From the host's beginning, the latest that the device would begin if it did nothing but wait."""
    loader_s: Any
    """Of worker processes, to make its batches."""

    def then(self, other: QueueSegment) -> QueueSegment:
        """This segment, and the other after it without a wait."""
        return QueueSegment(
            self.host_s + other.host_s,
            self.device_s + other.device_s,
            np.maximum(self.start_delay_s, self.host_s + other.start_delay_s - self.device_s),
            self.loader_s + other.loader_s,
        )


def join(pieces: Iterable[Sequence[QueueSegment]]) -> list[QueueSegment]:
    """These pieces of a step one after the other, without waits between them."""
    first, *rest = pieces
    segments = list(first)
    for piece in rest:
        segments[-1:] = segments[-1].then(piece[0]), *piece[1:]
    return segments


def cut_at_waits(device: Any, launches: Any, loading: Any, waits: Sequence[int]) -> Iterator[QueueSegment]:
    """The segments before, between and after the waits, from arrays of (kernels, GPUs) seconds: of the
    device, of the host, and of worker processes."""
    cuts = [0, *(min(index, len(device)) for index in sorted(waits)), len(device)]
    nothing = np.zeros(device.shape[1])
    for start, end in pairwise(cuts):
        if start == end:
            yield QueueSegment(nothing, nothing, nothing - np.inf, nothing)
            continue
        launched, worked = np.cumsum(launches[start:end], axis=0), np.cumsum(device[start:end], axis=0)
        delays = launched.copy()
        delays[1:] -= worked[:-1]
        yield QueueSegment(launched[-1], worked[-1], delays.max(axis=0), loading[start:end].sum(axis=0))


def merge_inner(segments: Sequence[QueueSegment], wait_s: Any) -> list[QueueSegment]:
    """No more than three segments that take as long: what is between the first wait and the last is one. At
    each of those waits, which takes the host `wait_s` (GPUs,) seconds, the device has nothing left to do."""
    if len(segments) < 3:
        return list(segments)
    first, *inner, last = segments
    host = sum(np.maximum(one.host_s, one.device_s + one.start_delay_s) + wait_s for one in inner) - wait_s
    nothing = np.zeros_like(host)
    return [first, QueueSegment(host, nothing, nothing - np.inf, sum(one.loader_s for one in inner)), last]


def simulate(segments: Sequence[QueueSegment], begin_s: Any, wait_s: Any) -> Any:
    """Seconds (..., GPUs) of a steady step of these segments with waits between them, as
    `prediction/seconds.py:simulate_queue` has it; the host takes `begin_s` to begin a step, and `wait_s` at
    each wait, both (GPUs,)."""
    now = free = last = length = np.zeros_like(wait_s)
    for _ in range(SIMULATED_STEPS):
        now = now + begin_s
        for number, segment in enumerate(segments):
            if number:
                now = np.maximum(now, free) + wait_s
            free = segment.device_s + np.maximum(free, now + segment.start_delay_s)
            now = now + segment.host_s
        end = np.maximum(now, free)
        length, last = end - last, end
    return length


def extrapolate_depth(
    by_depth: Sequence[Sequence[QueueSegment]], line: Callable[[Sequence[Any]], Any]
) -> list[QueueSegment] | None:
    """The segments on the line through those of these depths; None where those do not wait alike."""
    if len({tuple(_is_empty(segment) for segment in segments) for segments in by_depth}) != 1:
        return None
    extrapolated = []
    for same in zip(*by_depth, strict=True):
        host, device, delays, loader = zip(*same, strict=True)
        delay = delays[0] if _is_empty(same[0]) else line(delays)
        extrapolated.append(QueueSegment(line(host), line(device), delay, line(loader)))
    return extrapolated


def _is_empty(segment: QueueSegment) -> bool:
    return bool(np.isinf(segment.start_delay_s).any())


def stack(alternatives: Sequence[Sequence[QueueSegment]]) -> list[QueueSegment]:
    """As many segments as each of these alternatives has, whose arrays have a first axis for which it was."""
    return [
        QueueSegment(*(np.stack(values) for values in zip(*same, strict=True)))
        for same in zip(*alternatives, strict=True)
    ]
