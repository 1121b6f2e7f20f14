"""A fitted trainer's data: its random numbers, apart from those of the model, and the next step's batches.

**Random numbers.** The data has generators of its own (`frontends/data_rng.py`). Their states are kept before
each collation too, so that the first batch that a resumed run makes is the one that came next.

**Prefetching.** A fitted trainer waits for the gradients before each update, and the GPU then waits until it
has been asked for the update, and for the next forward pass. The Trainer makes the next batch in between,
where an update is over before it: with BERT-large at 4 x 512 in fp32, a step so took 6.1 % longer than in the
bare loop (results/h200-2026-11-22/train-overhead-doors-waiting.json). With the batch made while the device is
still at the backward pass of the step before, it takes 2.8 % (train-overhead-doors.json).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from snugfit.frontends.data_rng import DataRng, DataRngStates
from snugfit.training.rng import (
    HostRngStates,
    host_rng_states,
    rng_states_from_json,
    rng_states_to_json,
    set_host_rng_states,
)


@final
class BatchRng:
    """The data's random generators, and what they were before each batch that has not gone into a step."""

    def __init__(self) -> None:
        self._rng = DataRng()
        self._before_batch: dict[int, HostRngStates] = {}
        self._resume_with: HostRngStates | None = None
        self._collated = self._used = 0

    def begin_epoch(self, skipped: int) -> None:
        """An epoch begins, of which so many batches are skipped."""
        if not skipped:
            self._rng.begin_epoch()
        self._before_batch.clear()
        self._collated = self._used = skipped

    def drawing(self) -> AbstractContextManager[None]:
        """Within it the process's generators are the data's."""
        return self._rng.drawing()

    def use(self, batches: int) -> None:
        """So many batches go into a step."""
        self._before_batch = {
            index: states for index, states in self._before_batch.items() if index >= self._used
        }
        self._used += batches

    def unuse(self, batches: int) -> None:
        """The step that had them is not made: they come again."""
        self._used -= batches

    def watch(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The collator, with its generators' states noted before each batch."""

        def collate_watched(samples: Any) -> Any:
            if self._resume_with is not None:
                set_host_rng_states(self._resume_with)
                self._resume_with = None
            self._before_batch[self._collated] = host_rng_states()
            self._collated += 1
            return collate(samples)

        return collate_watched

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        following = self._before_batch.get(self._used)
        return {
            "began": rng_states_to_json(self._rng.at_epoch_start.host),
            "now": rng_states_to_json(self._rng.now.host),
            "next": rng_states_to_json(following) if following else None,
        }

    def resume(self, saved: dict[str, Any], *, within: bool) -> None:
        """As it was when the checkpoint was taken; `within` an epoch its order is drawn again first."""
        now = saved["began" if within else "now"]
        self._rng.at_epoch_start = DataRngStates(rng_states_from_json(saved["began"]))
        self._rng.now = DataRngStates(rng_states_from_json(now))
        self._resume_with = rng_states_from_json(saved["next"]) if within and saved["next"] else None


Fetched = tuple[list[Any], Any]
"""The micro-batches of a step, and what the Trainer counted in them; its own form."""


@final
class StepPrefetcher:
    """Makes the micro-batches of the next step before they are asked for."""

    def __init__(self) -> None:
        self._iterator: Any = None
        self._make: Callable[[], Fetched] | None = None
        self._ready: Fetched | Exception | None = None

    def take(self, iterator: Any, make: Callable[[], Fetched]) -> Fetched:
        """The next ones of this epoch's iterator: those that are ready, or `make()`, which is also how the
        ones after them are made. What went wrong when they were made is raised here."""
        ready = self._ready if iterator is self._iterator else None
        self._iterator, self._make, self._ready = iterator, make, None
        if isinstance(ready, Exception):
            raise ready
        return make() if ready is None else ready

    def fetch(self) -> None:
        """Has the next ones made."""
        if self._make is None or self._ready is not None:
            return
        try:
            self._ready = self._make()
        except Exception as fault:
            self._ready = fault
