"""Batches drawn from a dataset's lengths: how long each becomes, and how much of it is padding.

A batch is padded to its longest sample, so its length is decided by which samples meet in it. Three orders
are known:

- `fixed`: every batch is padded to the longest sample of the dataset, whatever is in it;
- `random`: samples in random order, each micro-batch padded to its own longest (dynamic padding, as
  transformers' `DataCollatorWithPadding` does it);
- `grouped`: samples of like lengths meet. As transformers' `LengthGroupedSampler` does it
  (`trainer_pt_utils.get_length_grouped_indices`, with `train_sampling_strategy="group_by_length"`): a random
  order is cut into pieces of at most fifty global batches, each piece is sorted, the longest sample of all
  is put first. `tests/test_lengths_batches.py` compares the two, sample by sample.

A global batch is cut into micro-batches in the order in which its samples came, and each is padded on its
own, as every loop does. The last global batch of an epoch, when samples are lacking, is dropped. Draws are
made from one seed: the same lengths give the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError

if TYPE_CHECKING:
    import numpy as np

    from snugfit.data.lengths import Lengths

    Integers = np.ndarray[Any, np.dtype[np.int64]]

ORDERS = ("fixed", "random", "grouped")
MULTIPLES = (1, 8, 64)
"""To which lengths are rounded up (`pad_to_multiple_of`): none, tensor cores' 16 bytes, and tiles."""

FEWEST_STEPS = 256
"""Global batches that are drawn at least; small datasets are gone through several times."""

MOST_SAMPLES = 1 << 18
"""Samples that are drawn at most, but for batches that are larger still: a dataset's share of them."""

MEGABATCHES = 50
"""Global batches that are sorted together, at most: transformers' own figure."""


@dataclass(frozen=True)
class DrawnBatches:
    """Micro-batches of many global batches, as the order made them: arrays of (global batches, micro-batches
    in each)."""

    longest: Integers
    """Tokens of the longest sample."""

    shortest: Integers
    """Tokens of the shortest sample."""

    tokens: Integers
    """Of all samples: those that are not padding."""

    samples: int
    """Samples of one micro-batch."""

    def padded_to(self, multiple: int) -> Integers:
        """The length of each micro-batch, rounded up to a multiple: (global batches, micro-batches)."""
        return -(-self.longest // multiple) * multiple

    def padding(self, multiple: int) -> float:
        """The share of all tokens that is padding."""
        return 1 - float(self.tokens.sum()) / float((self.padded_to(multiple) * self.samples).sum())


def draw(lengths: Lengths, *, batch_size: int, micro_batches: int, order: str, seed: int = 0) -> DrawnBatches:
    """Global batches of the dataset in this order, at least `FEWEST_STEPS` of them. Raises `JobError` for a
    dataset that has fewer samples than a global batch."""
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
    """The lengths (samples,) of a random order, as `get_length_grouped_indices` puts them: sorted within
    pieces of `together` global batches, the longest of all exchanged with the first."""
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
    """Every sample's length (samples,); of a dataset too large for that, a random part that holds the
    longest."""
    import numpy as np

    tokens, samples = np.array(lengths.counts, dtype=np.int64).T
    most = max(MOST_SAMPLES, batch_size)
    if lengths.samples <= most:
        all_of_them: Integers = np.repeat(tokens, samples)
        return all_of_them
    part: Integers = random.choice(tokens, size=most, p=samples / samples.sum())
    part[0] = lengths.longest
    return part
