"""Memory and step time of each way to pad a dataset's batches.

Memory is that of the longest batch, and time the mean over all batches. A step with micro-batches of several
lengths takes the mean of the seconds at each length. That is exact if forward and backward passes follow one
another without a gap. The CPU may launch long batches faster than the device runs them, and short ones
slower. It could then run ahead and compensate. But CUDA's launch queue is shorter than a pass of a large
model, so this effect is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.errors import JobError
from snugfit.features.lengths.batches import MULTIPLES, ORDERS, DrawnBatches, draw
from snugfit.features.lengths.length_profile import BatchShape, LengthProfiler, LengthSeconds

if TYPE_CHECKING:
    from snugfit.features.lengths.dataset import Lengths


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to pad a dataset's batches, such as to the longest sample of each, with its memory and step
    time.
    """

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "fits": (
            bool | None,
            "True if the longest batch fits; null without a memory limit. In `ways` of the document only.",
        )
    }
    """Keys that a document adds, with types and sentences."""
    optional_keys: ClassVar[tuple[str, ...]] = ("fits",)
    """Keys that `best` of the document omits."""

    order: str
    """`fixed`, `random` or `grouped` (`batches.py`)."""

    multiple: int
    """Multiple to which lengths are rounded up."""

    length: int
    """Tokens of the longest possible batch."""

    needed_bytes: int | None = None
    """Bytes that must be free on the device; None if the model does not accept so long a batch."""

    reserved_bytes: int | None = None
    """Bytes of `needed_bytes` that the allocator reserves."""

    padding: float | None = None
    """Share of padding in all tokens."""

    step_seconds: float | None = None
    """Average seconds of a step."""

    aligned_step_seconds: float | None = None
    """Average seconds of a step, without a cost of rows that are not a multiple of 16 bytes."""

    longest_step_seconds: float | None = None
    """Seconds of the longest drawn step."""

    samples_per_second: float | None = None
    """Average samples per second over the steps."""

    tokens_per_second: float | None = None
    """Average tokens per second over the steps, without padding."""

    why_not: str = ""
    """Reason why this way is impossible."""


class Ways:
    """All ways to pad one dataset's batches (such as dynamically, or grouped by length), with their memory
    and step time.
    """

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
        """Return the length in tokens of the longest possible batch, rounded up to a multiple."""
        return -(-self.lengths.longest // multiple) * multiple

    def shapes(self) -> Iterable[BatchShape]:
        """Yield the shapes (length, and with padding or without) of all drawn batches."""
        for drawn in self.drawn.values():
            for multiple in filterfalse(self.why_not.get, MULTIPLES):
                yield from _shapes(drawn, multiple)

    def ways(self, seconds: Mapping[BatchShape, LengthSeconds]) -> tuple[Way, ...]:
        """Return each way of padding with its memory and step time, from the seconds of each batch shape."""
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
        """Return True if the longest batch may contain padding, from shorter samples or from rounding up its
        length.
        """
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
    """Return the seconds of each training step: the mean over the lengths of its micro-batches."""
    padded = drawn.padded_to(multiple)
    partly = drawn.shortest < padded
    return [
        _mean([seconds[shape] for shape in map(BatchShape, lengths, masked)])
        for lengths, masked in zip(padded.tolist(), partly.tolist(), strict=True)
    ]


def _mean(of: Sequence[LengthSeconds]) -> LengthSeconds:
    return LengthSeconds(*(sum(values) / len(of) for values in zip(*of, strict=True)))


def seconds_of(profiler: LengthProfiler, of: Sequence[Ways]) -> dict[BatchShape, LengthSeconds]:
    """Return the predicted seconds of a step for every shape (length, padded or not) of the drawn batches."""
    shapes = {shape for ways in of for shape in ways.shapes()}
    seconds: dict[BatchShape, LengthSeconds] = {}
    for padded in (True, False):
        lengths = {length for length, masked in shapes if masked is padded}
        by_length = profiler.seconds(lengths, padded)
        seconds |= {BatchShape(length, padded): one for length, one in by_length.items()}
    return seconds
