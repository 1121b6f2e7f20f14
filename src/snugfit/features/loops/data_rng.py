"""Random generators of a user's data, separate from those of the model.

An epoch's order, a masking collator and an augmenting dataset draw from the process's generators. Dropout
draws from them too, and a loader works ahead of the step. With shared generators, a resumed run would draw
other numbers. So the data has its own generator states, which the process's generators have while batches are
loaded. The states at an epoch's beginning are saved, because a resumed run draws the epoch's order again.
Those before each batch are saved too (`loader.py`). Worker processes have separate generators, which an
epoch's beginning determines. Generators inside the data's objects are included (`own_state.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from snugfit.features.loops.own_state import OwnState, State
from snugfit.training.rng import (
    HostRngStates,
    host_rng_states,
    rng_states_from_json,
    rng_states_to_json,
    set_host_rng_states,
)

SEARCHED_READS = 5
"""Number of reads of the generators' states at the start of an epoch that also search for new generators."""


class DataRngStates(NamedTuple):
    """States of all random generators that a loader and its dataset use."""

    host: HostRngStates
    """States of the random generators on the host: Python's, NumPy's and torch's."""

    own: State
    """States of the dataset's and loader's own generators, and of their counters."""

    def to_json(self) -> list[Any]:
        """Return the generators' states as JSON values, which `states_from_json` reads."""
        return [rng_states_to_json(self.host), self.own]


def states_from_json(document: list[Any]) -> DataRngStates:
    """Return the generators' states from the JSON values of `DataRngStates.to_json`."""
    host, own = document
    return DataRngStates(rng_states_from_json(host), own)


@final
class DataRng:
    """The random states of a loader: those of the process's generators while it loads batches, and of its own
    generators.
    """

    def __init__(self, loader: Any = None) -> None:
        self._own, self._looks = OwnState(loader), 0
        self.now = self.at_epoch_start = self.states()
        """Generator states for the next batch, and those from which this epoch's order was drawn."""

    def watch(self, loader: Any) -> None:
        """Find the random generators inside this loader's objects, and include them from now on."""
        self._own = OwnState(loader)
        self.now = self.now._replace(own=self._own.state())

    def states(self) -> DataRngStates:
        """Return the current states of the data's random generators."""
        if self._looks:
            self._looks -= 1
            self._own.find_generators()
        return DataRngStates(host_rng_states(), self._own.state())

    def set(self, states: DataRngStates) -> None:
        """Restore the random generators to the states that `states` returned."""
        self._own.set(states.own)
        set_host_rng_states(states.host)

    def begin_epoch(self) -> None:
        """Start an epoch with the next loaded batch. Then search for generators that are created with its
        first batches.
        """
        self._looks = SEARCHED_READS
        self.at_epoch_start = self.between_epochs

    @property
    def between_epochs(self) -> DataRngStates:
        """Return the states of the data's random generators at the start of a new epoch.

        The data's own generators may have advanced since the last batch. For example, an evaluation may use
        the same collator.
        """
        return self.now._replace(own=self.states().own)

    def resume(self, at_epoch_start: DataRngStates, now: DataRngStates) -> None:
        """Restore the random generators of a resumed run, from its states at the epoch's start and `now`."""
        self.at_epoch_start, self.now, self._looks = at_epoch_start, now, SEARCHED_READS
        self._own.set(now.own)

    @contextlib.contextmanager
    def preserve(self) -> Iterator[None]:
        """Context for random draws outside of training, after which the data's own generators are restored.

        An evaluation may have the same collator, for example.
        """
        own = self.states().own
        try:
            yield
        finally:
            self._own.set(own)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Context in which the process's random generators have the data's states. At its end the model's
        states are restored.
        """
        models = host_rng_states()
        set_host_rng_states(self.now.host)
        try:
            yield
        finally:
            self.now = self.states()
            set_host_rng_states(models)
