"""Random batches of a dataset's sample lengths: their padded length and their fraction of padding.

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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError

if TYPE_CHECKING:
    import numpy as np

    from snugfit.features.lengths.dataset import Lengths

    Integers = np.ndarray[Any, np.dtype[np.int64]]

ORDERS = ("fixed", "random", "grouped")
MULTIPLES = (1, 8, 64)
"""Multiples to which lengths are rounded up (`pad_to_multiple_of`): none, tensor cores' 16 bytes, and
tiles."""

FEWEST_STEPS = 256
"""Least number of global batches that are drawn; small datasets are repeated."""

MOST_SAMPLES = 1 << 18
"""Greatest number of samples that are drawn from a dataset. A larger batch raises it."""

MEGABATCHES = 50
"""Greatest number of global batches that are sorted together: transformers' own figure."""


@dataclass(frozen=True)
class DrawnBatches:
    """Sequence lengths of the micro-batches in many global batches, in the drawn order. The arrays are
    (global batches, micro-batches in each).
    """

    longest: Integers
    """Tokens of the longest sample."""

    shortest: Integers
    """Tokens of the shortest sample."""

    tokens: Integers
    """Tokens of all samples without padding."""

    samples: int
    """Number of samples in one micro-batch."""

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
        all_of_them: Integers = np.repeat(tokens, samples)
        return all_of_them
    part: Integers = random.choice(tokens, size=most, p=samples / samples.sum())
    part[0] = lengths.longest
    return part
