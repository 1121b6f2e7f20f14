"""The random numbers of a fitted trainer's data, apart from those of its model.

An epoch's order, a collator that masks, a dataset that augments: they draw from the process's generators, and
the loader works a batch ahead of the step. Had they the model's generators, a resumed run would draw other
numbers. So while batches are fetched the generators are others, whose states are kept: at the epoch's
beginning, from which a resumed run draws its order again; and before each collation, so that the first batch
that it makes is the one that came next. Workers draw from generators of their own.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from snugfit.doors.trainer_restore import as_text, from_text
from snugfit.training.generators import random_state, restore_random_state

AHEAD = 4
"""Collations whose states are remembered; accelerate's loader is one batch ahead."""


class Stream:
    """The generators of the data."""

    def __init__(self) -> None:
        self._now = self._began = _states()
        self._before: dict[int, Any] = {}
        self._first: Any = None
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
        models = _states()
        _set(self._now)
        try:
            yield
        finally:
            self._now = _states()
            _set(models)

    def used(self, batches: int) -> None:
        """So many batches went into a step."""
        self._used += batches

    def watching(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The collator, with its generators' states noted."""

        def watched(samples: Any) -> Any:
            if self._first is not None:
                _set(self._first)
                self._first = None
            self._before[self._collated] = _states()
            self._before.pop(self._collated - AHEAD, None)
            self._collated += 1
            return collate(samples)

        return watched

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "began": _text(self._began),
            "now": _text(self._now),
            "next": _text(self._before.get(self._used)),
        }

    def resume(self, kept: dict[str, Any], *, within: bool) -> None:
        """As it was when the checkpoint was taken; `within` an epoch its order is drawn again first."""
        self._began = _from(kept["began"])
        self._now = self._began if within else _from(kept["now"])
        self._first = _from(kept["next"]) if within else None


def _states() -> Any:
    import numpy
    import torch

    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def _set(states: Any) -> None:
    import numpy
    import torch

    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def _text(states: Any) -> Any:
    import torch

    if states is None:
        return None
    before = _states()
    _set(states)
    try:
        return as_text(random_state(torch.device("cpu")))
    finally:
        _set(before)


def _from(document: Any) -> Any:
    import torch

    if document is None:
        return None
    before, host = _states(), torch.device("cpu")
    restore_random_state(from_text(document, host), host)
    try:
        return _states()
    finally:
        _set(before)
