"""Samples of pictures and sounds. Labels and texts are read at the start, picture and sound files when a
sample is loaded.

A dataset of tokens is held in memory as a whole; one of pictures would not fit. So only the label or text of
each row, and the path of its file, are in memory. The loader's worker decodes a picture or sound, always to
the same numbers. The existence of files is checked before the first step, and a decoding error appears when
the sample is loaded. The first sample is built at once, so a processor with a wrong shape for the model fails
at the start.

    {"pixel_values": (C, H, W), "label": 3}
    {"input_features": (M, F), "labels": [...]}      M mel bands by F frames, or "input_values": (samples)

**Processors.** Loading of the model's image processor or feature extractor, and its settings for a checksum.

The processor is loaded from a folder or the hub's cache, like a tokenizer (`tokens.py`). Image processors
have several implementations that differ in the last bits. The implementation that needs only Pillow is used,
so that a run is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from snugfit.data.columns import columns_of
from snugfit.data.encoding import ROWS_AT_ONCE
from snugfit.data.indexed import IndexedSamples, Sample
from snugfit.data.labels import class_numbers, one_order, regression_values
from snugfit.data.pretrained import load_pretrained
from snugfit.data.ragged import RaggedBuilder
from snugfit.data.samples import refuse_unknown_tokens
from snugfit.data.tokens import Tokenizer, as_tokenizer
from snugfit.errors import UsageError
from snugfit.features.media.files import MediaEntry, path_in
from snugfit.features.media.inputs import has_sound_embeddings, pixels, sound, sound_of_encoder, video
from snugfit.features.media.picture_text_samples import INPUTS as _PICTURE_TEXTS
from snugfit.features.media.picture_text_samples import picture_text_samples
from snugfit.features.media.pictures import PicturePreprocessor
from snugfit.features.media.sounds import SoundPreprocessor
from snugfit.features.media.tasks import (
    CTC,
    PICTURE_TEXTS,
    PICTURES,
    SEGMENTATION,
    SOUND_CLASSES,
    SOUNDS,
    VIDEOS,
)
from snugfit.features.media.videos import VideoPreprocessor
from snugfit.job.inputs import has_seconds, has_target
from snugfit.job.job import Job, Task
from snugfit.job.weights import own_folder as folder_of_model
from snugfit.user_files import user_path

if TYPE_CHECKING:
    import torch

    from snugfit.data.collate import Collate
    from snugfit.data.rows import Rows


Preprocessor = PicturePreprocessor | VideoPreprocessor | SoundPreprocessor
"""Type of an object that computes a sample's input from a column."""

INPUTS = {
    Task(PICTURES.name): (("image",),),
    Task(SEGMENTATION.name): (("image", "segmentation_map"),),
    Task(VIDEOS.name): (("video",),),
    Task(SOUNDS.name): (("audio", "text"),),
    Task(CTC.name): (("audio", "text"),),
    Task(SOUND_CLASSES.name): (("audio",),),
}
"""Roles of the columns that each task reads, as `data/columns.py` has them for tasks on text."""

TASKS = {*INPUTS, *_PICTURE_TEXTS}
"""Tasks whose datasets this feature reads."""

_AUDIO = ("audio", "file_name", "audio_path", "path", "file")

USUAL = {
    ("image",): (("image",), ("img",), ("file_name",), ("image_path",), ("path",), ("file",)),
    ("image", "segmentation_map"): tuple(product(
        ("image", "img", "file_name", "image_path", "pixel_values"),
        ("segmentation_map", "annotation", "mask", "label", "labels", "semantic_segmentation"),
    )),
    ("video",): (("video",), ("file_name",), ("video_path",), ("path",), ("file",), ("frames",)),
    ("audio",): tuple((name,) for name in _AUDIO),
    ("audio", "text"): tuple(product(
        _AUDIO,
        ("text", "sentence", "transcription", "transcript", "normalized_text"),
    )),
}  # fmt: skip
"""Usual column names, by roles."""

LABELS = {
    Task(PICTURES.name): ("label", "labels", "class", "category", "fine_label"),
    Task(VIDEOS.name): ("label", "labels", "class", "category", "action"),
    Task(SOUND_CLASSES.name): ("label", "labels", "class", "category", "intent_class", "genre", "emotion"),
}
"""Usual names of the label's column, by task."""

