"""The random generators that a step may draw from, and their states."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed all random generators of the process.

    Each process has its own random numbers, derived from the run's seed and its rank. Rank 0 has those of a
    run of one process.
    """
    import numpy
    import torch

    if rank:
        # After the shift, the seed fits into a signed 64-bit integer.
        seed = int(numpy.random.SeedSequence([seed, rank]).generate_state(1, numpy.uint64)[0] >> 1)
    random.seed(seed)
    # numpy accepts only 32-bit seeds.
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the states of torch's generators of the host and the GPU, each (bytes,) of uint8.

    A forward pass draws from these alone.
    """
    import torch

    on_device = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *on_device)


def set_rng_states(states: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Restore the states that `rng_states` returned."""
    import torch

    torch.set_rng_state(states[0].cpu())
    for state in states[1:]:
        torch.cuda.set_rng_state(state.cpu(), device)


class HostRngStates(NamedTuple):
    """States of the random generators on the host: Python's, numpy's and torch's."""

    torch: torch.Tensor
    python: Any
    numpy: Any


def host_rng_states() -> HostRngStates:
    """Return the current states of the host's random generators."""
    import numpy
    import torch

    return HostRngStates(torch.get_rng_state(), random.getstate(), numpy.random.get_state())


def set_host_rng_states(states: HostRngStates) -> None:
    """Restore the states that `host_rng_states` returned."""
    import numpy
    import torch

    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    numpy.random.set_state(states.numpy)


def rng_states_to_json(states: HostRngStates) -> list[Any]:
    """Return the states of the host's generators as JSON values, for `rng_states_from_json`."""
    kind, words, *rest = states.numpy
    return [states.torch.tolist(), list(states.python), [kind, words.tolist(), *rest]]


def rng_states_from_json(document: list[Any]) -> HostRngStates:
    """Return the host generators' states from the JSON values of `rng_states_to_json`."""
    import numpy
    import torch

    state, (version, internal, gauss), (kind, words, *rest) = document
    python, numpys = (version, tuple(internal), gauss), (kind, numpy.array(words, numpy.uint32), *rest)
    return HostRngStates(torch.tensor(state, dtype=torch.uint8), python, numpys)


def all_rng_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators that a step may draw from, in the form of checkpoints.

    These are torch's generators of host and device, numpy's and Python's.
    """
    host = host_rng_states()
    kind, words, *rest = host.numpy
    return {"torch": rng_states(device), "numpy": (kind, words.tolist(), *rest), "python": host.python}


def restore_all_rng_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `all_rng_states` returned."""
    import numpy

    set_rng_states(states["torch"], device)
    numpy.random.set_state(states["numpy"])
    random.setstate(states["python"])


@contextlib.contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Context that restores every random generator at its end."""
    before = all_rng_states(device)
    try:
        yield
    finally:
        restore_all_rng_states(before, device)
