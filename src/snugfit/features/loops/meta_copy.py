"""Copies of a user's model without data, for predictions of its job."""

from __future__ import annotations

from typing import Any

from snugfit.job.clone import clone_to_device
from snugfit.job.own_checkpointing import stop_own_checkpointing


def copy_without_data(model: Any) -> Any:
    """Return a copy of the model on `meta`, without transformers' own checkpointing of layers."""
    import torch

    with torch.device("meta"):
        copy = clone_to_device(model)
    stop_own_checkpointing(copy)
    return copy
