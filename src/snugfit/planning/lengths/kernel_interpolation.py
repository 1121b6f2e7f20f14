"""The kernels of a step at any length, from those of three lengths.

What a step asks of the device at another sequence length is the same list of operators; only their sizes
change. Each size of an operand is a straight line in the length (samples x length, length, or neither), and
what a kernel computes and moves is at most a parabola (attention's scores are length x length). So the
kernels of three rehearsed lengths tell those of any other, tile by tile and wave by wave, where an
interpolation of seconds would cut the corners off the stairs.

What is no such list (a model that takes another path from some length on) is `NotInterpolable`. Sizes that
are rounded up inside (the rows of eight in which a mask is stored) are a little off between the lengths; the
caller rehearses a fourth and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from snugfit.rehearsal.trace.trace import Kernel, Trace


class NotInterpolable(Exception):
    """Steps of two lengths that differ in more than sizes."""


class LengthSample(NamedTuple):
    """A rehearsal of one length."""

    length: int
    """Tokens of a sequence."""

    kernels: tuple[Kernel, ...]
    """What the steady step runs."""

    waits: tuple[int, ...]
    """Before which of them the host waits."""


class KernelInterpolator:
    """A steady step at any length."""

    def __init__(self, samples: Sequence[LengthSample]) -> None:
        """From three lengths, the shortest first. Raises `NotInterpolable`."""
        if len({(len(sample.kernels), sample.waits) for sample in samples}) != 1:
            raise NotInterpolable
        self.waits = samples[0].waits
        self._lengths = [sample.length for sample in samples]
        laws: dict[tuple[Kernel, ...], int] = {}
        self._order = [
            laws.setdefault(tuple(kernel._replace(module="") for kernel in same), len(laws))
            for same in zip(*(sample.kernels for sample in samples), strict=True)
        ]
        self._laws = list(laws)
        if not all(_alike(law) for law in self._laws):
            raise NotInterpolable

    def at(self, length: int) -> Trace:
        """The trace of the steady step at this length: its kernels and its waits, and nothing else."""
        weights = _lagrange(self._lengths, length)
        kernels = [_kernel_at(law, weights) for law in self._laws]
        return Trace((), (), (), tuple(kernels[number] for number in self._order), self.waits, ())


def _alike(kernels: Sequence[Kernel]) -> bool:
    """Whether these differ in sizes only."""
    plain = {kernel._replace(module="", shapes=(), flops=0, nbytes=0, leading=()) for kernel in kernels}
    return len(plain) == 1 and len({tuple(map(len, kernel.shapes)) for kernel in kernels}) == 1


def _lagrange(known: Sequence[int], at: int) -> list[float]:
    """The weight of the value at each known length for that at another, on the parabola through three."""
    weights = []
    for one in known:
        weight = 1.0
        for other in known:
            if other != one:
                weight *= (at - other) / (one - other)
        weights.append(weight)
    return weights


def _kernel_at(law: Sequence[Kernel], weights: Sequence[float]) -> Kernel:
    def through(values: Sequence[int]) -> int:
        if values[0] == values[1] == values[2]:
            return values[0]
        return max(0, round(sum(weight * value for weight, value in zip(weights, values, strict=True))))

    shapes = tuple(
        tuple(through(sizes) for sizes in zip(*same, strict=True))
        for same in zip(*(kernel.shapes for kernel in law), strict=True)
    )
    return law[0]._replace(
        shapes=shapes,
        leading=tuple(through(lengths) for lengths in zip(*(kernel.leading for kernel in law), strict=True)),
        flops=through([kernel.flops for kernel in law]),
        nbytes=through([kernel.nbytes for kernel in law]),
    )
