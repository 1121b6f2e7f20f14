"""The random generators that a step may draw from, and their states."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
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


HostStates = tuple["torch.Tensor", Any, Any]
"""Of the generators on the host: torch's, Python's, numpy's."""


def host_states() -> HostStates:
    """The states of the host's generators, as they are."""
    import numpy
    import torch

    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_host_states(states: HostStates) -> None:
    """Sets them to what `host_states` gave."""
    import numpy
    import torch

    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def states_to_json(states: HostStates) -> list[Any]:
    """JSON values; `states_from` reads them back."""
    kind, words, *rest = states[2]
    return [states[0].tolist(), list(states[1]), [kind, words.tolist(), *rest]]


def states_from(document: list[Any]) -> HostStates:
    """The states that `states_to_json` wrote."""
    import numpy
    import torch

    words, (version, internal, gauss), (kind, keys, *rest) = document
    numpys = (kind, numpy.array(keys, dtype=numpy.uint32), *rest)
    return torch.tensor(words, dtype=torch.uint8), (version, tuple(internal), gauss), numpys


def random_state(device: torch.device) -> dict[str, Any]:
    """Every random generator that a step may draw from: torch's of host and device, numpy's, Python's."""
    import numpy

    kind, words, *rest = numpy.random.get_state(legacy=True)
    return {
        "torch": generators(device),
        "numpy": (
            kind,
            [int(word) for word in words],
            *(value.item() if hasattr(value, "item") else value for value in rest),
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


@contextlib.contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Whatever is drawn within it, every random generator is afterwards as it was."""
    before = random_state(device)
    try:
        yield
    finally:
        restore_random_state(before, device)
