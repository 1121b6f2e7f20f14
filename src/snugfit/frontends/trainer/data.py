"""A fitted trainer's data: its own random generators, and the next step's batches.

**Position.** The data has random generators of its own (`frontends/data_rng.py`). A checkpoint stores their
states at an epoch's beginning and before each batch. It also stores the epoch and its number of trained
batches. A resumed run continues from them (`frontends/loader.py`). transformers itself computes the position
from the number of steps. That is wrong for a stream after its first epoch. It also creates none of the
previous batches.

**Prefetching.** A fitted trainer waits for the gradients before each update. The GPU then idles until the
update and the next forward pass are launched. The plain Trainer creates the next batch in between, after the
update. With BERT-large at 4 x 512 in fp32, a step thus took 6.1 % longer than in the bare loop
(results/h200-2026-11-22/train-overhead-doors-waiting.json). Created while the device is still in the previous
backward pass, the batch leaves an overhead of 2.8 % (train-overhead-doors.json).
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
    """Position of a run in its data.

    It consists of the epoch, its trained batches, and the states of the random generators before each
    remaining batch.
    """

    def __init__(self) -> None:
        self.rng = DataRng()
        """Generators of the data."""

        self._marks: dict[int, BatchMark] = {}
        self._saved: dict[str, Any] | None = None
        self._epoch = self._used = self._made = 0
        self._is_exhausted = False
        self.epoch_is_over = False
        """True after an epoch's last batch, while its end is processed."""

    def resume(self, saved: dict[str, Any]) -> None:
        """Restore the random generators to their saved states."""
        self.rng.resume(**_states_of(saved, "now"))

    # ---- an epoch ----------------------------------------------------------------------------------------

    def watch(self, loader: Any) -> Any:
        """Return the trainer's loader with its batches watched; accelerate's loader wraps the real one."""
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
        """Start this epoch of a watched loader, or continue after `skipped` batches of a run `saved` before.

        Return the object to iterate over.
        """
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
        """Mark the batches of the epoch as all taken, before its end is processed."""
        self.epoch_is_over = True
        if self._saved is not None and not self._made:  # none was left when the run was resumed
            self.rng.resume(**_states_of(self._saved, "now"))

    def _batches(self, loader: Any) -> Iterator[Any]:
        """Yield this epoch's batches from the next one on."""
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
        """Count `batches` batches as used by a step."""
        self._marks = {index: mark for index, mark in self._marks.items() if index >= self._used - 1}
        self._used += batches

    def unuse(self, batches: int) -> None:
        """Return `batches` batches of a step that is not taken; they are yielded again."""
        self._used -= batches

    # ---- state for checkpoints ---------------------------------------------------------------------------

    def to_json(self, rows: int) -> dict[str, Any]:
        """Return the position for a checkpoint; `rows` is the number of samples in a batch."""
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
    """Return a checkpoint's epoch, and its number of trained batches of `rows` samples in each process.

    `more` is the old number of processes over the new one. None for an older checkpoint without a position.
    """
    if "place" not in saved:
        return None
    return saved["epoch"], math.ceil(saved["place"] * saved["rows"] * more / rows)


def _states_of(saved: Mapping[str, Any], now: str) -> dict[str, DataRngStates]:
    return {"at_epoch_start": states_from_json(saved["began"]), "now": states_from_json(saved[now])}


@final
class _WatchedLoader:
    """A loader whose epochs start at the run's position."""

    def __init__(self, loader: Any, batches: Callable[[Any], Iterator[Any]]) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)


Fetched = tuple[list[Any], Any]
"""The micro-batches of a step, and the Trainer's count of their items, in its own format."""


@final
class StepPrefetcher:
    """Creates the micro-batches of the next step in advance."""

    def __init__(self) -> None:
        self._iterator: Any = None
        self._make: Callable[[], Fetched] | None = None
        self._ready: Fetched | Exception | None = None

    def take(self, iterator: Any, make: Callable[[], Fetched]) -> Fetched:
        """Return the next micro-batches of this epoch's iterator: the prefetched ones, or those of `make()`.

        `make` also creates the ones after them. An error of the prefetch is raised here.
        """
        ready = self._ready if iterator is self._iterator else None
        self._iterator, self._make, self._ready = iterator, make, None
        if isinstance(ready, Exception):
            raise ready
        return make() if ready is None else ready

    def fetch(self) -> None:
        """Prefetch the next micro-batches."""
        if self._make is None or self._ready is not None:
            return
        try:
            self._ready = self._make()
        except Exception as fault:
            self._ready = fault
