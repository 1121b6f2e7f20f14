"""From what a user calls a dataset to samples and batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.job.job import Task
from snugfit.step.batches import collate as stacked
from snugfit.training.collate import Collate
from snugfit.training.rows import read_rows
from snugfit.training.run import Data
from snugfit.training.samples import Samples, samples_of
from snugfit.training.tokens import load_tokenizer, padding_token

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.training.options import TrainOptions

Source = str | os.PathLike[str] | Sequence[Mapping[str, Any]]
"""A path, rows in memory, or samples."""


READY_MADE = (Task.IMAGE_CLASSIFICATION, Task.SPEECH_TO_TEXT, Task.CUSTOM)
"""Tasks whose samples in memory are what the model takes, tensors of one shape, and are stacked."""


def data_of(
    source: Source,
    job: Job,
    tokenizer: Any | None,
    *,
    columns: Mapping[str, str] | None,
    pack: bool,
    collate: Callable[[list[Any]], dict[str, Any]] | None,
    options: TrainOptions,
    like: Data | None = None,
) -> Data:
    """The samples of `source`, and how they become batches. With `like`, the data that is trained on, classes
    keep the order that they have there."""
    if collate is None and job.task in READY_MADE and not isinstance(source, str | os.PathLike):
        collate = stacked
    if collate is not None:
        samples = _given(source)
        if options.train_sampling_strategy == "group_by_length":
            raise UsageError(
                "group_by_length needs the lengths of samples; with a collate of one's own there are none."
            )
        return Data(samples=samples, collate=collate)
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = load_tokenizer(tokenizer)
    if isinstance(source, Samples):
        samples = source
    else:
        names = like.samples.label_names if like is not None and isinstance(like.samples, Samples) else ()
        rows = read_rows(source, columns=columns)
        samples = samples_of(rows, job, tokenizer, pack=pack, label_names=names, seed=options.order_seed)
    made = Collate(job, padding_token(job, tokenizer), pad_to_multiple_of=options.pad_to_multiple_of)
    return Data(samples=samples, collate=made, lengths=samples.lengths.tolist())


def _given(source: Source) -> Sequence[Mapping[str, Any]]:
    """Samples that somebody else makes: anything with a length and places."""
    if isinstance(source, str | os.PathLike) or not all(
        hasattr(source, n) for n in ("__len__", "__getitem__")
    ):
        raise UsageError(
            f"The dataset is {source!r:.80}; for this task, or with a collate of one's own, it is a map-style"
            " one: len(dataset), and dataset[index] a sample as the model takes it."
        )
    if not len(source):
        raise UsageError("The dataset is empty.")
    return source
