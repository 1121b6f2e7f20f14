"""Few layers that tell of many: straight lines through what was rehearsed on two shallow models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snugfit.rehearsal.brief import PIECES

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.rehearsal.sizes import Passes, Round, Work
    from snugfit.techniques.setup import Setup


@dataclass(frozen=True)
class Shallow:
    """A job with fewer layers."""

    job: Job
    setup: Setup
    """With its checkpointing as the deep model has it."""
    layers: int


class Lines:
    """Passes on models of few layers, and what they tell of the whole one."""

    def __init__(self, depths: Sequence[Shallow], passes: Sequence[Passes], layers: int) -> None:
        self.depths, self.passes, self.layers = depths, passes, layers
        self._rises: dict[tuple[int, bool], float] = {}

    def along(self, values: Sequence[float]) -> float:
        """Of the whole depth, by the line through the values of these depths."""
        return along([each.layers for each in self.depths], values, self.layers)

    def rounds(self, samples: int, *, cut: bool) -> list[Round]:
        """Of micro-batches of so many samples, or of the whole batch."""
        found = [passes.cut[samples] if cut else passes.whole for passes in self.passes]
        return [once for once in found if once is not None]

    def rise(self, samples: int, *, cut: bool) -> float:
        """How far the live bytes rise at least in such passes: the largest of all modules' lines."""
        key = samples, cut
        if key not in self._rises:
            rises = [once.rises for once in self.rounds(samples, cut=cut)]
            common = set(rises[0]).intersection(*rises)
            self._rises[key] = max(self.along([each[where] for each in rises]) for where in common)
        return self._rises[key]


def waits_of(works: Iterable[Work]) -> Iterator[int]:
    """Where the host waits, when these are done one after the other."""
    before = 0
    for work in works:
        yield from (before + place for place in work.waits)
        before += len(work.kernels)


def few(pieces: int) -> tuple[int, ...]:
    """Numbers of micro-batches that tell the seconds of this one."""
    return (pieces,) if pieces <= PIECES + 1 else (PIECES, PIECES + 1)


def along(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """The straight line through one or two points."""
    if len(places) == 1:
        return values[0]
    return values[0] + (values[1] - values[0]) * (at - places[0]) / (places[1] - places[0])
