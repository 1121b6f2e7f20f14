"""Which process keeps which of an engine's weights in a checkpoint, whole and with its states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def shape_of(weight: Any) -> tuple[int, ...]:
    """Of all of a weight, wherever the engine keeps it."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def owners(model: torch.nn.Module, ranks: int) -> dict[str, int]:
    """The rank of each weight's process, by its name: the largest first, each to whoever has the least."""
    sizes = {name: math.prod(shape_of(weight)) for name, weight in model.named_parameters()}
    given = [0] * ranks
    chosen: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        chosen[name] = given.index(min(given))
        given[chosen[name]] += sizes[name]
    return chosen


def part_bytes(model: torch.nn.Module, rank: int, ranks: int) -> list[int]:
    """Bytes of each tensor that a process writes, once there are states: each weight that trains has two, and
    all three are in fp32."""
    chosen = owners(model, ranks)
    sizes = []
    for name, weight in model.named_parameters():
        if chosen[name] == rank:
            elements = math.prod(shape_of(weight))
            sizes += [4 * elements] * 3 if weight.requires_grad else [weight.element_size() * elements]
    return sizes
