"""Memory and step time of each way to pad a dataset's batches.

Memory is that of the longest batch, and time the mean over all batches. A step with micro-batches of several
lengths takes the mean of the seconds at each length. That is exact if forward and backward passes follow one
another without a gap. The CPU may launch long batches faster than the device runs them, and short ones
slower. It could then run ahead and compensate. But CUDA's launch queue is shorter than a pass of a large
model, so this effect is ignored.

**Batches.** Random batches of a dataset's sample lengths: their padded length and their fraction of padding.

A batch is padded to its longest sample, so its samples determine its length. Three orders exist:

- `fixed`: every batch is padded to the longest sample of the dataset, regardless of its samples;
- `random`: samples in random order, each micro-batch padded to its own longest sample. This is dynamic
  padding, as in transformers' `DataCollatorWithPadding`;
- `grouped`: samples of similar lengths share a batch, as in transformers' `LengthGroupedSampler`
  (`trainer_pt_utils.get_length_grouped_indices`, with `train_sampling_strategy="group_by_length"`). A random
  order is cut into pieces of at most fifty global batches. Each piece is sorted, and the longest sample of
  all comes first. `tests/test_lengths_batches.py` compares this with transformers, sample by sample.

A global batch is cut into micro-batches in the order of its samples. Each is padded separately, as in every
loop. An incomplete last global batch of an epoch is dropped. With one seed, the same lengths give the same
batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.errors import JobError
from snugfit.features.lengths.length_profile import BatchShape, LengthProfiler, LengthSeconds

if TYPE_CHECKING:
    import numpy as np

    from snugfit.features.lengths.dataset import Lengths

    Integers = np.ndarray[Any, np.dtype[np.int64]]


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
    """JSON keys that an output adds, with their types and descriptions."""
    optional_keys: ClassVar[tuple[str, ...]] = ("fits",)
    """JSON keys that the entry `best` of an output leaves out."""

    order: str
    """Order of the samples: `fixed` (all padded to one length), `random`, or `grouped` by length."""

    multiple: int
    """Lengths of batches are rounded up to a multiple of this number of tokens."""

    length: int
    """Number of tokens per sequence in the longest possible batch."""

    needed_bytes: int | None = None
    """Bytes that must be free on the device; None if the model does not accept the longest batch."""

    reserved_bytes: int | None = None
    """Part of `needed_bytes` that the allocator reserves."""

    padding: float | None = None
    """Share of padding among all tokens, from 0 to 1."""

    step_seconds: float | None = None
    """Mean seconds of a step over the drawn steps."""

    aligned_step_seconds: float | None = None
    """Mean seconds of a step without the extra cost of unaligned rows (no multiple of 16 bytes)."""

    longest_step_seconds: float | None = None
    """Seconds of the longest drawn step."""

    samples_per_second: float | None = None
    """Mean samples per second over the drawn steps."""

    tokens_per_second: float | None = None
    """Mean tokens per second over the drawn steps, without padding."""

    why_not: str = ""
    """Reason why this way of padding is impossible; empty if it is possible."""


class Ways:
    """All ways to pad one dataset's batches (such as dynamically, or grouped by length), with their memory
    and step time.
    """

    def __init__(self, profiler: LengthProfiler, lengths: Lengths, seed: int) -> None:
        self.profiler, self.lengths = profiler, lengths
        self.micro_batches = profiler.recipe.pieces
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
        """Yield the shapes of all drawn batches: the length, and True for padding."""
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


def _mean(lengths: Sequence[LengthSeconds]) -> LengthSeconds:
    return LengthSeconds(*(sum(values) / len(lengths) for values in zip(*lengths, strict=True)))


def seconds_of(profiler: LengthProfiler, all_ways: Sequence[Ways]) -> dict[BatchShape, LengthSeconds]:
    """Return the predicted seconds of a step for every shape (length, padded or not) of the drawn batches."""
    shapes = {shape for ways in all_ways for shape in ways.shapes()}
    seconds: dict[BatchShape, LengthSeconds] = {}
    for padded in (True, False):
        lengths = {length for length, masked in shapes if masked is padded}
        by_length = profiler.seconds(lengths, padded)
        seconds |= {BatchShape(length, padded): shape_seconds for length, shape_seconds in by_length.items()}
    return seconds


# ---- batches -----------------------------------------------------------------------------------------------


ORDERS = ("fixed", "random", "grouped")
MULTIPLES = (1, 8, 64)
"""Multiples to which batch lengths are rounded up (`pad_to_multiple_of`): no rounding, tensor cores' 16
bytes, and kernels' tiles.
"""

FEWEST_STEPS = 256
"""Least number of global batches that are drawn. Small datasets are repeated."""

MOST_SAMPLES = 1 << 18
"""Greatest number of samples that are drawn from a dataset. A larger global batch raises it."""

MEGABATCHES = 50
"""Greatest number of global batches whose samples are sorted together by length. transformers has the same
number.
"""


@dataclass(frozen=True)
class DrawnBatches:
    """Sequence lengths of the micro-batches in many global batches, in the drawn order. The arrays are
    (global batches, micro-batches in each).
    """

    longest: Integers
    """Number of tokens in the longest sample of each micro-batch."""

    shortest: Integers
    """Number of tokens in the shortest sample of each micro-batch."""

    tokens: Integers
    """Number of tokens in all samples of each micro-batch, without padding."""

    samples: int
    """Number of samples in each micro-batch."""

    def padded_to(self, multiple: int) -> Integers:
        """Return the length of each micro-batch in tokens, rounded up to a multiple: (global batches,
        micro-batches).
        """
        return -(-self.longest // multiple) * multiple

    def padding(self, multiple: int) -> float:
        """Return the fraction of all tokens in the drawn batches that are padding."""
        return 1 - float(self.tokens.sum()) / float((self.padded_to(multiple) * self.samples).sum())


def draw(lengths: Lengths, *, batch_size: int, micro_batches: int, order: str, seed: int = 0) -> DrawnBatches:
    """Return at least `FEWEST_STEPS` random global batches of the dataset's sample lengths, in this order
    (such as `grouped`). Raises `JobError` for a dataset that has fewer samples than a global batch.
    """
    import numpy as np

    if lengths.samples < batch_size:
        raise JobError(
            f"{lengths.source}: {lengths.samples:,} lengths, but a global batch has {batch_size:,} "
            "samples. Give the lengths of a whole dataset, or a smaller batch_size."
        )
    random = np.random.default_rng(seed)
    dataset = _sample_lengths(lengths, batch_size, random)
    epochs = -(-FEWEST_STEPS // (len(dataset) // batch_size))
    pieces = []
    for _ in range(epochs):
        epoch = random.permutation(dataset)
        if order == "grouped":
            epoch = group_by_length(epoch, batch_size, _together(lengths.samples, batch_size))
        pieces.append(epoch[: len(epoch) // batch_size * batch_size])
    cut = np.concatenate(pieces).reshape(-1, micro_batches, batch_size // micro_batches)
    longest = cut.max(axis=2)
    if order == "fixed":
        longest = np.full_like(longest, lengths.longest)
    return DrawnBatches(longest, cut.min(axis=2), cut.sum(axis=2), cut.shape[2])


def group_by_length(order: Integers, batch_size: int, together: int) -> Integers:
    """Group randomly ordered sample lengths (samples,) as `get_length_grouped_indices` does.

    The lengths are sorted within pieces of `together` global batches. The longest of all is exchanged with
    the first.
    """
    import numpy as np

    size = together * batch_size
    pieces = [np.sort(order[start : start + size])[::-1] for start in range(0, len(order), size)]
    largest = int(np.argmax([piece[0] for piece in pieces]))
    lengths: Integers = np.concatenate(pieces)
    lengths[[0, largest * size]] = lengths[[largest * size, 0]]
    return lengths


def _together(samples: int, batch_size: int) -> int:
    return max(1, min(samples // (batch_size * 4), MEGABATCHES))


def _sample_lengths(lengths: Lengths, batch_size: int, random: np.random.Generator) -> Integers:
    """Return every sample's length in tokens (samples,), or those of a random part of a very large dataset.

    The part includes the longest sample.
    """
    import numpy as np

    tokens, samples = np.array(lengths.counts, dtype=np.int64).T
    most = max(MOST_SAMPLES, batch_size)
    if lengths.samples <= most:
        all_lengths: Integers = np.repeat(tokens, samples)
        return all_lengths
    part: Integers = random.choice(tokens, size=most, p=samples / samples.sum())
    part[0] = lengths.longest
    return part
