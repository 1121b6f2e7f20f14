"""Closed formula for the seconds of the kernel queue: four numbers per GPU replace all kernels between two
waits of the host.

`a` is the time until the first kernels up to this one have been launched. `w` is the device's time for all
kernels before it. The device ends a segment at

all its work + max(when it was free, when the host began + max(a - w))

The device only pauses until the next kernel is launched, and the last such pause determines the end. Two
segments without a wait between them form one segment again. The numbers of a part of a step are thus computed
once, regardless of its position.

A step may wait more than once, for example if its optimizer reads a value for each parameter. Host and device
then begin together after each wait. All segments between the first wait and the last are a sum, independent
of earlier ones. Any part of a step is therefore three segments at most.

The numbers of deeper models follow from those of two shallow ones. Launches and work grow linearly with the
layers. `max(a - w)` is a maximum of linear functions. The line through two depths therefore never exceeds it,
and neither do results simulated with it.

All arrays are seconds, float64, and their last axis is the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from snugfit.prediction.seconds import SIMULATED_STEPS


class QueueSegment(NamedTuple):
    """Kernels between two waits of the host for the GPU, summarised as four arrays of shape (..., GPUs), in
    seconds."""

    host_s: Any
    """Seconds that the host takes to launch all kernels of the segment."""
    device_s: Any
    """Seconds that the device takes to run all kernels of the segment."""
    start_delay_s: Any
    """Seconds from the host's first launch to the device's first kernel. The device is assumed to run all
    kernels without a pause, each after its launch.
    """
    sums: Any
    """Sums over the kernels, of shape (..., GPUs, 4): the seconds of the data loader's worker
    processes, and the three of `PowerRates.clock`.
    """

    def then(self, other: QueueSegment) -> QueueSegment:
        """Return this segment joined with `other` after it, without a wait between them."""
        return QueueSegment(
            self.host_s + other.host_s,
            self.device_s + other.device_s,
            np.maximum(self.start_delay_s, self.host_s + other.start_delay_s - self.device_s),
            self.sums + other.sums,
        )


def join(pieces: Iterable[Sequence[QueueSegment]]) -> list[QueueSegment]:
    """Join consecutive parts of a step into one list of queue segments, without waits between the parts."""
    first, *rest = pieces
    segments = list(first)
    for piece in rest:
        # The host does not wait between the last segment and the first of this piece, so both become one.
        segments[-1:] = segments[-1].then(piece[0]), *piece[1:]
    return segments


def cut_at_waits(device: Any, launches: Any, sums: Any, waits: Sequence[int]) -> Iterator[QueueSegment]:
    """Yield the queue segments before, between and after the host's waits. The arrays (kernels, GPUs) are
    seconds of kernels on the device and of launches. `sums` (kernels, GPUs, 4) are those of `QueueSegment`.
    """
    cuts = [0, *(min(index, len(device)) for index in sorted(waits)), len(device)]
    nothing = np.zeros(device.shape[1])
    for start, end in pairwise(cuts):
        if start == end:
            # A delay of -inf never delays the device, since it is neutral for a maximum.
            yield QueueSegment(nothing, nothing, nothing - np.inf, np.zeros(sums.shape[1:]))
            continue
        launched, worked = np.cumsum(launches[start:end], axis=0), np.cumsum(device[start:end], axis=0)
        delays = launched.copy()
        # A kernel starts once it is launched and all kernels before it have run.
        delays[1:] -= worked[:-1]
        yield QueueSegment(launched[-1], worked[-1], delays.max(axis=0), sums[start:end].sum(axis=0))


def merge_inner(segments: Sequence[QueueSegment], wait_s: Any) -> list[QueueSegment]:
    """Return at most three segments with the same total time.

    All segments between the first wait and the last become one. Each wait costs the host `wait_s` seconds, of
    shape (GPUs,).
    """
    if len(segments) < 3:
        return list(segments)
    first, *inner, last = segments
    host = (
        sum(
            np.maximum(segment.host_s, segment.device_s + segment.start_delay_s) + wait_s for segment in inner
        )
        - wait_s
    )
    nothing = np.zeros_like(host)
    return [
        first,
        QueueSegment(host, nothing, nothing - np.inf, sum(segment.sums for segment in inner)),
        last,
    ]


def simulate(segments: Sequence[QueueSegment], begin_s: Any, wait_s: Any) -> Any:
    """Return the seconds (..., GPUs) of a step, from its queue segments with waits between them. The result
    is that of `simulate_queue` in `prediction/seconds.py`. The host takes `begin_s` seconds to begin a step
    and `wait_s` at each wait, both of shape (GPUs,).
    """
    now = free = last = length = np.zeros_like(wait_s)
    # In a steady step the device may still run the previous one, so several are simulated.
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
    """Return queue segments for all layers, on the line through those of few layers; None if their waits are
    at different places.
    """
    if len({tuple(_is_empty(segment) for segment in segments) for segments in by_depth}) != 1:
        return None
    extrapolated = []
    for same in zip(*by_depth, strict=True):
        host, device, delays, sums = zip(*same, strict=True)
        # Extrapolation from -inf would give NaN.
        delay = delays[0] if _is_empty(same[0]) else line(delays)
        extrapolated.append(QueueSegment(line(host), line(device), delay, line(sums)))
    return extrapolated


def _is_empty(segment: QueueSegment) -> bool:
    return bool(np.isinf(segment.start_delay_s).any())


def stack(alternatives: Sequence[Sequence[QueueSegment]]) -> list[QueueSegment]:
    """Return the queue segments of several alternative recipes as arrays, stacked along a new first
    dimension.
    """
    return [
        QueueSegment(*(np.stack(values) for values in zip(*same, strict=True)))
        for same in zip(*alternatives, strict=True)
    ]
