"""Samples of pictures or sound (`media.py`) to one host batch.

Pictures and features of one shape are stacked: (B, C, H, W), (B, M, F). Sounds of several lengths are filled
up by the feature extractor itself, which knows with what, and marks what is none in an attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from snugfit.data.collate import Collate

if TYPE_CHECKING:
    import torch

    from snugfit.data.pictures import Pictures
    from snugfit.data.sounds import Sounds


@final
@dataclass(frozen=True, kw_only=True)
class MediaCollate:
    """A picklable function from samples to the batch that a model takes."""

    maker: Pictures | Sounds
    """Of the samples."""

    asked: Collate
    """Of their labels."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        made = [torch.as_tensor(sample[self.maker.name]) for sample in samples]
        return {**self.maker.batched(made), "labels": self.asked.labels(samples, 0)}