RATE = "sampling_rate"
"""Name of the column with the samples per second of sounds that are arrays."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaSamples(IndexedSamples):
    """A dataset of pictures or sounds. Each sample has a class, a number, or the tokens of the spoken
    text.
    """

    media: Rows
    """Rows of the dataset, with only the columns of a sample."""

    column: str
    """Name of the column of pictures or sounds."""

    map_column: str = ""
    """Name of the column of segmentation maps; empty for other tasks."""

    classes: int = 0
    """Number of classes of a segmentation map's pixels."""

    preprocessor: Preprocessor
    """Object that computes a sample's input from that column."""

    def __len__(self) -> int:
        return len(self.media)

    def _sample(self, index: int, epoch: int) -> Sample:
        """Return the sample with this index as the model's input and its label, the same in every epoch."""
        entry = self._entry(self.media[index], index)
        if self.map_column and isinstance(self.preprocessor, PicturePreprocessor):
            map_entry = self._entry(self.media[index], index, self.map_column)
            return dict(self.preprocessor.input_and_map(entry, map_entry, self.classes))
        return {self.preprocessor.input_name: self.preprocessor.input_of(entry), **self.target(index)}

    def collate_with(self, targets: Collate) -> MediaCollate:
        """Return the collate function: it batches inputs by the preprocessor, and labels by `targets`."""
        return MediaCollate(preprocessor=self.preprocessor, targets=targets)

    def checksum(self, index: int) -> bytes:
        """Return a checksum of a sample's file, label and processor settings, without building the sample."""
        columns = [name for name in (self.column, self.map_column) if name]
        entries = [self._entry(self.media[index], index, name) for name in columns]
        checksum = hashlib.sha256(b"".join(map(self.preprocessor.raw_bytes, entries)))
        settings = settings_of(self.preprocessor)
        checksum.update(json.dumps([self.target(index), settings], default=str).encode())
        return checksum.digest()

    def _entry(self, row: Mapping[str, Any], index: int, column: str = "") -> MediaEntry:
        return MediaEntry(
            value=self.media.value(row, column or self.column, index),
            rate=row.get(RATE),
            location=self.media.location(index),
            folder=self.media.folder_of(index),
        )


@final
@dataclass(frozen=True, kw_only=True)
class MediaCollate:
    """A picklable collate function from samples of pictures or sound to the model's batch.

    Pictures and sound features of one shape are stacked: (B, C, H, W), (B, M, F). The feature extractor pads
    sounds of several lengths with its own value, and marks the padding in an attention mask.
    """

    preprocessor: Preprocessor
    """Object that computed the samples' inputs, and batches them."""

    targets: Collate
    """Function that batches the samples' labels."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        name = self.preprocessor.input_name
        if isinstance(samples[0].get("labels"), torch.Tensor):  # segmentation maps
            labels = torch.stack([sample["labels"] for sample in samples])
        else:
            labels = self.targets.labels(samples, 0)
        inputs = [torch.as_tensor(sample[name]) for sample in samples]
        # The extractor pads with its own value, and returns a mask of the padding.
        if isinstance(self.preprocessor, SoundPreprocessor) and len({array.shape for array in inputs}) > 1:
            return {**self.preprocessor.pad(inputs), "labels": labels}
        return {name: torch.stack(inputs), "labels": labels}


def read_samples(
    rows: Rows,
    job: Job,
    processor: Any | None,
    tokenizer: Any | None,
    *,
    pack: bool,
    label_names: Sequence[str],
) -> IndexedSamples:
    """Return a dataset's rows as samples, through the given processor, else that in the tokenizer's folder or
    the model's. Raises `UsageError` if there is none.
    """
    if pack:
        raise UsageError(f"Packing joins texts, but the task {job.task} has none. Leave packing out.")
    sources = (processor, tokenizer if has_processor(tokenizer, job) else None, own_folder(job))
    chosen = next((source for source in sources if source is not None), None)
    if chosen is None:
        raise UsageError(
            f"{rows.source}: {job.task} needs the model's processor. Give its folder, which has a"
            " preprocessor_config.json: processor=FOLDER, or --processor FOLDER."
        )
    if has_sound_embeddings(job.model.architecture):
        raise UsageError(
            f"{job.model.name} ({job.model.architecture}) takes audio among its tokens, and snugfit cannot "
            "make such batches from a dataset. Give samples that its processor made, or use snugfit.fit."
        )
    if job.task == PICTURE_TEXTS.name:
        return picture_text_samples(rows, job, chosen)
    loaded = load_processor(chosen, job)
    if not has_target(job.task):
        return media_samples(rows, job, loaded, label_names=label_names)
    words = tokenizer if tokenizer is not None else _tokenizer_of(chosen)
    return media_samples(rows, job, loaded, as_tokenizer(getattr(words, "tokenizer", words)))


def _tokenizer_of(processor: Any) -> Any | None:
    """Return the folder of a processor, which also has its tokenizer, or the processor's attribute
    `tokenizer`.
    """
    if isinstance(processor, str | os.PathLike):
        return processor
    return getattr(processor, "tokenizer", None)


def media_samples(
    rows: Rows,
    job: Job,
    processor: Any,
    tokenizer: Any | None = None,
    *,
    label_names: Sequence[str] = (),
) -> MediaSamples:
    """Return a dataset's rows as samples of a job on pictures or sound.

    `processor` is transformers' image processor or feature extractor; `tokenizer` is for the spoken texts of
    sounds. `label_names` is the order of classes in the training split, for an evaluation split. Raises
    `UsageError` that names the row.
    """
    columns = columns_of(rows, job, INPUTS, USUAL, LABELS)
    column = next(columns[role] for role in ("image", "video", "audio") if role in columns)
    maps = columns.get("segmentation_map", "")
    media = rows.select_columns({column} | ({RATE, maps} & {*rows.columns}))
    for name in filter(None, (column, maps)):
        _refuse_missing(media, name)
    preprocessor = _preprocessor(job, columns, processor)
    targets: Mapping[str, Any]
    if maps:
        targets = {"map_column": maps, "classes": job.labels}
    elif "label" in columns:
        targets = _classes(rows.select_columns({columns["label"]}), columns["label"], job, label_names)
    else:
        targets = _texts(rows.select_columns({columns["text"]}), columns["text"], job, tokenizer)
    notes = tuple(rows.notes())
    samples = MediaSamples(media=media, column=column, preprocessor=preprocessor, notes=notes, **targets)
    # A processor that does not fit the model fails here, rather than in the first step.
    samples.sample(0)
    return samples


def _preprocessor(job: Job, columns: Mapping[str, str], processor: Any) -> Preprocessor:
    """Return the object that converts the samples' pictures, videos or sounds by this processor."""
    if "audio" in columns:
        return _sound_preprocessor(job, processor)
    if "video" in columns:
        shape = video(job.config_to_read())
        return VideoPreprocessor(processor=processor, shape=shape.shape, input_name=shape.name)
    return PicturePreprocessor(processor=processor, shape=pixels(job.config_to_read()))


