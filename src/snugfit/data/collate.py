"""Samples to one host batch: lists of any length to rectangles of int64, B samples by S tokens.

S is the longest sample of the micro-batch, rounded up where the kernels like multiples, and never more than
the job's sequence length: that is what the recipe was planned for. Padded on the right, with the padding
token, type 0, label -100, and an attention mask that is there only where something is padded: without one,
attention takes its fastest kernel.

Apart from that a batch is the one of transformers' collators, and a test holds it to them. They themselves
need a tokenizer, which rows of token ids have none of, pad on the side that it is set to, and know no longest
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import UsageError
from snugfit.job.batch import IGNORED
from snugfit.job.inputs import has_target
from snugfit.job.job import Job

if TYPE_CHECKING:
    import numpy as np
    import torch


@final
@dataclass(frozen=True)
class Collate:
    """A picklable function from samples of tokens (`samples.py`) to the batch that a model takes."""

    job: Job
    """Its task says what a label is, its lengths how long a batch may be."""

    pad_token: int
    """The token that sequences are padded with."""

    pad_to_multiple_of: int | None = field(default=None, kw_only=True)
    """Lengths are rounded up to multiples of it."""

    def __post_init__(self) -> None:
        multiple = self.pad_to_multiple_of
        if multiple is not None and (not isinstance(multiple, int) or multiple < 1):
            raise UsageError(
                f"pad_to_multiple_of is {multiple!r}; it must be a whole number from 1, or None."
            )

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        lists = [sample["input_ids"] for sample in samples]
        length = self._length(lists, self.job.sequence_length)
        batch = {"input_ids": torch.from_numpy(_pad(lists, length, self.pad_token))}
        if any(len(ids) < length for ids in lists):
            mask = _pad([[1] * len(ids) for ids in lists], length, 0)
            batch["attention_mask"] = torch.from_numpy(mask)
        if "token_type_ids" in samples[0]:
            types = [sample["token_type_ids"] for sample in samples]
            batch["token_type_ids"] = torch.from_numpy(_pad(types, length, 0))
        batch["labels"] = self.labels(samples, length)
        return batch

    def labels(self, samples: Sequence[Mapping[str, Any]], length: int) -> torch.Tensor:
        """The labels of a batch whose inputs have `length` tokens: (B) of classes or numbers, (B, S) of
        tokens, or (B, T) of target tokens, which have a length of their own."""
        import torch

        if "label" in samples[0]:
            regression = self.job.labels == 1
            kind = torch.float32 if regression else torch.int64
            return torch.tensor([sample["label"] for sample in samples], dtype=kind)
        lists = [sample["labels"] for sample in samples]
        if has_target(self.job.task):
            length = self._length(lists, self.job.target_length)
        return torch.from_numpy(_pad(lists, length, IGNORED))

    def _length(self, lists: Sequence[Sequence[int]], most: int) -> int:
        longest = max(map(len, lists))
        if longest > most:
            raise UsageError(f"A sample of {longest} tokens, but the job was planned for at most {most}.")
        multiple = self.pad_to_multiple_of or 1
        return min(-(-longest // multiple) * multiple, most)


def _pad(lists: Sequence[Sequence[int]], length: int, fill: int) -> np.ndarray:
    """B lists as rows of one length, (B, S)."""
    import numpy as np

    padded = np.full((len(lists), length), fill, dtype=np.int64)
    for row, values in zip(padded, lists, strict=True):
        row[: len(values)] = values
    return padded
