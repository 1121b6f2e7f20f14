"""A fitted trainer's data: its random numbers, apart from those of the model, and the next step's batches.

**Position.** The data has random generators of its own (`frontends/data_rng.py`). Their states at an epoch's
beginning and before each batch are kept, with the epoch and the batches of it that went into steps: from them
a resumed run goes on (`frontends/loader.py`). transformers itself computes the position from the number of
steps, which is wrong for a stream after its first epoch, and makes none of the batches that were seen.

**Prefetching.** A fitted trainer waits for the gradients before each update, and the GPU then waits until it
has been asked for the update, and for the next forward pass. The Trainer makes the next batch in between,
where an update is over before it: with BERT-large at 4 x 512 in fp32, a step so took 6.1 % longer than in the
bare loop (results/h200-2026-11-22/train-overhead-doors-waiting.json). With the batch made while the device is
still at the backward pass of the step before, it takes 2.8 % (train-overhead-doors.json).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import count
from typing import Any, final

from snugfit.frontends.data_rng import DataRng, DataRngStates, states_from_json
from snugfit.frontends.loader import BatchMark, batches_from, fingerprint_of, mark_from_json

ONCE = Fraction(1)


@final
class DataPosition:
    """Where a run is in its data: the epoch, the batches that have gone into steps, and the states of the
    random generators before each of the others."""

    def __init__(self) -> None:
        self.rng = DataRng()
        """What the data draws from."""

        self._marks: dict[int, BatchMark] = {}
        self._saved: dict[str, Any] | None = None
        self._epoch = self._used = self._made = 0
        self._is_exhausted = False
        self.epoch_is_over = False
        """Whether this epoch has no batches left and its end is being dealt with."""

    def resume(self, saved: dict[str, Any]) -> None:
        """The random generators as they were when this was saved."""
        self.rng.resume(**_states_of(saved, "now"))

    # ---- an epoch ----------------------------------------------------------------------------------------

    def watch(self, loader: Any) -> Any:
        """The loader that a trainer trains over, with an eye on its batches. accelerate's is a shell around
        the real one."""
        shell = loader if hasattr(loader, "base_dataloader") else None
        real = loader if shell is None else shell.base_dataloader
        if isinstance(real, _WatchedLoader):
            return loader
        self.rng.watch(real)
        watched = _WatchedLoader(real, self._batches)
        if shell is None:
            return watched
        shell.base_dataloader = watched
        return loader

    def begin_epoch(self, loader: Any, epoch: int, skipped: int, saved: dict[str, Any] | None) -> Any:
        """This epoch of a watched loader begins; or goes on after so many batches, where a run is resumed
        that has `saved` this. Gives what to iterate over."""
        self._epoch, self._used, self._made, self._saved = epoch, skipped, 0, saved
        self._is_exhausted = self.epoch_is_over = False
        self._marks.clear()
        if saved is not None:
            self.rng.resume(**_states_of(saved, "began" if skipped else "now"))
        if not skipped:
            self.rng.begin_epoch()
        if skipped and saved and not saved.get("left", True):
            return ()  # accelerate's loaders of streams raise where there is no batch
        return loader

    def end_epoch(self) -> None:
        """Its batches are all taken, and what an epoch's end brings is to come."""
        self.epoch_is_over = True
        if self._saved is not None and not self._made:  # none of them was left when the run was resumed
            self.rng.resume(**_states_of(self._saved, "now"))

    def _batches(self, loader: Any) -> Iterator[Any]:
        """This epoch's batches, from the one on that comes next."""
        saved, self._made = self._saved or {}, self._used + 1
        last, following = mark_from_json(saved.get("last")), saved.get("next")
        if last is not None:
            self._marks[self._used - 1] = last
        states = None if following is None else states_from_json(following)
        batches = batches_from(loader, self._used, self.rng, last, states)
        for index in count(self._used):
            before = self.rng.states()
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            self._marks[index] = BatchMark(before, fingerprint_of(batch))
            yield batch

    def use(self, batches: int) -> None:
        """So many batches go into a step."""
        self._marks = {index: mark for index, mark in self._marks.items() if index >= self._used - 1}
        self._used += batches

    def unuse(self, batches: int) -> None:
        """The step that had them is not made: they come again."""
        self._used -= batches

    # ---- kept --------------------------------------------------------------------------------------------

    def to_json(self, rows: int) -> dict[str, Any]:
        """What a checkpoint keeps of it; a batch has so many samples."""
        following, last = self._marks.get(self._used), self._marks.get(self._used - 1)
        return {
            "epoch": self._epoch + self.epoch_is_over,
            "place": 0 if self.epoch_is_over else self._used,
            "rows": rows,
            "left": not self._is_exhausted or following is not None,
            "began": self.rng.at_epoch_start.to_json(),
            "now": self.rng.between_epochs.to_json(),
            "next": following.before.to_json() if following else None,
            "last": last.to_json() if last else None,
        }


def position_of(saved: Mapping[str, Any], rows: int, *, more: Fraction = ONCE) -> tuple[int, int] | None:
    """The epoch that a checkpoint was taken in, and the batches of so many samples that had gone into steps
    of it in each process, of which there were so many times more; None where an older one does not say."""
    if "place" not in saved:
        return None
    return saved["epoch"], math.ceil(saved["place"] * saved["rows"] * more / rows)


def _states_of(saved: Mapping[str, Any], now: str) -> dict[str, DataRngStates]:
    return {"at_epoch_start": states_from_json(saved["began"]), "now": states_from_json(saved[now])}


@final
class _WatchedLoader:
    """A loader whose epochs begin where the run is."""

    def __init__(self, loader: Any, batches: Callable[[Any], Iterator[Any]]) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)


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