def _refuse_missing(media: Rows, column: str) -> None:
    """Raise an error if the picture or sound file of any row is missing.

    If the first row contains the file itself, no row is checked.
    """
    if path_in(media.value(media[0], column, 0), media.folder_of(0)) is None:
        return
    for index, row in enumerate(media):
        value, folder = media.value(row, column, index), media.folder_of(index)
        path = path_in(value, folder)
        if path is not None and not os.path.exists(path):
            raise MediaEntry(value=value, location=media.location(index), folder=folder).missing_error()


def _sound_preprocessor(job: Job, extractor: Any) -> SoundPreprocessor:
    if getattr(extractor, "dither", 0.0):
        raise UsageError(
            f"The feature extractor has dither: {extractor.dither}, which adds different noise at every "
            "start. Set it to 0.0 in preprocessor_config.json."
        )
    config = job.config_to_read()
    if has_seconds(job.task):
        # Only Whisper and AST have a fixed number of frames. Sounds of any length are padded in a batch.
        fixed = sound_of_encoder(config, 1.0).shape == sound_of_encoder(config, 2.0).shape
        shape = sound_of_encoder(config, job.seconds).shape if fixed else None
        return SoundPreprocessor(extractor=extractor, shape=shape, seconds=None if fixed else job.seconds)
    sound_input = sound(config)
    shape = (
        sound_input.shape if sound_input and sound_input.name == "input_features" else None
    )  # waves may have any length
    return SoundPreprocessor(extractor=extractor, shape=shape)


def _classes(rows: Rows, column: str, job: Job, label_names: Sequence[str]) -> Mapping[str, Any]:
    """Return the class of each row (or its number for a regression) and the class names, as fields of
    `MediaSamples`.
    """
    values = [rows.value(row, column, index) for index, row in enumerate(rows)]
    if job.labels == 1:
        return {"label": regression_values(values, rows.location)}
    own = rows.class_names(column)
    named = bool(label_names) and all(isinstance(value, str) for value in values)
    known = tuple(label_names) if named else one_order(label_names, own, rows.source)
    numbers, names = class_numbers(values, rows.location, labels=job.labels, names=known)
    return {"label": numbers, "label_names": names}


