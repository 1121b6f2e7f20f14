"""Samples of one or several token sequences, encoded once at the start, and their batches.

{"input_ids": [...], "start_positions": 3, "end_positions": 5}
{"input_ids": [[...], [...]], "label": 1}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, final

from snugfit.data.indexed import IndexedSamples, Sample

if TYPE_CHECKING:
    import numpy as np
    import torch

    from snugfit.data.collate import Collate
    from snugfit.data.ragged import Ragged


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceSamples(IndexedSamples):
    """A dataset whose samples each have the same number of token sequences."""

    inputs: Ragged
    """The token ids of all sequences, sample after sample."""

    types: Ragged | None = None
    """Token types: 1 for each token of a second text, else 0. None for models without token types."""

    sequences: int = 1
    """Number of sequences in a sample, such as its choices."""

    positions: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Integers of each sample, (N) of int64, by the name of the model's argument."""

    pad_token: int
    """The token id that pads sequences."""

    def __len__(self) -> int:
        return len(self.inputs) // self.sequences

    def _sample(self, index: int, epoch: int) -> Sample:
        """Return the sample with this index, the same in every epoch."""
        named = {"input_ids": self.inputs, "token_type_ids": self.types}
        sample: Sample = {name: self._of(part, index) for name, part in named.items() if part is not None}
        numbers = {name: int(values[index]) for name, values in self.positions.items()}
        return {**sample, **numbers, **self.target(index)}

    def _of(self, ragged: Ragged, index: int) -> Any:
        first = index * self.sequences
        lists = [ragged[number] for number in range(first, first + self.sequences)]
        return lists if self.sequences > 1 else lists[0]

    def collate_with(self, targets: Collate) -> SequenceCollate:
        """Return the collate function: it pads all sequences of a batch to one length."""
        return SequenceCollate(replace(targets, pad_token=self.pad_token), self.sequences)


@final
@dataclass(frozen=True)
class SequenceCollate:
    """A picklable collate function from samples of token sequences to the model's batch.

    Token ids are (B, S), or (B, C, S) for C sequences in a sample. Integers of samples are (B).
    """

    tokens: Collate
    """Function that pads sequences, and batches classes."""

    sequences: int
    """Number of sequences in a sample."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        first = samples[0]
        names = [name for name in ("input_ids", "token_type_ids") if name in first]
        if self.sequences == 1:
            batch = self.tokens.inputs(samples)
        else:
            lists = (chain.from_iterable(sample[name] for sample in samples) for name in names)
            flat = [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
            padded = self.tokens.inputs(flat)
            batch = {name: value.view(len(samples), self.sequences, -1) for name, value in padded.items()}
        if "label" in first:
            batch["labels"] = self.tokens.labels(samples, 0)
        for name in first.keys() - {*names, "label"}:
            batch[name] = torch.tensor([sample[name] for sample in samples])
        return batch
