"""The random generators that a step may draw from, and their states."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def generators(device: torch.device) -> tuple[torch.Tensor, ...]:
    """The states of the generators that a forward pass draws from: torch's of the host, and of the GPU."""
    import torch

    on_device = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *on_device)


def set_generators(states: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Sets them to what `generators` gave."""
    import torch

    torch.set_rng_state(states[0].cpu())
    for state in states[1:]:
        torch.cuda.set_rng_state(state.cpu(), device)


def random_state(device: torch.device) -> dict[str, Any]:
    """Every random generator that a step may draw from: torch's of host and device, numpy's, Python's."""
    import numpy

    kind, words, *rest = numpy.random.get_state(legacy=True)
    return {
        "torch": generators(device),
        "numpy": (
            kind,
            [int(word) for word in words],
            *(each.item() if hasattr(each, "item") else each for each in rest),
        ),
        "python": random.getstate(),
    }


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Sets them to what `random_state` gave."""
    import numpy

    set_generators(state["torch"], device)
    kind, words, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(words, dtype=numpy.uint32), *rest))
    random.setstate(state["python"])
