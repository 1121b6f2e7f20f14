"""Samples of pictures and sound: labels and texts are read at the start, media when a sample is asked for.

A dataset of tokens lies in memory as a whole; one of pictures would not. So what a run keeps of it is one
label or text to each row, and where the rest lies. A picture or sound is decoded in whatever worker makes the
batch, alone, and always to the same numbers. That a file is there at all is looked at before the first step,
that it can be decoded when its turn comes; the first sample is made at once, so that a processor that does
not fit the model is told at the start.

    {"pixel_values": (C, H, W), "label": 3}
    {"input_features": (M, F), "labels": [...]}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from snugfit.data.by_place import ByPlace, Sample
from snugfit.data.columns import columns_of
from snugfit.data.encoding import ROWS_AT_ONCE
from snugfit.data.labels import class_numbers, measures, one_order
from snugfit.data.media_files import Entry, path_in
from snugfit.data.pictures import Pictures
from snugfit.data.processors import described
from snugfit.data.ragged import Filling, Ragged
from snugfit.data.samples import refuse_unknown_tokens
from snugfit.data.sounds import Sounds
from snugfit.data.tokens import Tokenizer
from snugfit.errors import JobError, UsageError
from snugfit.job.batch import synthetic
from snugfit.job.job import Job, Task

if TYPE_CHECKING:
    import numpy as np

    from snugfit.data.rows import Rows

RATE = "sampling_rate"
"""A column that says so of arrays in another."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaSamples(ByPlace):
    """A dataset of pictures or sound, picklable and without a state."""

    media: Rows
    """The rows, with no more columns than are needed to make a sample."""

    column: str
    """Of the media."""

    maker: Pictures | Sounds
    """Makes one sample's input of it."""

    label: np.ndarray | None = None
    """One to each sample."""

    labels: Ragged | None = None
    """Tokens of what is said, to each sample."""

    label_names: tuple[str, ...] = ()
    """Of the classes, in order."""

    cut: int = 0
    """Texts that were too long."""

    cut_tokens: int = 0
    """Tokens that they lost."""

    notes: tuple[str, ...] = field(default=())
    """What somebody who trains on this should be told."""

    def __len__(self) -> int:
        return len(self.media)

    def _made(self, index: int, epoch: int) -> Sample:
        """The same in every epoch."""
        entry, row = self._entry(index)
        if isinstance(self.maker, Sounds):
            made: Any = self.maker.made(entry, row.get(RATE))
        else:
            made = self.maker.made(entry)
        return {self.maker.name: made, **self._asked(index)}

    def checksum(self, index: int) -> bytes:
        """Of what this sample is made of, without making it."""
        told = hashlib.sha256(self.maker.seen(self._entry(index)[0]))
        told.update(json.dumps([self._asked(index), described(self.maker)], default=str).encode())
        return told.digest()

    def _asked(self, index: int) -> Sample:
        if self.label is not None:
            return {"label": self.label[index].item()}
        return {"labels": self.labels[index]} if self.labels is not None else {}

    def _entry(self, index: int) -> tuple[Entry, Mapping[str, Any]]:
        row = self.media[index]
        value = self.media.value(row, self.column, index)
        entry = Entry(value=value, where=self.media.where(index), home=self.media.folder_of(index))
        return entry, row


