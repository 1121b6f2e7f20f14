"""Preparation of a video as the model's input: frames at equal distances, by the model's own image processor.

| a row has                                     | meaning                                       |
|-----------------------------------------------|-----------------------------------------------|
| a path to a folder                            | its pictures, in the order of their names     |
| a path or bytes of an animated picture        | its frames (GIF, WebP, APNG), through Pillow  |
| a path or bytes of any other file             | its frames, through the package `av`          |
| a list of pictures, or an array (F, H, W, C)  | frames                                        |

No step is random: a sample is the same in every epoch, in every worker and after every restart.
"""

from __future__ import annotations

import importlib
import io
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import UsageError, one_line
from snugfit.features.media.files import MediaEntry, shape_text
from snugfit.features.media.pictures import open_picture

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@final
@dataclass(frozen=True, kw_only=True)
class VideoPreprocessor:
    """Converts the videos of samples to a model's input, one at a time."""

    processor: Any
    """The model's image or video processor of transformers."""

    shape: tuple[int, ...]
    """The shape (F, C, H, W) that the job was planned for."""

    input_name: str
    """Name of the model's input for videos."""

    def input_of(self, entry: MediaEntry) -> torch.Tensor:
        """Return a video's pixels as the model's input, (F, C, H, W) of fp32. Raises `UsageError` that names
        the row and its file.
        """
        import torch

        frames = [frame.convert("RGB") for frame in _evenly(_frames(entry), self.shape[0], entry)]
        try:
            outputs = self.processor(frames, return_tensors="pt")
            # An image processor may return a batch of one video, or the frames as a batch.
            pixels: torch.Tensor = torch.as_tensor(next(iter(outputs.values())))
        except Exception as error:  # a user's processor may raise any exception
            raise UsageError(
                f"{entry.name}: the processor fails on it ({one_line(error)}). Replace the video, or "
                "remove its row."
            ) from error
        pixels = pixels.reshape(pixels.shape[-4:])
        if tuple(pixels.shape) != self.shape:
            raise UsageError(
                f"{entry.name}: the processor makes {shape_text(pixels.shape)} of it, but the job was "
                f"planned for {shape_text(self.shape)}. Set the processor's size, or the frames and "
                "the size in the model's config.json."
            )
        return pixels

    def raw_bytes(self, entry: MediaEntry) -> bytes:
        """Return a video's bytes for a checksum of the dataset: the file's bytes, or the decoded frames."""
        if entry.path is None or not os.path.isdir(entry.path):
            content = entry.content()
            if content is not None:
                return content
        return b"".join(frame.tobytes() for frame in _frames(entry))


def _evenly(frames: list[Image], count: int, entry: MediaEntry) -> list[Image]:
    """Return this number of frames at equal distances, the first and the last among them."""
    if not frames:
        raise UsageError(f"{entry.name}: the video has no frames. Replace it, or remove its row.")
    last = len(frames) - 1
    return [frames[round(number * last / max(count - 1, 1))] for number in range(count)]


def _frames(entry: MediaEntry) -> list[Image]:
    """Return all frames of a row's video."""
    if entry.path is not None and os.path.isdir(entry.path):
        return [_frame(entry, str(path)) for path in sorted(Path(entry.path).iterdir())]
    content = entry.content()
    if content is not None:
        return _decode(content, entry)
    try:
        return [_frame(entry, value) for value in entry.value]
    except TypeError:
        raise UsageError(
            f"{entry.location}: a video must be a path, a file's bytes, a list of images or an array (F, H, "
            f"W, C) of uint8, not of type {type(entry.value).__name__}. Correct this row, or remove it."
        ) from None


def _frame(entry: MediaEntry, value: Any) -> Image:
    return open_picture(replace(entry, value=value))


def _decode(content: bytes, entry: MediaEntry) -> list[Image]:
    from PIL import Image, ImageSequence, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as animated:
            return [frame.copy() for frame in ImageSequence.Iterator(animated)]
    except UnidentifiedImageError:
        pass  # this file is not a picture
    try:
        av = importlib.import_module("av")
    except ImportError:
        raise UsageError(
            f"{entry.name}: videos other than animated pictures need the package av, which is not installed. "
            "Try: pip install av. Or give a folder of frames."
        ) from None
    try:
        with av.open(io.BytesIO(content)) as container:
            return [frame.to_image() for frame in container.decode(video=0)]
    except Exception as error:  # FFmpeg's errors
        raise UsageError(
            f"{entry.name}: this video cannot be read ({one_line(error)}). Replace the file, or remove "
            "its row."
        ) from None
