"""Assigns DeepSpeed's weights and their states to processes, each of which writes its own to a checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def shape_of(weight: Any) -> tuple[int, ...]:
    """Return the shape of a whole weight, even if DeepSpeed has partitioned it."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def owners(model: torch.nn.Module, ranks: int) -> dict[str, int]:
    """Return for each weight name the rank that writes it into a checkpoint. The largest weights come first,
    each to the rank with the fewest bytes so far.
    """
    sizes = {name: math.prod(shape_of(weight)) for name, weight in model.named_parameters()}
    given = [0] * ranks
    chosen: dict[str, int] = {}
    # Names decide between weights of equal size, so that all processes choose the same owners.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        chosen[name] = given.index(min(given))
        given[chosen[name]] += sizes[name]
    return chosen


def part_bytes(model: torch.nn.Module, rank: int, ranks: int) -> list[int]:
    """Return the bytes of each tensor that a process with DeepSpeed's engine writes into a checkpoint. Each
    trained weight has two states, and all three are in fp32.
    """
    chosen = owners(model, ranks)
    sizes = []
    for name, weight in model.named_parameters():
        if chosen[name] == rank:
            elements = math.prod(shape_of(weight))
            sizes += [4 * elements] * 3 if weight.requires_grad else [weight.element_size() * elements]
    return sizes
