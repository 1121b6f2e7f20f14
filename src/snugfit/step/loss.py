"""Where a model gives its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def loss_of(out: Any) -> torch.Tensor:
    """The loss in a forward pass's result: the tensor itself, `.loss`, `"loss"` of a dict, or first of a
    tuple. The HF Trainer looks for itself."""
    import torch

    if isinstance(out, torch.Tensor):
        return out
    if hasattr(out, "loss"):
        loss: torch.Tensor = out.loss
        return loss
    first: torch.Tensor = out["loss"] if isinstance(out, Mapping) else out[0]
    return first