def _texts(rows: Rows, column: str, job: Job, tokenizer: Any | None) -> Mapping[str, Any]:
    """Return the tokens of each row's spoken text, as fields of `MediaSamples`.

    The decoder's start token is removed if a tokenizer adds it, because the model adds it itself.
    """
    if tokenizer is None:
        raise UsageError(
            f"{rows.source}: the transcripts are text, but no tokenizer was found."
            " Give one: tokenizer=FOLDER, or --tokenizer FOLDER."
        )
    words, config = Tokenizer(tokenizer), job.transformers_config()
    start = getattr(config, "decoder_start_token_id", None)
    # A tokenizer may start a text with the decoder's start token, which the model adds itself.
    begun = start is not None and words.tokens(targets=["a"], limit=None)[0].ids[:1] == [start]
    lists, cut, lost = RaggedBuilder(), 0, 0
    numbered = enumerate(rows)
    while chunk := list(islice(numbered, ROWS_AT_ONCE)):
        texts = [rows.text(row, column, index) for index, row in chunk]
        # The start token does not count towards the limit.
        for tokens in words.tokens(targets=texts, limit=job.target_length + begun):
            lists.append(tokens.ids[int(begun) :])
            cut, lost = cut + (tokens.cut > 0), lost + tokens.cut
    labels = lists.build()
    if (empty := labels.lengths == 0).any():
        raise UsageError(
            f"{rows.location(int(empty.argmax()))}: {column!r} is empty, so there is nothing to learn. Add "
            "text, or remove the row."
        )
    refuse_unknown_tokens(labels, config.get_text_config().vocab_size, job, rows.location)
    return {"labels": labels, "cut": cut, "cut_tokens": lost}


# ---- processors --------------------------------------------------------------------------------------------


FILES = ("preprocessor_config.json", "processor_config.json")


def load_processor(named: Any, job: Job) -> Any:
    """Return the image processor or feature extractor for the job's task.

    `named` is its name, its folder, or a processor of transformers, perhaps with several parts. Raises
    `UsageError` if it cannot be loaded.
    """
    from transformers import AutoFeatureExtractor

    inner, noun = _KINDS[job.task]
    if isinstance(named, str | os.PathLike):
        is_picture = inner == _PICTURE[0]
        return load_pretrained(
            named,
            _load_image_processor if is_picture else AutoFeatureExtractor.from_pretrained,
            noun,
            word="processor",
            patterns=FILES,
            file=FILES[0],
        )
    # A multi-part processor has the image processor or feature extractor as an attribute.
    processor = getattr(named, inner, named)
    inputs = getattr(processor, "model_input_names", None)
    # A tokenizer can be called too, but it has a vocabulary.
    if not callable(processor) or not inputs or hasattr(processor, "vocab_size"):
        raise UsageError(
            f"The processor is of type {type(named).__name__}; for {job.task} it must be transformers' "
            f"{noun}, or its folder."
        )
    return processor


_PICTURE = ("image_processor", "image processor")
_SOUND = ("feature_extractor", "feature extractor")
_KINDS = {
    PICTURE_TEXTS.name: ("tokenizer", "processor"),
    **dict.fromkeys((PICTURES.name, SEGMENTATION.name, VIDEOS.name), _PICTURE),
    **dict.fromkeys((SOUNDS.name, SOUND_CLASSES.name, CTC.name), _SOUND),
}
"""For each task, a multi-part processor's attribute for pictures or sounds, and the part's name in messages.
"""


def own_folder(job: Job) -> Path | None:
    """Return the model's folder if it contains a processor, else None."""
    folder = folder_of_model(job.model.name, job.model.origin)
    return folder if folder and has_processor(folder, job) else None


def has_processor(value: Any, job: Job) -> bool:
    """Return True if a folder, or a transformers processor with several parts, contains the processor for the
    job's task.
    """
    if isinstance(value, str | os.PathLike):
        return any((user_path(value) / name).exists() for name in FILES)
    return hasattr(value, _KINDS[job.task][0])


def settings_of(preprocessor: Any) -> dict[str, Any]:
    """Return the class and settings of the transformers processor in a preprocessor, for a checksum of the
    dataset.
    """
    processor = getattr(preprocessor, fields(preprocessor)[0].name)
    settings = processor.to_dict() if hasattr(processor, "to_dict") else {}
    return {"class": type(processor).__name__, **settings}


def _load_image_processor(name: str, **options: Any) -> Any:
    from transformers import AutoImageProcessor

    try:
        # Implementations of image processors differ in the last bits. The one with Pillow runs on every
        # machine.
        return AutoImageProcessor.from_pretrained(name, backend="pil", **options)
    except ImportError:  # older versions of transformers require torchvision even for this backend
        return _by_its_class(Path(name))


def _by_its_class(folder: Path) -> Any:
    """Return the image processor of the class in a folder's config, in the implementation that needs only
    Pillow.
    """
    import transformers

    named = json.loads((folder / FILES[0]).read_text())["image_processor_type"].removesuffix("Fast")
    return getattr(transformers, f"{named}Pil").from_pretrained(folder, local_files_only=True)
