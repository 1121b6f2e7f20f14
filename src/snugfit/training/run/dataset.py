"""From what a user calls a dataset to samples and batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.data.collate import Collate, MediaCollate
from snugfit.data.media import MediaSamples, media_samples
from snugfit.data.processors import has_processor, load_processor, own_folder
from snugfit.data.row_sources import read_rows
from snugfit.data.rows import Rows
from snugfit.data.samples import Samples, samples_of
from snugfit.data.tokens import load_tokenizer, padding_token
from snugfit.errors import UsageError, one_line
from snugfit.job.job import Task
from snugfit.job.media import hears_in_place_of_tokens
from snugfit.step.batches import collate as stack_tensors
from snugfit.training.run.run import Data

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.training.options import TrainOptions

Source = str | os.PathLike[str] | Sequence[Mapping[str, Any]]
"""A path, rows in memory, or samples."""

MEDIA = (Task.IMAGE_CLASSIFICATION, Task.SPEECH_TO_TEXT)
"""Tasks whose inputs are made by a processor."""

PREPARED = {"pixel_values", "input_features", "input_values"}
"""What processors call what they make: a sample in memory that has one of them is what the model takes."""


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
    """The samples of `source`, and how they become batches. With `like`, the data that is trained on, classes
    keep the order that they have there. Raises `UsageError`."""
    if collate is None and _is_prepared(source, job):
        collate = stack
        stack([_map_style(source)[0]])  # what cannot be stacked is told before the run begins
    names = getattr(like.samples, "label_names", ()) if like is not None else ()
    if collate is None and isinstance(source, Samples | MediaSamples):
        return _with_collate(source, job, tokenizer, options)
    if collate is None:
        rows = read_rows(source, columns=columns)
        if job.task in MEDIA:
            return _with_collate(
                _media(rows, job, processor, tokenizer, pack, names), job, tokenizer, options
            )
        tokenizer = _tokenizer(tokenizer)
        samples = samples_of(rows, job, tokenizer, pack=pack, label_names=names, seed=options.order_seed)
        return _with_collate(samples, job, tokenizer, options)
    if options.train_sampling_strategy == "group_by_length":
        raise UsageError(
            "group_by_length needs the lengths of samples, which are not known with your own collate "
            "function."
        )
    return Data(samples=_map_style(source), collate=collate)


def _with_collate(
    samples: Samples | MediaSamples, job: Job, tokenizer: Any | None, options: TrainOptions
) -> Data:
    """The samples with the collate for their kind."""
    multiple, notes = options.pad_to_multiple_of, (*samples.notes, *_notes_on_cuts(samples))
    if isinstance(samples, Samples):
        tokens = Collate(job, padding_token(job, _tokenizer(tokenizer)), pad_to_multiple_of=multiple)
        return Data(samples=samples, collate=tokens, lengths=samples.lengths.tolist(), notes=notes)
    if options.train_sampling_strategy == "group_by_length":
        raise UsageError("group_by_length is for samples of tokens. Images and audio have no lengths here.")
    collate = MediaCollate(
        preprocessor=samples.preprocessor, targets=Collate(job, 0, pad_to_multiple_of=multiple)
    )
    return Data(samples=samples, collate=collate, notes=notes)


def _media(
    rows: Rows, job: Job, processor: Any | None, tokenizer: Any | None, pack: bool, names: Sequence[str]
) -> MediaSamples:
    """Through the processor that was given; else that of the tokenizer's folder, or of the model's own."""
    if pack:
        raise UsageError(f"Packing joins texts, but the task {job.task} has none. Leave packing out.")
    sources = (processor, tokenizer if has_processor(tokenizer, job) else None, own_folder(job))
    chosen = next((source for source in sources if source is not None), None)
    if chosen is None:
        raise UsageError(
            f"{rows.source}: {job.task} needs the model's processor. Give its folder, which has a"
            " preprocessor_config.json: processor=FOLDER, or --processor FOLDER."
        )
    if hears_in_place_of_tokens(job.model.architecture):
        raise UsageError(
            f"{job.model.name} ({job.model.architecture}) takes audio among its tokens, and snugfit cannot "
            "make such batches from a dataset. Give samples that its processor made, or use snugfit.fit."
        )
    loaded = load_processor(chosen, job)
    if job.task is not Task.SPEECH_TO_TEXT:
        return media_samples(rows, job, loaded, label_names=names)
    words = tokenizer if tokenizer is not None else _tokenizer_of(chosen)
    return media_samples(rows, job, loaded, _tokenizer(getattr(words, "tokenizer", words)))


def _tokenizer_of(processor: Any) -> Any | None:
    """The tokenizer that is in the processor's folder, or is a part of it."""
    if isinstance(processor, str | os.PathLike):
        return processor
    return getattr(processor, "tokenizer", None)


def _tokenizer(given: Any | None) -> Any | None:
    if given is not None and not callable(given) and not isinstance(given, str | os.PathLike):
        raise UsageError(f"tokenizer is {given!r:.80}; it must be transformers' tokenizer, or its folder.")
    return load_tokenizer(given) if isinstance(given, str | os.PathLike) else given


def _notes_on_cuts(samples: Samples | MediaSamples) -> Iterator[str]:
    """What the samples have lost of their rows, for who trains on them."""
    if samples.cut:
        yield (f"{samples.cut:,} samples were too long: {samples.cut_tokens:,} of their tokens were cut off.")
    if samples.left_out:
        yield f"{samples.left_out:,} rows were left out, because there is nothing to learn in them."


def stack(samples: list[Any]) -> dict[str, Any]:
    """Samples as the model takes them as one batch. Labels that are numbers, arrays and lists become tensors,
    fp32 where they have a fraction; any other number, a switch, a name, None are passed on and are the same
    in all samples. Raises `UsageError` for what cannot be stacked."""
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
    """Whether samples in memory are what the model takes, tensors of one shape, which are stacked."""
    if isinstance(source, str | os.PathLike | MediaSamples):
        return False
    if job.task not in MEDIA:
        return job.task is Task.CUSTOM
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__") or not len(source):
        return False
    names = getattr(source, "column_names", None) or source[0]  # a first row may have to be decoded
    return isinstance(names, Mapping | list) and not PREPARED.isdisjoint(names)


def _map_style(source: Source) -> Sequence[Mapping[str, Any]]:
    """Samples that somebody else makes: anything with a length and places."""
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
