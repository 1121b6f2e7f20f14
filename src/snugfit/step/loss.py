"""Find the loss in a model's output."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class AssumedLoss(UserWarning):
    """Warning: a model returns several numbers that could be its loss. A prediction's warning has the same
    text."""


def loss_of(out: Any) -> torch.Tensor:
    """Return the loss in a forward pass's result.

    The loss is the tensor itself, `.loss`, `"loss"` of a dict, or the first element of a tuple. If the first
    element is no single number, the tuple's only single number is the loss (`return logits, loss`). The HF
    Trainer has its own rule.

    Raises `TypeError` without a single number, and `KeyError` for a dict without a loss.
    """
    import torch

    if isinstance(out, torch.Tensor):
        return _single_number(out)
    if hasattr(out, "loss"):
        return _single_number(out.loss)
    if isinstance(out, Mapping):
        return _single_number(out["loss"])
    return _among(out) if isinstance(out, Sequence) and out else _single_number(out)


def _among(values: Sequence[Any]) -> torch.Tensor:
    losses = [value for value in values if _is_number(value)]
    if not _is_number(values[0]):
        return losses[0] if len(losses) == 1 else _single_number(values[0])
    trained = sum(loss.requires_grad for loss in losses)
    if trained > 1:
        warnings.warn(
            f"The model gives {trained} numbers with gradients. Only the first is used as the loss. If it "
            "is not their sum, add them in forward.",
            AssumedLoss,
            stacklevel=3,
        )
    first: torch.Tensor = values[0]
    return first


def _is_number(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def _single_number(value: Any) -> torch.Tensor:
    """Return a loss unchanged. Raises `TypeError` unless it is a tensor of one number."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"its value is of type {type(value).__name__}")
    if value.numel() != 1:
        raise TypeError(f"its value has the shape {tuple(value.shape)}")
    return value
