"""Shapes of language models' picture inputs, read from a model's config.

A picture takes the place of tokens in the sequence. `LAYOUTS` has their number and the pixels by architecture
(N pictures of a batch, C channels, H x W pixels, P patches of D numbers):

| architectures                        | pixel_values     | tokens of a picture                        |
|--------------------------------------|------------------|--------------------------------------------|
| llava, vipllava, paligemma           | (N, C, H, W)     | patches of the vision tower                |
| gemma3, internvl                     | (N, C, H, W)     | `mm_tokens_per_image`, `image_seq_length`  |
| idefics3, smolvlm                    | (B, N/B, C, H, W)| patches divided by `scale_factor` squared  |
| qwen2_vl, qwen2_5_vl, qwen3_vl       | (N P, D)         | patches divided by the square of the merge |

Qwen's vision tower takes pictures of any size. Synthetic ones have 448 x 448 pixels, and `image_grid_thw`
(N, 3) has their numbers of patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import JobError
from snugfit.features.media.tasks import PICTURE_TEXTS
from snugfit.job.batch import IGNORED, Batch, BatchShapes, SampleInputs
from snugfit.job.inputs import ModelInputs

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

ANY_SIZE = 448
"""Height and width in pixels of synthetic pictures for models that take any size."""


AROUND = 2
"""Number of tokens that mark the begin and the end of a picture."""


class PictureLayout(NamedTuple):
    """Shape of one picture of a language model, and the number of tokens that it replaces."""

    tokens: int
    """Number of placeholder tokens of one picture."""
    shape: tuple[int, ...]
    """Shape of one picture in `pixel_values`, without the dimension of pictures or patches."""
    grid: tuple[int, int, int] | None = None
    """Numbers of patches of a picture in time, height and width; None for models without `image_grid_thw`."""
    token_types: str = ""
    """Name of the input that is 1 for tokens of pictures, else 0; empty for models without it."""


def _side(vision: Any) -> tuple[int, int]:
    """Return the height and width in pixels of a vision tower's pictures."""
    size = vision.image_size
    return (size[0], size[1]) if isinstance(size, list | tuple) else (size, size)


def _pixels(vision: Any) -> tuple[int, int, int]:
    return (getattr(vision, "num_channels", 3), *_side(vision))


