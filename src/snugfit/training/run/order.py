"""Which samples each optimizer step sees, as a function of (seed, step).

    epoch e          a permutation of all samples, drawn from (seed, e)
    step k           the (k mod steps)-th global batch of epoch k // steps
    micro-batches    that batch, cut into pieces of one size

There is no state: asked for step 70,000, `SampleOrder` answers as it would have after 69,999 others. So a
resumed run goes on with the very samples that come next, whatever happened before, and another cut into
micro-batches (after memory ran out) changes no step's samples.

With `bucket`, samples of like length come together, as transformers' `group_by_length` has it: the
permutation is cut into windows of 50 batches, each window is sorted by length and cut into batches, and the
batches are shuffled. Within a batch samples are sorted too, so that each micro-batch is padded least. An
epoch's last, smaller batch is set apart before sorting, so that it is a random sample like any other, and
comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, final

from snugfit.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

WINDOW = 50
"""Batches that are sorted together: transformers' own number."""

MicroBatchIndices = tuple[tuple[int, ...], ...]
"""The samples of each micro-batch of a step."""


@final
@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The samples of every step of a run."""

    samples: int
    """How many there are."""

    batch_size: int
    """Samples of one optimizer step."""

    micro_batches: int
    """Pieces that each step is cut into."""

    seed: int = field(kw_only=True)
    """Of the permutations of the samples."""

    shuffle: bool = field(default=True, kw_only=True)
    """False keeps the samples as they lie."""

    drop_last: bool = field(default=False, kw_only=True)
    """Leave out the samples that do not fill an epoch's last batch."""

    lengths: Sequence[int] | np.ndarray | None = field(default=None, kw_only=True, repr=False)
    """Tokens of each sample, for `bucket`."""

    bucket: bool = field(default=False, kw_only=True)
    """Put samples of like length together."""

    def __post_init__(self) -> None:
        for name, value in (
            ("batch size", self.batch_size),
            ("micro-batches", self.micro_batches),
            ("samples", self.samples),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}: {value!r} is not allowed; it must be a whole number from 1.")
        if self.batch_size % self.micro_batches:
            raise UsageError(
                f"A batch of {self.batch_size} cannot be cut into {self.micro_batches} equal micro-batches."
            )
        if not self.steps_per_epoch:
            raise UsageError(
                f"{self.samples} samples are less than one batch of {self.batch_size}, and drop_last "
                "leaves out incomplete batches. Turn it off, or use a smaller batch."
            )
        if self.bucket and (self.lengths is None or len(self.lengths) != self.samples):
            raise UsageError("Grouping by length needs the length of every sample.")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sample once."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def epoch(self, step: int) -> int:
        """The epoch that this step belongs to, from 0."""
        return step // self.steps_per_epoch

    def step(self, step: int) -> MicroBatchIndices:
        """The samples of the micro-batches of the `step`-th optimizer step of the whole run, from 0."""
        epoch, index = divmod(step, self.steps_per_epoch)
        first = index * self.batch_size
        batch = _epoch(self, epoch)[first : first + self.batch_size].tolist()
        size = self.batch_size // self.micro_batches
        count = -(-len(batch) // size)
        ends = [len(batch) * (number + 1) // count for number in range(count)]
        return tuple(tuple(batch[start:end]) for start, end in zip([0, *ends], ends, strict=False))


@lru_cache(maxsize=4)
def _epoch(order: SampleOrder, epoch: int) -> np.ndarray:
    """An epoch's sample indices (samples,), global batch after global batch."""
    import numpy as np

    draw = np.random.Generator(np.random.PCG64([order.seed, epoch]))
    samples = draw.permutation(order.samples) if order.shuffle else np.arange(order.samples)
    if not order.bucket:
        return samples
    size = order.batch_size
    whole = order.samples // size
    lengths = np.asarray(order.lengths)
    batches = _by_length(samples[: whole * size], lengths, WINDOW * size).reshape(whole, size)
    if order.shuffle:
        batches = draw.permutation(batches)
    last = _by_length(samples[whole * size :], lengths, size)
    return np.concatenate([_by_length(batches.ravel(), lengths, size), last])


def _by_length(samples: np.ndarray, lengths: np.ndarray, window: int) -> np.ndarray:
    """Sample indices (n,) sorted within each window, the longest sample first; `lengths` has all samples."""
    import numpy as np

    windows = np.arange(len(samples)) // window
    return samples[np.lexsort((-lengths[samples], windows))]
