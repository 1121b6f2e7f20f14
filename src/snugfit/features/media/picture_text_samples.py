"""Samples of pictures with text, which the model's own processor prepares, and their batches.

A row has pictures, and `messages` or a text. Messages go through the processor's chat template. Their content
is text, or a list of parts: `{"type": "image"}` and `{"type": "text", "text": ...}`. A text without the
processor's image token gets one for each picture at its start.

Labels are all tokens but those of pictures and padding, as in transformers' and TRL's examples. Other inputs,
such as patches and their grid, are joined in their first dimension.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from snugfit.data.columns import columns_of
from snugfit.data.indexed import IndexedSamples, Sample
from snugfit.data.pretrained import load_pretrained
from snugfit.data.tokens import padding_token
from snugfit.errors import UsageError, one_line
from snugfit.features.media.files import MediaEntry
from snugfit.features.media.pictures import open_picture
from snugfit.features.media.tasks import PICTURE_TEXTS
from snugfit.job.batch import IGNORED
from snugfit.job.job import Job, Task

if TYPE_CHECKING:
    import torch

    from snugfit.data.collate import Collate
    from snugfit.data.columns import Form
    from snugfit.data.rows import Rows

INPUTS: Mapping[Task, tuple[Form, ...]] = {
    Task(PICTURE_TEXTS.name): (("image", "messages"), ("image", "text"))
}
_IMAGES = ("images", "image", "img", "file_name", "image_path")
_TEXTS = ("text", "caption", "sentence", "transcription")
USUAL: Mapping[Form, tuple[Form, ...]] = {
    ("image", "messages"): tuple(
        (image, text) for image in _IMAGES for text in ("messages", "conversations")
    ),
    ("image", "text"): tuple((image, text) for image in _IMAGES for text in _TEXTS),
}
"""Usual column names, by roles."""

FILL = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "mm_token_type_ids": 0, "labels": IGNORED}
"""Values that pad inputs of one number for each token, by name. Token ids have the model's padding token."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PictureTextSamples(IndexedSamples):
    """A dataset of pictures with text. The processor prepares a sample when it is loaded."""

    rows: Rows
    """Rows of the dataset, with only the columns of a sample."""

    columns: Mapping[str, str]
    """Column of each role: `image`, and `messages` or `text`."""

    processor: Any
    """The model's processor of transformers, with an image processor and a tokenizer."""

    limit: int
    """Largest number of tokens of a sample, those of pictures included."""

    image_token: int
    """Id of the token that pictures replace."""

    pad_token: int
    """Token id that pads sequences."""

    def __len__(self) -> int:
        return len(self.rows)

    def _sample(self, index: int, epoch: int) -> Sample:
        """Return the sample with this index, the same in every epoch."""
        row, location = self.rows[index], self.rows.location(index)
        pictures = [open_picture(entry).convert("RGB") for entry in self._entries(row, index)]
        text = self._text(row, index, len(pictures))
        try:
            outputs = self.processor(
                text=[text], images=[pictures] if pictures else None, return_tensors="pt"
            )
        except Exception as error:  # a user's processor may raise any exception
            raise UsageError(
                f"{location}: the processor fails on it ({one_line(error)}). The text needs one image token "
                "for each image. Correct this row, or remove it."
            ) from error
        ids = outputs["input_ids"][0]
        if len(ids) > self.limit:
            raise UsageError(
                f"{location}: {len(ids)} tokens with those of its images, but the job was planned for "
                f"{self.limit}. Set a longer sequence length, smaller images, or remove the row."
            )
        sample = {name: value[0] if name in FILL else value for name, value in outputs.items()}
        labels = ids.clone()
        labels[labels == self.image_token] = IGNORED
        return {**sample, "labels": labels}

    def _entries(self, row: Mapping[str, Any], index: int) -> list[MediaEntry]:
        """Return the entries of a row's pictures, which may be a list or a single one."""
        value = self.rows.value(row, self.columns["image"], index)
        values = [] if value is None else value if isinstance(value, list | tuple) else [value]
        location, folder = self.rows.location(index), self.rows.folder_of(index)
        return [MediaEntry(value=one, location=location, folder=folder) for one in values]

    def _text(self, row: Mapping[str, Any], index: int, pictures: int) -> str:
        if "text" in self.columns:
            text = self.rows.text(row, self.columns["text"], index)
            marks = [getattr(self.processor, name, None) for name in ("boi_token", "image_token")]
            mark = next((mark for mark in marks if isinstance(mark, str)), "<image>")
            return text if any(mark and mark in text for mark in marks) else mark * pictures + text
        messages = self.rows.value(row, self.columns["messages"], index)
        try:
            return str(self.processor.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # the template is a user's code
            raise UsageError(
                f"{self.rows.location(index)}: the processor's chat template fails on its messages "
                f"({one_line(error)}). Correct this row, or use a processor with a chat template."
            ) from error

    def collate_with(self, targets: Collate) -> PictureTextCollate:
        """Return the collate function: it pads tokens, and joins pictures."""
        return PictureTextCollate(self.pad_token, targets.pad_to_multiple_of or 1, self.limit)

    def checksum(self, index: int) -> bytes:
        """Return a checksum of a sample's files and text, without building the sample."""
        row = self.rows[index]
        text = {role: row.get(column) for role, column in self.columns.items() if role != "image"}
        checksum = hashlib.sha256(json.dumps(text, default=str, sort_keys=True).encode())
        for entry in self._entries(row, index):
            content = entry.content()
            checksum.update(open_picture(entry).tobytes() if content is None else content)
        return checksum.digest()


@final
@dataclass(frozen=True)
class PictureTextCollate:
    """A picklable collate function from samples of pictures with text to the model's batch."""

    pad_token: int
    """Token id that pads sequences."""

    multiple: int
    """The length of a batch is rounded up to a multiple of this number of tokens."""

    limit: int
    """Largest length of a batch in tokens."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch
        from torch.nn.functional import pad

        longest = max(len(sample["input_ids"]) for sample in samples)
        length = min(-(-longest // self.multiple) * self.multiple, self.limit)
        fill, batch = {**FILL, "input_ids": self.pad_token}, {}
        for name in dict.fromkeys(name for sample in samples for name in sample):
            values = [sample[name] for sample in samples if name in sample]
            if name in fill:
                rows = [pad(value, (0, length - len(value)), value=fill[name]) for value in values]
                batch[name] = torch.stack(rows)
            else:
                batch[name] = torch.cat(values)
        return batch


def picture_text_samples(rows: Rows, job: Job, processor: Any) -> PictureTextSamples:
    """Return a dataset's rows as samples of pictures with text. `processor` is transformers' processor of the
    model, or its folder. Raises `UsageError` that names an invalid row.
    """
    from transformers import AutoProcessor

    columns = columns_of(rows, job, INPUTS, USUAL)
    if not hasattr(processor, "tokenizer"):
        processor = load_pretrained(
            processor,
            AutoProcessor.from_pretrained,
            "processor",
            word="processor",
            patterns=("preprocessor_config.json", "processor_config.json"),
            file="processor_config.json",
        )
    samples = PictureTextSamples(
        rows=rows.select_columns({*columns.values()}),
        columns=columns,
        processor=processor,
        limit=job.sequence_length,
        image_token=job.config_to_read().image_token_id,
        pad_token=padding_token(job, processor.tokenizer),
        notes=tuple(rows.notes()),
    )
    # A processor that does not fit the model fails here, rather than in the first step.
    samples.sample(0)
    return samples
