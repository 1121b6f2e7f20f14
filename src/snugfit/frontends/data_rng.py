"""The random generators that a user's data draws from, apart from those of the model.

An epoch's order, a collator that masks, a dataset that augments: they draw from the process's generators, as
dropout does, and a loader works ahead of the step. Had they the model's generators, a resumed run would draw
other numbers. So the data has states of its own, and while batches are fetched the process's generators stand
at these. Those at an epoch's beginning are kept, because a resumed run draws the epoch's order again. Those
before each batch are kept too (`loader.py`). Worker processes draw from generators of theirs, which an
epoch's beginning decides. What the data holds of its own goes along (`own_state.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from snugfit.frontends.own_state import OwnState, State
from snugfit.training.rng import (
    HostRngStates,
    host_rng_states,
    rng_states_from_json,
    rng_states_to_json,
    set_host_rng_states,
)

LOOKS = 5
"""States that are taken in an epoch before its second batch is there."""


class DataRngStates(NamedTuple):
    """States of all generators that the data draws from."""

    host: HostRngStates
    """Of the process's generators."""

    own: State | None
    """Of the data's own, and its counters; None where an older checkpoint says nothing of them."""

    def to_json(self) -> list[Any]:
        """JSON values; `states_from_json` reads them back."""
        return [rng_states_to_json(self.host), self.own]


def states_from_json(document: list[Any]) -> DataRngStates:
    """The states that `DataRngStates.to_json` wrote. Older checkpoints hold a list of the loader's own
    generators, or the process's alone."""
    if len(document) != 2:
        return DataRngStates(rng_states_from_json(document), None)
    host, own = document
    if isinstance(own, list):
        own = {
            name: ["torch", state]
            for name, state in zip(("generator", "sampler.generator"), own, strict=False)
        }
    return DataRngStates(rng_states_from_json(host), own)


@final
class DataRng:
    """The generators that one loader's data draws from: the process's, while it is `drawing`, and the data's
    own."""

    def __init__(self, loader: Any = None) -> None:
        self._own, self._looks = OwnState(loader), 0
        self.now = self.at_epoch_start = self.states()
        """What the next fetch draws from, and what this epoch's order was drawn from."""

    def watch(self, loader: Any) -> None:
        """From here on it is this loader's data."""
        self._own = OwnState(loader)
        self.now = self.now._replace(own=self._own.state())

    def states(self) -> DataRngStates:
        """The generators' states, as they are."""
        if self._looks:
            self._looks -= 1
            self._own.look()
        return DataRngStates(host_rng_states(), self._own.state())

    def set(self, states: DataRngStates) -> None:
        """Sets the generators to what `states` gave."""
        set_host_rng_states(states.host)
        if states.own is not None:
            self._own.set(states.own)

    def begin_epoch(self) -> None:
        """The next fetch begins an epoch. What the data makes with its first batches is looked for then."""
        self._looks = LOOKS
        self.at_epoch_start = self.between_epochs

    @property
    def between_epochs(self) -> DataRngStates:
        """What an epoch that begins now draws from. The data's own generators may have gone on since the last
        batch: an evaluation has the same collator, and a counter may be set."""
        return self.now._replace(own=self.states().own)

    def resume(self, at_epoch_start: DataRngStates, now: DataRngStates) -> None:
        """As they were in another process."""
        self.at_epoch_start, self.now, self._looks = at_epoch_start, now, LOOKS
        if now.own is not None:
            self._own.set(now.own)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What draws within it, such as an evaluation with the same collator, leaves the data's own
        generators as they were."""
        own = self.states().own or {}
        try:
            yield
        finally:
            self._own.set(own)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Within it the process's generators are the data's, and then the model's again."""
        models = host_rng_states()
        set_host_rng_states(self.now.host)
        try:
            yield
        finally:
            self.now = self.states()
            set_host_rng_states(models)
