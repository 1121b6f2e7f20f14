"""Collation of samples into one host batch: lists of any length become int64 tensors of B samples by S
tokens.

S is the length of the longest sample of the micro-batch, rounded up to the multiple that kernels prefer. S is
never more than the job's sequence length, because the recipe was planned for that length. Padding is on the
right, with the padding token, type 0 and label -100. A batch has an attention mask only if it has padding:
without a mask, attention uses its fastest kernel.

Otherwise a batch equals that of transformers' collators, and a test compares the two. Those collators need a
tokenizer, which rows of token ids do not have. They pad on the side that the tokenizer is set to, and have no
limit on the length.
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
    """A picklable function from samples of tokens (`samples.py`) to the model's batch."""

    job: Job
    """The training job. Its task determines the kind of labels, and its sequence lengths limit those of a
    batch."""

    pad_token: int
    """The token id that pads sequences."""

    pad_to_multiple_of: int | None = field(default=None, kw_only=True)
    """The length of a batch is rounded up to a multiple of this number of tokens."""

    def __post_init__(self) -> None:
        multiple = self.pad_to_multiple_of
        if multiple is not None and (not isinstance(multiple, int) or multiple < 1):
            raise UsageError(
                f"pad_to_multiple_of is {multiple!r}; it must be a whole number from 1, or None."
            )

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.inputs(samples)
        return {**batch, "labels": self.labels(samples, batch["input_ids"].shape[1])}

    def inputs(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the padded token ids of samples, (B, S), with their attention mask and token types."""
        import torch

        lists = [sample["input_ids"] for sample in samples]
        length = self.length(lists, self.job.sequence_length)
        batch = {"input_ids": torch.from_numpy(pad_rows(lists, length, self.pad_token))}
        if any(len(ids) < length for ids in lists):
            mask = pad_rows([[1] * len(ids) for ids in lists], length, 0)
            batch["attention_mask"] = torch.from_numpy(mask)
        if "token_type_ids" in samples[0]:
            types = [sample["token_type_ids"] for sample in samples]
            batch["token_type_ids"] = torch.from_numpy(pad_rows(types, length, 0))
        return batch

    def labels(self, samples: Sequence[Mapping[str, Any]], length: int) -> torch.Tensor:
        """Return the labels of a batch with inputs of `length` tokens.

        Their shape is (B) for classes or numbers, (B, S) for labels of tokens, and (B, T) for target tokens.
        T is the padded length of the targets.
        """
        import torch

        if "label" in samples[0]:
            regression = self.job.labels == 1
            # transformers' regression loss is the mean squared error, which needs float labels.
            kind = torch.float32 if regression else torch.int64
            return torch.tensor([sample["label"] for sample in samples], dtype=kind)
        lists = [sample["labels"] for sample in samples]
        if has_target(self.job.task):
            length = self.length(lists, self.job.target_length)
        return torch.from_numpy(pad_rows(lists, length, IGNORED))

    def length(self, lists: Sequence[Sequence[int]], most: int) -> int:
        """Return the length of a batch with these lists of tokens. Raises `UsageError` for more than `most`
        tokens.
        """
        longest = max(map(len, lists))
        if longest > most:
            raise UsageError(
                f"A sample of {longest} tokens, but the job was planned for at most {most}. Cut it, or "
                "set a longer sequence length."
            )
        multiple = self.pad_to_multiple_of or 1
        return min(-(-longest // multiple) * multiple, most)


def pad_rows(lists: Sequence[Sequence[int]], length: int, fill: int) -> np.ndarray:
    """Return B lists as rows of one length, (B, S)."""
    import numpy as np

    padded = np.full((len(lists), length), fill, dtype=np.int64)
    for row, values in zip(padded, lists, strict=True):
        row[: len(values)] = values
    return padded
