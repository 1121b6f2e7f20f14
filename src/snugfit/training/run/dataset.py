"""Conversion of a user's dataset argument to samples and batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.data.collate import Collate
from snugfit.data.columns import INPUTS
from snugfit.data.indexed import IndexedSamples
from snugfit.data.row_sources import read_rows
from snugfit.data.samples import Samples, samples_of
from snugfit.data.tokens import as_tokenizer, padding_token
from snugfit.errors import UsageError, one_line
from snugfit.job.job import Task
from snugfit.step.batches import collate as stack_tensors
from snugfit.techniques.registry import hooks
from snugfit.training.run.run import Data

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.training.options import TrainOptions

Source = str | os.PathLike[str] | Sequence[Mapping[str, Any]]
"""The type of a user's dataset: a path, a sequence of rows, or a sequence of samples."""

PREPARED = {"pixel_values", "input_features", "input_values"}
"""Keys that image and audio processors put into samples. A sample with one of them needs no further
preparation."""


def data_of(
    source: Source,
    job: Job,
    tokenizer: Any | None,
    *,
    columns: Mapping[str, str] | None,
    pack: bool,
    collate: Callable[[list[Any]], dict[str, Any]] | None,
    options: TrainOptions,
    processor: Any | None = None,
    like: Data | None = None,
) -> Data:
    """Return the samples of `source` with their collate function. Raises `UsageError`.

    `like` is the training data: an evaluation split takes its order of classes from there.
    """
    if collate is None and _is_prepared(source, job):
        collate = stack
        stack([_map_style(source)[0]])  # raises errors before the run begins
    names = getattr(like.samples, "label_names", ()) if like is not None else ()
    if collate is None and isinstance(source, IndexedSamples):
        return _with_collate(source, job, tokenizer, options)
    if collate is None:
        rows = read_rows(source, columns=columns)
        read_options: dict[str, Any] = {"pack": pack, "label_names": names}
        answers = (read(rows, job, processor, tokenizer, **read_options) for read in hooks("read_samples"))
        samples: IndexedSamples | None = next((answer for answer in answers if answer is not None), None)
        if samples is None:
            tokenizer = as_tokenizer(tokenizer)
            samples = samples_of(rows, job, tokenizer, seed=options.order_seed, **read_options)
        return _with_collate(samples, job, tokenizer, options)
    if options.train_sampling_strategy == "group_by_length":
        raise UsageError(
            "group_by_length needs the lengths of samples, which are not known with your own collate "
            "function. Leave one of them out."
        )
    return Data(samples=_map_style(source), collate=collate)


def _with_collate(samples: IndexedSamples, job: Job, tokenizer: Any | None, options: TrainOptions) -> Data:
    """Return the samples together with the collate function that fits their type."""
    pad_token, lengths = 0, None
    if isinstance(samples, Samples):
        pad_token, lengths = padding_token(job, as_tokenizer(tokenizer)), samples.lengths.tolist()
    elif options.train_sampling_strategy == "group_by_length":
        raise UsageError(
            f"group_by_length is for samples of tokens. Those of {job.task} have no lengths here. Leave "
            "it out."
        )
    collate = samples.collate_with(Collate(job, pad_token, pad_to_multiple_of=options.pad_to_multiple_of))
    notes = (*samples.notes, *_notes_on_rows(samples, job))
    return Data(samples=samples, collate=collate, lengths=lengths, notes=notes)


def _notes_on_rows(samples: IndexedSamples, job: Job) -> Iterator[str]:
    """Yield notes for the user on dataset rows that were truncated or omitted, or are less than a batch."""
    if len(samples) < job.batch_size:
        yield f"Each batch has all {len(samples):,} samples of the data, and not {job.batch_size:,}."
    if samples.cut:
        yield (
            f"{samples.cut:,} samples were too long: {samples.cut_tokens:,} of their tokens were cut "
            "off. A longer sequence length keeps more."
        )
    if samples.left_out:
        yield f"{samples.left_out:,} rows were left out, because there is nothing to learn in them."


def stack(samples: list[Any]) -> dict[str, Any]:
    """Collate prepared samples into one batch. Raises `UsageError` if that is impossible.

    Labels that are numbers, arrays and lists become tensors, fp32 if they have a fraction. Any other number,
    a switch, a name or None stays as it is, and must be equal in all samples.
    """
    import torch

    try:
        tensors = [{name: _as_tensor(name, value) for name, value in sample.items()} for sample in samples]
        batch: dict[str, Any] = stack_tensors(tensors)
        for name, value in tensors[0].items():
            if not isinstance(value, torch.Tensor) and any(other[name] != value for other in tensors):
                raise ValueError(f"{name} is not a tensor, and differs between samples")
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as fault:
        raise UsageError(
            f"Samples cannot be stacked into a batch: {one_line(fault)}. A sample must map the model's "
            "arguments to tensors, each with the same shape in all samples. For anything else give "
            "collate=function."
        ) from None
    return batch


def _as_tensor(name: str, value: Any) -> Any:
    import numpy as np
    import torch

    if isinstance(value, list | tuple):
        value = np.asarray(value)
    is_label = name.startswith("label") and isinstance(value, int | float)
    if not is_label and not (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf"):
        return value
    tensor = torch.as_tensor(value)
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def _is_prepared(source: Source, job: Job) -> bool:
    """Return True if the samples are in memory and are the model's inputs already: tensors of equal
    shapes.
    """
    if isinstance(source, str | os.PathLike | IndexedSamples):
        return False
    if job.task in (*INPUTS, Task.CUSTOM):
        return job.task is Task.CUSTOM
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__") or not len(source):
        return False
    names = getattr(source, "column_names", None) or source[0]  # the first row may be slow to decode
    return isinstance(names, Mapping | list) and not PREPARED.isdisjoint(names)


def _map_style(source: Source) -> Sequence[Mapping[str, Any]]:
    """Return `source` if it is a map-style dataset in memory, with a length and indices. Raises `UsageError`
    otherwise.
    """
    if isinstance(source, str | os.PathLike) or not all(
        hasattr(source, n) for n in ("__len__", "__getitem__")
    ):
        raise UsageError(
            f"The dataset is {source!r:.80}. For this task, or with your own collate function, it must be "
            "a map-style dataset: len(dataset), and dataset[index] is a sample with the model's arguments."
        )
    if not len(source):
        raise UsageError("The dataset is empty.")
    return source
