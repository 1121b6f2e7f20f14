"""The kernels of a step at any length, from those of three lengths.

What a step asks of the device at another sequence length is the same list of operators; only their sizes
change. Each size of an operand is a straight line in the length (samples x length, length, or neither), and
what a kernel computes and moves is at most a parabola (attention's scores are length x length). So the
kernels of three rehearsed lengths tell those of any other, tile by tile and wave by wave, where an
interpolation of seconds would cut the corners off the stairs.

What is no such list (a model that takes another path from some length on) is `Irregular`. Sizes that are
rounded up inside (the rows of eight in which a mask is stored) are a little off between the lengths; the
caller rehearses a fourth and sees by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from snugfit.rehearsal.trace.trace import Kernel, Trace


class Irregular(Exception):
    """Steps of two lengths that are no stretching of one another."""


class Sight(NamedTuple):
    """What a rehearsal of one length showed."""

    length: int
    """Tokens of a sequence."""

    kernels: tuple[Kernel, ...]
    """Of the steady step."""

    waits: tuple[int, ...]
    """Where its host waits."""


class Stretched:
    """A steady step at any length."""

    def __init__(self, seen: Sequence[Sight]) -> None:
        """From three lengths, the shortest first. Raises `Irregular`."""
        if len({(len(sight.kernels), sight.waits) for sight in seen}) != 1:
            raise Irregular
        self.waits = seen[0].waits
        self._lengths = [sight.length for sight in seen]
        laws: dict[tuple[Kernel, ...], int] = {}
        self._order = [
            laws.setdefault(tuple(kernel._replace(module="") for kernel in same), len(laws))
            for same in zip(*(sight.kernels for sight in seen), strict=True)
        ]
        self._laws = list(laws)
        if not all(_alike(law) for law in self._laws):
            raise Irregular

    def at(self, length: int) -> Trace:
        """The trace of the steady step at this length: its kernels and its waits, and nothing else."""
        weights = _lagrange(self._lengths, length)
        kernels = [_written(law, weights) for law in self._laws]
        return Trace((), (), (), tuple(kernels[number] for number in self._order), self.waits, ())


def _alike(kernels: Sequence[Kernel]) -> bool:
    """Whether these differ in sizes only."""
    plain = {each._replace(module="", shapes=(), flops=0, nbytes=0, leading=()) for each in kernels}
    return len(plain) == 1 and len({tuple(map(len, each.shapes)) for each in kernels}) == 1


def _lagrange(known: Sequence[int], at: int) -> list[float]:
    """How much the value at each known place counts at another, on the parabola through three."""
    weights = []
    for place in known:
        weight = 1.0
        for other in known:
            if other != place:
                weight *= (at - other) / (place - other)
        weights.append(weight)
    return weights


def _written(law: Sequence[Kernel], weights: Sequence[float]) -> Kernel:
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
