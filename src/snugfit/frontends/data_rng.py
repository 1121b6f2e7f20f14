"""The random generators that a user's data draws from, apart from those of the model.

An epoch's order, a collator that masks, a dataset that augments: they draw from the process's generators, as
dropout does, and a loader works ahead of the step. Had they the model's generators, a resumed run would draw
other numbers. So the data has states of its own, and while batches are fetched the process's generators stand
at these. Those at an epoch's beginning are kept, because a resumed run draws the epoch's order again. Those
before the batch that comes next are each front-end's own matter. Worker processes draw from generators of
theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

from snugfit.training.rng import (
    HostRngStates,
    host_rng_states,
    rng_states_from_json,
    rng_states_to_json,
    set_host_rng_states,
)

if TYPE_CHECKING:
    import torch


class DataRngStates(NamedTuple):
    """States of all generators that the data draws from."""

    host: HostRngStates
    """Of the process's generators."""

    own: tuple[torch.Tensor, ...] = ()
    """Of those that the loader was given, each (bytes,) of uint8."""

    def to_json(self) -> list[Any]:
        """JSON values; `states_from_json` reads them back."""
        return [rng_states_to_json(self.host), [state.tolist() for state in self.own]]


def states_from_json(document: list[Any]) -> DataRngStates:
    """The states that `DataRngStates.to_json` wrote."""
    import torch

    host, own = document
    return DataRngStates(
        rng_states_from_json(host), tuple(torch.tensor(state, dtype=torch.uint8) for state in own)
    )


@final
class DataRng:
    """The generators that one loader's data draws from: the process's, while it is `drawing`, and those that
    the loader was given."""

    def __init__(self, own: Sequence[torch.Generator] = ()) -> None:
        self._own = tuple(own)
        self.now = self.at_epoch_start = self.states()
        """What the next fetch draws from, and what this epoch's order was drawn from."""

    def states(self) -> DataRngStates:
        """The generators' states, as they are."""
        return DataRngStates(host_rng_states(), tuple(generator.get_state() for generator in self._own))

    def set(self, states: DataRngStates) -> None:
        """Sets the generators to what `states` gave."""
        set_host_rng_states(states.host)
        for generator, state in zip(self._own, states.own, strict=True):
            generator.set_state(state)

    def begin_epoch(self) -> None:
        """The next fetch begins an epoch."""
        self.at_epoch_start = self.now

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Within it the process's generators are the data's, and then the model's again."""
        models = host_rng_states()
        self.set(self.now)
        try:
            yield
        finally:
            self.now = self.states()
            set_host_rng_states(models)
