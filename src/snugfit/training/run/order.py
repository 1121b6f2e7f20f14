"""The samples of each optimizer step, as a function of (seed, step).

| level         | samples                                                                                  |
|---------------|------------------------------------------------------------------------------------------|
| epoch e       | a permutation of all samples, drawn from (seed, e)                                       |
| step k        | the (k mod steps)-th global batch of epoch k // steps                                    |
| ranks         | that batch, shared by the processes, one part after the other                            |
| micro-batches | that share, cut into pieces of one size                                                  |

`SampleOrder` has no state: it computes the samples of step 70,000 without those of the 69,999 steps before. A
resumed run therefore continues with exactly the next samples. The number of micro-batches, which may change
after a lack of memory, does not change the samples of a step.

With `bucket`, samples of similar length are batched, as in transformers' `group_by_length`. The permutation
is divided into windows of 50 batches. Each window is sorted by length and divided into batches, and the
batches are shuffled. Samples are also sorted within a batch, so that micro-batches have little padding. The
smaller last batch of an epoch is separated before the sorting, so that its samples are random. It comes last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, final

from snugfit.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

WINDOW = 50
"""Number of batches whose samples are sorted together by length, the same as in transformers."""

MicroBatchIndices = tuple[tuple[int, ...], ...]
"""The type of a step's sample indices: one tuple of indices for each micro-batch."""


@final
@dataclass(frozen=True, eq=False)
class SampleOrder:
    """Computes the samples of every step of a run, from the seed and the number of the step."""

    samples: int
    """Number of samples in the dataset."""

    batch_size: int
    """Number of samples in the global batch of one optimizer step."""

    micro_batches: int
    """Number of micro-batches of each step, per process if several train together."""

    ranks: int = field(default=1, kw_only=True)
    """Number of equal parts of each batch. Each part belongs to one process or to a group of processes."""

    rank: int = field(default=0, kw_only=True)
    """Index of the part of each batch that this process computes."""

    seed: int = field(kw_only=True)
    """Seed of the permutations of the samples."""

    shuffle: bool = field(default=True, kw_only=True)
    """True to permute the samples in each epoch. False keeps the dataset's order."""

    drop_last: bool = field(default=False, kw_only=True)
    """True to leave out the samples that do not fill an epoch's last batch."""

    lengths: Sequence[int] | np.ndarray | None = field(default=None, kw_only=True, repr=False)
    """Number of tokens of each sample, which `bucket` needs; else None."""

    bucket: bool = field(default=False, kw_only=True)
    """True to put samples of similar length into the same batch."""

    def __post_init__(self) -> None:
        for name, value in (
            ("batch size", self.batch_size),
            ("micro-batches", self.micro_batches),
            ("samples", self.samples),
            ("ranks", self.ranks),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}: {value!r} is not allowed; it must be a whole number from 1.")
        if self.batch_size % self.ranks:
            raise UsageError(
                f"A batch of {self.batch_size} cannot be shared evenly by {self.ranks} GPUs. Choose a "
                f"multiple of {self.ranks}."
            )
        if self.batch_size // self.ranks % self.micro_batches:
            raise UsageError(
                f"A batch of {self.batch_size // self.ranks} cannot be cut into {self.micro_batches} "
                "equal micro-batches. Choose another batch size, or another number of micro-batches."
            )
        if not self.steps_per_epoch:
            raise UsageError(
                f"{self.samples} samples are less than one batch of {self.batch_size}, and drop_last "
                "leaves out incomplete batches. Turn it off, or use a smaller batch."
            )
        if self.bucket and (self.lengths is None or len(self.lengths) != self.samples):
            raise UsageError(
                "Grouping by length needs the length of every sample. Leave group_by_length out."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in an epoch."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def epoch(self, step: int) -> int:
        """Return the epoch of this training step, from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> tuple[int, ...]:
        """Return the sample indices of the `step`-th optimizer step of the whole run, from 0, over all
        processes.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        first = index * self.batch_size
        return tuple(_epoch(self, epoch)[first : first + self.batch_size].tolist())

    def step(self, step: int) -> MicroBatchIndices:
        """Return the sample indices of this process's micro-batches of a step.

        In an epoch's last batch, which may be smaller, all processes have the same number of micro-batches.
        Some of them may be empty.
        """
        return self._shares(step)[self.rank]

    def step_of_all(self, step: int) -> MicroBatchIndices:
        """Return the sample indices of all processes' micro-batches of a step, in the order of processes."""
        return tuple(itertools.chain(*self._shares(step)))

    def _shares(self, step: int) -> list[MicroBatchIndices]:
        batch = self.batch(step)
        bounds = [len(batch) * number // self.ranks for number in range(self.ranks + 1)]
        shares = [batch[start:end] for start, end in itertools.pairwise(bounds)]
        size = self.batch_size // self.ranks // self.micro_batches
        count = max(-(-len(share) // size) for share in shares)
        return [_cut(share, count) for share in shares]

    def with_stand_ins(self, step: int) -> MicroBatchIndices:
        """Return this process's micro-batches. Each empty one gets one sample of the step, so that all
        processes run equally many passes.

        The other processes wait for these passes, and their results do not count.
        """
        return tuple(piece or self.batch(step)[:1] for piece in self.step(step))


def _cut(samples: tuple[int, ...], count: int) -> MicroBatchIndices:
    """Split these samples into `count` micro-batches, whose sizes differ by one at most."""
    ends = [len(samples) * (number + 1) // count for number in range(count)]
    return tuple(samples[start:end] for start, end in itertools.pairwise([0, *ends]))


@lru_cache(maxsize=4)
def _epoch(order: SampleOrder, epoch: int) -> np.ndarray:
    """Return an epoch's sample indices (samples,), global batch after global batch."""
    import numpy as np

    # The seed contains the epoch number, so that a resumed run need not draw earlier epochs' permutations.
    draw = np.random.Generator(np.random.PCG64([order.seed, epoch]))
    samples = draw.permutation(order.samples) if order.shuffle else np.arange(order.samples)
    if not order.bucket:
        return samples
    size = order.batch_size
    # The smaller last batch stays at the end, so that all other batches are full.
    whole = order.samples // size
    lengths = np.asarray(order.lengths)
    batches = _by_length(samples[: whole * size], lengths, WINDOW * size).reshape(whole, size)
    # Without this permutation, each window would begin with its longest batches.
    if order.shuffle:
        batches = draw.permutation(batches)
    last = _by_length(samples[whole * size :], lengths, size)
    return np.concatenate([_by_length(batches.ravel(), lengths, size), last])


def _by_length(samples: np.ndarray, lengths: np.ndarray, window: int) -> np.ndarray:
    """Return the `samples` (n,), sorted by length within each `window` of indices, longest first. `lengths`
    has the length of every sample of the dataset.
    """
    import numpy as np

    windows = np.arange(len(samples)) // window
    # `lexsort` uses its last key first: windows, then lengths.
    return samples[np.lexsort((-lengths[samples], windows))]
