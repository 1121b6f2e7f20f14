"""Preparation of a picture as the model's input, by Pillow and the model's own image processor.

A picture is rotated by its EXIF tag and converted to the model's channels, as in `datasets` and transformers'
pipelines. The processor resizes, scales and normalizes it. No step is random: a sample is the same in every
epoch, in every worker and after every restart.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import UsageError, one_line
from snugfit.features.media.files import MediaEntry, shape_text
from snugfit.features.media.inputs import UNLABELLED

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's modes with 8 bits per channel, by the number of channels."""

DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes with more than 8 bits per pixel, whose values Pillow would clip at 255."""

ORIENTATION, UPRIGHT = 0x0112, 1
"""EXIF tag of a picture's orientation, and its value for a picture without rotation."""


@final
@dataclass(frozen=True, kw_only=True)
class PicturePreprocessor:
    """Converts the pictures of samples to a model's input, one at a time."""

    processor: Any
    """The model's image processor of transformers."""

    shape: tuple[int, ...]
    """The shape (C, H, W) that the job was planned for."""

    input_name = "pixel_values"
    """Name of the model's input for pictures."""

    def input_of(self, entry: MediaEntry) -> torch.Tensor:
        """Return a picture's pixels as the model's input, (C, H, W) of fp32. Raises `UsageError` that names
        the row and its file.
        """
        return self._prepare(self._in_mode(open_picture(entry), entry), entry)[self.input_name]

    def input_and_map(
        self, entry: MediaEntry, map_entry: MediaEntry, classes: int
    ) -> dict[str, torch.Tensor]:
        """Return a picture's pixels (C, H, W) and its segmentation map as the class of each pixel, (H, W) of
        int64. Raises `UsageError` for a map of another size, or with other classes.
        """
        import numpy as np

        picture, map_picture = self._in_mode(open_picture(entry), entry), open_picture(map_entry)
        if map_picture.size != picture.size or len(map_picture.getbands()) != 1:
            raise UsageError(
                f"{map_entry.name}: a segmentation map is a picture of one channel, as large as its image "
                f"({shape_text(picture.size)}). This one has {len(map_picture.getbands())} channels and "
                f"{shape_text(map_picture.size)}. Replace it, or remove its row."
            )
        prepared = self._prepare(picture, entry, segmentation_maps=np.asarray(map_picture).astype(np.int64))
        labels = prepared["labels"].long()
        wrong = labels[(labels != UNLABELLED) & ((labels < 0) | (labels >= classes))]
        if len(wrong):
            raise UsageError(
                f"{map_entry.name}: a pixel has the class {int(wrong[0])}, but the job has {classes} labels. "
                f"Allowed are 0 to {classes - 1}, and {UNLABELLED} for none. Set labels, or correct the map."
            )
        return {self.input_name: prepared[self.input_name], "labels": labels}

    def _prepare(self, picture: Image, entry: MediaEntry, **more: Any) -> dict[str, torch.Tensor]:
        try:
            outputs = self.processor(images=picture, return_tensors="pt", **more)
            prepared: dict[str, torch.Tensor] = {name: value[0] for name, value in outputs.items()}
        except Exception as error:  # a user's image processor may raise any exception
            raise UsageError(
                f"{entry.name}: the image processor fails on it ({one_line(error)}). Replace the file, "
                "or remove its row."
            ) from error
        pixels = prepared[self.input_name]
        if tuple(pixels.shape) != self.shape:
            raise UsageError(
                f"{entry.name}: the image processor makes {shape_text(pixels.shape)} of it, but the job "
                f"was planned for {shape_text(self.shape)}. Set the processor's size (and do_center_crop, "
                'if images get different sizes), or "image_size" in the model\'s config.json.'
            )
        return prepared

    def raw_bytes(self, entry: MediaEntry) -> bytes:
        """Return a picture's bytes for a checksum of the dataset: the file's bytes, or the decoded pixels."""
        content = entry.content()
        if content is not None:
            return content
        picture = open_picture(entry)
        return f"{picture.mode} {picture.size}".encode() + picture.tobytes()

    def _in_mode(self, picture: Image, entry: MediaEntry) -> Image:
        mode = MODES.get(self.shape[0])
        if mode is None or picture.mode == mode:
            return picture
        if picture.mode in DEEP_MODES:
            raise UsageError(
                f"{entry.name}: its pixels have more than 8 bits (Pillow's mode {picture.mode}), which "
                "would be lost. Convert it to 8 bits first."
            )
        return picture.convert(mode)


def open_picture(entry: MediaEntry) -> Image:
    """Return the picture, decoded and rotated by its EXIF tag."""
    from PIL import Image, ImageOps

    if isinstance(entry.value, Image.Image):
        return entry.value
    content = entry.content()
    if content is None:
        return Image.fromarray(_array(entry))
    try:
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()
        # Pillow copies a picture to rotate it, so upright pictures are left unchanged.
        turned = picture.getexif().get(ORIENTATION, UPRIGHT) != UPRIGHT
        return ImageOps.exif_transpose(picture) if turned else picture
    except Exception as error:  # Pillow's formats raise various exceptions
        message = "not a format that Pillow knows" if "cannot identify" in str(error) else one_line(error)
        raise UsageError(
            f"{entry.name}: this image cannot be read ({message}). Replace the file, or remove its row."
        ) from None


def _array(entry: MediaEntry) -> np.ndarray:
    """Return an already decoded picture as an array, (H, W) or (H, W, C) of uint8."""
    import numpy as np

    try:
        pixels = np.asarray(entry.value)
    except (ValueError, TypeError, RuntimeError):  # unequal lists, or a tensor on a device
        pixels = np.asarray(None)
    # A list has Python integers, which may be 8-bit pixels.
    if isinstance(entry.value, list) and pixels.dtype.kind in "iu" and pixels.size:
        pixels = pixels.astype(np.uint8) if 0 <= pixels.min() <= pixels.max() <= 255 else pixels
    if pixels.ndim not in (2, 3) or pixels.dtype != np.uint8:
        raise UsageError(
            f"{entry.location}: an image must be a path, a file's bytes, a PIL image or an array (H, W, C) "
            f"of uint8, not {_kind(entry.value, pixels)}. Give prepared pixels as pixel_values."
        )
    # Channels may come first, as in torch.
    if pixels.ndim == 3 and pixels.shape[2] not in MODES and pixels.shape[0] in MODES:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] not in MODES:
        raise UsageError(
            f"{entry.location}: an image of the shape {pixels.shape}; it must be (H, W, C) with C = 1, "
            "3 or 4."
        )
    # Pillow takes a single channel without a third dimension.
    return np.ascontiguousarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def _kind(value: Any, pixels: np.ndarray) -> str:
    if pixels.ndim and pixels.dtype.kind != "O":
        return f"one of {pixels.dtype} and the shape {pixels.shape}"
    return "nothing (null)" if value is None else f"of type {type(value).__name__}"
