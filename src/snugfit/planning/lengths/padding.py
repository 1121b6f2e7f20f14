"""What each way of padding a dataset's batches takes: the longest batch's bytes, and all batches' seconds.

A step of micro-batches of several lengths takes the mean of what steps of each length take. That is exact
where passes follow one another without a gap. A host that is faster than the device in long batches and
slower in short ones could run ahead in the one and make up for the other; but CUDA's queue of launches is
shorter than a pass of a large model, so that is not counted on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import TYPE_CHECKING

from snugfit.errors import JobError
from snugfit.planning.lengths.batches import MULTIPLES, ORDERS, DrawnBatches, draw
from snugfit.planning.lengths.length_profile import BatchShape, LengthProfiler, LengthSeconds

if TYPE_CHECKING:
    from snugfit.data.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to pad a dataset's batches, and what it takes."""

    order: str
    """`fixed`, `random` or `grouped` (`batches.py`)."""

    multiple: int
    """Lengths are rounded up to multiples of it."""

    length: int
    """Tokens of the longest batch that can occur."""

    needed_bytes: int | None = None
    """What must be free on the device; None when the model takes no batch so long."""

    reserved_bytes: int | None = None
    """Of it, what the allocator takes."""

    padding: float | None = None
    """Share of all tokens that is padding."""

    step_seconds: float | None = None
    """The average over the steps."""

    aligned_step_seconds: float | None = None
    """The same, were rows that are no multiple of 16 bytes to cost nothing."""

    longest_step_seconds: float | None = None
    """Of the longest step that was drawn."""

    samples_per_second: float | None = None
    """The average over the steps."""

    tokens_per_second: float | None = None
    """The same for tokens that are not padding."""

    why_not: str = ""
    """Why it cannot be."""


class Ways:
    """Every way of padding one dataset's batches."""

    def __init__(self, profiler: LengthProfiler, lengths: Lengths, seed: int) -> None:
        self.profiler, self.lengths = profiler, lengths
        self.micro_batches = profiler.recipe.setup().micro_batches
        job = profiler.job
        self.drawn: dict[str, DrawnBatches] = {
            order: draw(
                lengths,
                batch_size=job.batch_size,
                micro_batches=self.micro_batches,
                order=order,
                seed=seed,
            )
            for order in ORDERS
        }
        self.steps = len(self.drawn["fixed"].tokens)
        self.why_not = {multiple: self._refusal(multiple) for multiple in MULTIPLES}

    def longest(self, multiple: int) -> int:
        """Tokens of the longest batch that can occur."""
        return -(-self.lengths.longest // multiple) * multiple

    def shapes(self) -> Iterable[BatchShape]:
        """The batches that were drawn: each length, and whether something in it is padded."""
        for drawn in self.drawn.values():
            for multiple in filterfalse(self.why_not.get, MULTIPLES):
                yield from _shapes(drawn, multiple)

    def ways(self, seconds: Mapping[BatchShape, LengthSeconds]) -> tuple[Way, ...]:
        """What each way of padding takes, from the seconds of each drawn shape."""
        return tuple(self._way(order, multiple, seconds) for order in ORDERS for multiple in MULTIPLES)

    def _way(self, order: str, multiple: int, seconds: Mapping[BatchShape, LengthSeconds]) -> Way:
        length, drawn = self.longest(multiple), self.drawn[order]
        if self.why_not[multiple]:
            return Way(order=order, multiple=multiple, length=length, why_not=self.why_not[multiple])
        bytes = self.profiler.bytes(length, self._may_be_padded(length, multiple, order))
        steps = _steps(drawn, multiple, seconds)
        mean = _mean(steps)
        samples = self.profiler.job.batch_size
        tokens = float(drawn.tokens.sum()) / len(steps)
        return Way(
            order=order,
            multiple=multiple,
            length=length,
            needed_bytes=bytes.needed_bytes,
            reserved_bytes=bytes.reserved_bytes,
            padding=drawn.padding(multiple),
            step_seconds=mean.step,
            aligned_step_seconds=mean.aligned,
            longest_step_seconds=max(step.step for step in steps),
            samples_per_second=samples / mean.step,
            tokens_per_second=tokens / mean.step,
        )

    def _refusal(self, multiple: int) -> str:
        try:
            self.profiler.at(self.longest(multiple), padded=True)
        except JobError as error:
            return str(error)
        return ""

    def _may_be_padded(self, length: int, multiple: int, order: str) -> bool:
        """Whether something can be padded in the longest batch: whatever meets the longest sample in it, or
        the sample itself, rounded up."""
        alone = self.profiler.job.batch_size == self.micro_batches and order != "fixed"
        within = length - multiple if alone else 0
        return any(within < tokens < length for tokens, _ in self.lengths.counts)


def _shapes(drawn: DrawnBatches, multiple: int) -> set[BatchShape]:
    padded = drawn.padded_to(multiple)
    partly = drawn.shortest < padded
    return set(map(BatchShape, padded.ravel().tolist(), partly.ravel().tolist()))


def _steps(
    drawn: DrawnBatches, multiple: int, seconds: Mapping[BatchShape, LengthSeconds]
) -> list[LengthSeconds]:
    """Of each step: the mean of what steps of its micro-batches' lengths take."""
    padded = drawn.padded_to(multiple)
    partly = drawn.shortest < padded
    return [
        _mean([seconds[shape] for shape in map(BatchShape, lengths, masked)])
        for lengths, masked in zip(padded.tolist(), partly.tolist(), strict=True)
    ]


def _mean(of: Sequence[LengthSeconds]) -> LengthSeconds:
    return LengthSeconds(*(sum(values) / len(of) for values in zip(*of, strict=True)))


def seconds_of(profiler: LengthProfiler, of: Sequence[Ways]) -> dict[BatchShape, LengthSeconds]:
    """LengthSeconds of a step at every length that was drawn."""
    shapes = {shape for ways in of for shape in ways.shapes()}
    seconds: dict[BatchShape, LengthSeconds] = {}
    for padded in (True, False):
        lengths = {length for length, masked in shapes if masked is padded}
        by_length = profiler.seconds(lengths, padded)
        seconds |= {BatchShape(length, padded): one for length, one in by_length.items()}
    return seconds