def _patches(vision: Any) -> int:
    """Return the number of patches of a picture."""
    patch = vision.patch_size
    height, width = (patch[0], patch[1]) if isinstance(patch, list | tuple) else (patch, patch)
    rows, columns = _side(vision)
    return int(rows // height) * int(columns // width)


def _llava(config: Any) -> PictureLayout:
    vision = config.vision_config
    # A CLIP tower has a class token, which only the strategy `full` keeps.
    whole = config.vision_feature_select_strategy == "full" and vision.model_type == "clip_vision_model"
    return PictureLayout(_patches(vision) + whole, _pixels(vision))


def _vipllava(config: Any) -> PictureLayout:
    return PictureLayout(_patches(config.vision_config), _pixels(config.vision_config))


def _paligemma(config: Any) -> PictureLayout:
    vision = config.vision_config
    return PictureLayout(_patches(vision), _pixels(vision), token_types="token_type_ids")


def _gemma3(config: Any) -> PictureLayout:
    shape = _pixels(config.vision_config)
    return PictureLayout(config.mm_tokens_per_image, shape, token_types="token_type_ids")


def _internvl(config: Any) -> PictureLayout:
    tokens = int(_patches(config.vision_config) * config.downsample_ratio**2)
    return PictureLayout(tokens, _pixels(config.vision_config))


def _idefics3(config: Any) -> PictureLayout:
    vision = config.vision_config
    return PictureLayout(_patches(vision) // config.scale_factor**2, _pixels(vision))


def _qwen(config: Any) -> PictureLayout:
    vision = config.vision_config
    merge, patch = vision.spatial_merge_size, vision.patch_size
    side = ANY_SIZE // (patch * merge) * merge
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    numbers = channels * vision.temporal_patch_size * patch**2
    return PictureLayout(side**2 // merge**2, (numbers,), (1, side, side), "mm_token_type_ids")


LAYOUTS: Mapping[str, Callable[[Any], PictureLayout]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "smolvlm": _idefics3,
    "vipllava": _vipllava,
}
"""Functions that return the `PictureLayout` of a config, by model type."""

NESTED = frozenset({"idefics3", "smolvlm"})
"""Model types whose `pixel_values` have a dimension of samples before that of pictures."""


@dataclass(frozen=True)
class PictureTextInput(SampleInputs):
    """The picture inputs of a language model, which creates synthetic batches of pictures and text."""

    layout: PictureLayout
    """Shape of one picture, and its number of tokens."""
    token: int
    """Id of the placeholder token that pictures replace."""
    nested: bool
    """True if `pixel_values` have a dimension of samples before that of pictures."""

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return token ids (B, S) that begin with placeholders of pictures, and the pictures."""
        import torch

        pictures, layout = shapes.job.images, self.layout
        batch = shapes.tokens(samples, generator)
        ids = batch["input_ids"]
        # A random placeholder would mark a picture that does not exist.
        ids[ids == self.token] = (self.token + 1) % shapes.vocabulary
        # Processors write a token before and one after each picture.
        length = layout.tokens + AROUND
        ids[:, : pictures * length].view(samples, pictures, length)[:, :, 1:-1] = self.token
        if layout.token_types:
            batch[layout.token_types] = (ids == self.token).long()
        rows = math.prod(layout.grid or (1,))
        first = (samples, pictures) if self.nested else (samples * pictures * rows,)
        batch["pixel_values"] = torch.randn(*first, *layout.shape, generator=generator, device="cpu")
        if layout.grid:
            batch["image_grid_thw"] = torch.tensor([layout.grid] * (samples * pictures), device="cpu")
        return batch

    def targets(
        self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator
    ) -> Mapping[str, Any]:
        """Return a copy of the token ids, without those of pictures and padding."""
        labels = inputs["input_ids"].clone()
        labels[labels == self.token] = IGNORED
        labels[:, shapes.padding_of(labels)] = IGNORED
        return {"labels": labels}


class PictureTexts(ModelInputs):
    """Input type of language models that take pictures among their tokens."""

    task = PICTURE_TEXTS.name
    has_images = True
    joined = frozenset({"pixel_values", "image_grid_thw"})

    def serves(self, task: str, architecture: str) -> bool:
        """Return True if the pictures of all samples follow each other in one dimension."""
        return task == self.task and architecture not in NESTED

    def of_job(self, job: Job, config: Any) -> PictureTextInput:
        """Return the `PictureTextInput` of a job. Raises `JobError` for an unknown architecture, and for a
        sequence without room for text.
        """
        if config.model_type not in LAYOUTS:
            raise JobError(
                f"{job.model.name} ({config.model_type}): snugfit cannot make synthetic pictures for it in "
                f"{job.task}. It can for {', '.join(LAYOUTS)}. For others, give the model itself with an "
                "example batch: Model.from_module(module, example)."
            )
        layout = LAYOUTS[config.model_type](config)
        taken = (layout.tokens + AROUND) * job.images
        if taken >= job.sequence_length:
            raise JobError(
                f"sequence length {job.sequence_length} is too short for {job.images} images of "
                f"{layout.tokens + AROUND} tokens and text. Set a sequence length above {taken}."
            )
        return PictureTextInput(layout, config.image_token_id, config.model_type in NESTED)

    def label_items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of labels. They shift by one, so the first token is never predicted."""
        return int((batch["labels"][:, 1:] != IGNORED).sum())


class NestedPictureTexts(PictureTexts):
    """Input type of language models whose pictures have a dimension of samples."""

    joined = frozenset()

    def serves(self, task: str, architecture: str) -> bool:
        """Return True if the pictures of a sample have a dimension of their own."""
        return task == self.task and architecture in NESTED