def media_samples(
    rows: Rows,
    job: Job,
    processor: Any,
    tokenizer: Any | None = None,
    *,
    label_names: Sequence[str] = (),
) -> MediaSamples:
    """The rows as samples of a job on pictures or sound. Raises `UsageError` that names the row.

    `processor` is transformers' image processor or feature extractor; `tokenizer` is that of the texts that
    sounds say. `label_names` is the order of classes in the split that is trained on, for one that is
    evaluated.
    """
    columns = columns_of(rows, job)
    column = columns["image" if "image" in columns else "audio"]
    media = rows.select_columns({column} | ({RATE} & {*rows.columns}))
    made = dict[str, Any](media=media, column=column, notes=tuple(rows.notes()))
    _refuse_missing(media, column)
    if job.task is Task.IMAGE_CLASSIFICATION:
        asked = rows.select_columns({columns["label"]})
        samples = MediaSamples(
            **made, maker=_pictures(job, processor), **_classes(asked, columns, job, label_names)
        )
    else:
        asked = rows.select_columns({columns["text"]})
        samples = MediaSamples(
            **made, maker=_sounds(job, processor), **_texts(asked, columns["text"], job, tokenizer)
        )
    samples.sample(0)
    return samples


def _refuse_missing(media: Rows, column: str) -> None:
    """Where the first row names a file and does not hold it, those of all rows must be there."""
    if path_in(media.value(media[0], column, 0), media.folder_of(0)) is None:
        return
    for index, row in enumerate(media):
        value, home = media.value(row, column, index), media.folder_of(index)
        path = path_in(value, home)
        if path is not None and not os.path.isfile(path):
            raise Entry(value=value, where=media.where(index), home=home).missing()


def _pictures(job: Job, processor: Any) -> Pictures:
    shape = tuple(synthetic(job, 1)["pixel_values"].shape[1:])
    return Pictures(processor=processor, channels=shape[0], shape=shape)


def _sounds(job: Job, extractor: Any) -> Sounds:
    if getattr(extractor, "dither", 0.0):
        raise UsageError(
            f"The feature extractor has dither: {extractor.dither}, which adds other noise at every start."
            " Set it to 0.0 in preprocessor_config.json."
        )
    try:
        shape = tuple(synthetic(job, 1)["input_features"].shape[1:])
    except JobError:  # a model that hears sounds of any length
        return Sounds(extractor=extractor, shape=None)
    return Sounds(extractor=extractor, shape=shape)


def _classes(
    rows: Rows, columns: Mapping[str, str], job: Job, label_names: Sequence[str]
) -> Mapping[str, Any]:
    """The class of each row, or the number of a regression."""
    column = columns["label"]
    values = [rows.value(row, column, index) for index, row in enumerate(rows)]
    if job.labels == 1:
        return {"label": measures(values, rows.where)}
    own = rows.class_names(column)
    named = bool(label_names) and all(isinstance(value, str) for value in values)
    known = tuple(label_names) if named else one_order(label_names, own, rows.source)
    numbers, names = class_numbers(values, rows.where, labels=job.labels, names=known)
    return {"label": numbers, "label_names": names}


def _texts(rows: Rows, column: str, job: Job, tokenizer: Any | None) -> Mapping[str, Any]:
    """The tokens of each row's text. The decoder's start token is left out where a tokenizer writes it: the
    model puts it there itself."""
    if tokenizer is None:
        raise UsageError(f"{rows.source}: what is said is text, and there is no tokenizer. Give one.")
    words, config = Tokenizer(tokenizer), job.transformers_config()
    start = getattr(config, "decoder_start_token_id", None)
    begun = start is not None and words.tokens(targets=["a"], limit=None)[0].ids[:1] == [start]
    filled, cut, lost = Filling(), 0, 0
    numbered = enumerate(rows)
    while chunk := list(islice(numbered, ROWS_AT_ONCE)):
        texts = [rows.text(row, column, index) for index, row in chunk]
        for made in words.tokens(targets=texts, limit=job.target_length + begun):
            filled.append(made.ids[int(begun) :])
            cut, lost = cut + (made.cut > 0), lost + made.cut
    labels = filled.done()
    if (empty := labels.lengths == 0).any():
        raise UsageError(
            f"{rows.where(int(empty.argmax()))}: {column!r} is empty; there is nothing to learn."
        )
    refuse_unknown_tokens(labels, config.get_text_config().vocab_size, job, rows.where)
    return {"labels": labels, "cut": cut, "cut_tokens": lost}
