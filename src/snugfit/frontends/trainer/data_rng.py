"""The random numbers of a fitted trainer's data, apart from those of its model.

An epoch's order, a collator that masks, a dataset that augments: they draw from the process's generators, and
the loader works a step ahead. Had they the model's generators, a resumed run would draw other
numbers. So while batches are fetched the generators are others, whose states are kept: at the epoch's
beginning, from which a resumed run draws its order again; and before each collation, so that the first batch
that it makes is the one that came next. Workers draw from generators of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from snugfit.training.generators import (
    HostStates,
    host_states,
    set_host_states,
    states_from,
    states_to_json,
)


class Stream:
    """The generators of the data."""

    def __init__(self) -> None:
        self._now = self._began = host_states()
        self._before: dict[int, HostStates] = {}
        self._first: HostStates | None = None
        self._collated = self._used = 0

    def epoch_begins(self, skipped: int) -> None:
        """An epoch, of which so many batches are passed by."""
        if not skipped:
            self._began = self._now
        self._before.clear()
        self._collated = self._used = skipped

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Within it the generators are the data's."""
        models = host_states()
        set_host_states(self._now)
        try:
            yield
        finally:
            self._now = host_states()
            set_host_states(models)

    def used(self, batches: int) -> None:
        """So many batches go into a step."""
        self._before = {place: states for place, states in self._before.items() if place >= self._used}
        self._used += batches

    def not_used(self, batches: int) -> None:
        """The step that had them is not made: they come again."""
        self._used -= batches

    def watching(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The collator, with its generators' states noted."""

        def watched(samples: Any) -> Any:
            if self._first is not None:
                set_host_states(self._first)
                self._first = None
            self._before[self._collated] = host_states()
            self._collated += 1
            return collate(samples)

        return watched

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        following = self._before.get(self._used)
        return {
            "began": states_to_json(self._began),
            "now": states_to_json(self._now),
            "next": states_to_json(following) if following else None,
        }

    def resume(self, kept: dict[str, Any], *, within: bool) -> None:
        """As it was when the checkpoint was taken; `within` an epoch its order is drawn again first."""
        self._began = states_from(kept["began"])
        self._now = self._began if within else states_from(kept["now"])
        self._first = states_from(kept["next"]) if within and kept["next"] else None
