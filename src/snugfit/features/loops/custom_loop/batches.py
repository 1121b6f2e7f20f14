"""The batches of a hand-written loop: a loader's batches, epoch after epoch, from the batch at which a run
resumes.

A resumed run must continue with the next batches in order, so the loader has separate random generators
(`features/loops/data_rng.py`). After a resume, the last trained batch is loaded again and compared with the
checkpoint's (`features/loops/loader.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, final

from snugfit.features.loops.data_facts import loader_facts
from snugfit.features.loops.data_rng import states_from_json
from snugfit.features.loops.loader import DataPosition, count_of, mark_from_json
from snugfit.training.checkpoint.facts import Facts
from snugfit.training.run.loader import Prefetcher


@final
class Batches:
    """Iterates over one loader's batches, epoch after epoch, with separate random generators for the data."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._data = loader, DataPosition(loader)
        self._prefetcher: Prefetcher[list[Any]] | None = None
        self._saved: Mapping[str, Any] | None = None
        self._is_lent = False
        self._before_used: Mapping[str, Any] | None = None
        self.epoch = 0
        """Number of finished epochs."""

    @property
    def position(self) -> int:
        """Number of this epoch's batches that training steps have used."""
        return self._data.used

    @property
    def fetching_seconds(self) -> float:
        """Seconds that the last fetch of a batch took."""
        return 0.0 if self._prefetcher is None else self._prefetcher.fetching_seconds

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch; after a resume, the remaining ones of the interrupted epoch."""
        self.leave()
        saved, self._saved = self._saved, None
        self._data.begin_epoch(self._loader, self.epoch, self.position if saved else 0, saved)
        batches = self._data.batches(self._loader)

        def make() -> list[Any]:
            with self._data.rng.drawing():
                return list(islice(batches, 1))

        self._prefetcher = prefetcher = Prefetcher(make)
        while fetched := prefetcher.take():
            self._count_lent()
            self._is_lent = True
            yield fetched[0]
        self.leave()

    def leave(self) -> bool:
        """End an epoch before its last batch, as after a `break`. Return True if an epoch was running."""
        if self._prefetcher is None:
            return False
        self._prefetcher, self._is_lent = None, False
        self.epoch, self._data.used = self.epoch + 1, 0
        return True

    def _count_lent(self) -> None:
        """Count the batch that the loop received last as used by a training step, even if called several
        times.
        """
        if self._is_lent:
            self._is_lent = False
            self._data.use(1)

    def fetch(self) -> None:
        """Load the next batch during an epoch, unless it is loaded already."""
        if self._prefetcher is not None:
            self._prefetcher.fetch()

    def used(self) -> None:
        """Mark the last yielded batch as trained. Without this mark, a resumed run yields it again."""
        if self._is_lent:
            self._before_used = self._state()
            self._count_lent()

    @property
    def samples(self) -> int | None:
        """Number of samples in the loader's dataset; None if unknown."""
        return count_of(getattr(self._loader, "dataset", None))

    def facts(self) -> Facts:
        """Return properties that identify the loader's data and order, such as its sampler. A resumed run
        compares them with its checkpoint's.
        """
        return loader_facts(self._loader)

    @property
    def epochs_passed(self) -> float:
        """Number of finished epochs, plus the fraction of the current one if the loader's length is known."""
        count = count_of(self._loader)
        return self.epoch + self.position / count if count else float(self.epoch)

    # ---- state for checkpoints ---------------------------------------------------------------------------

    @property
    def can_repeat(self) -> bool:
        """True if a resumed run can yield the last trained batch again."""
        return self._before_used is not None

    def _state(self) -> Mapping[str, Any]:
        if self._saved is not None:  # no batch has been yielded since the resume
            return self._saved
        rng, marks, used = self._data.rng, self._data.marks, self.position
        began = rng.now if self._prefetcher is None else rng.at_epoch_start
        following = marks[used].before if used in marks else rng.now
        return {
            "epoch": self.epoch,
            "place": used,
            "began": began,
            "next": following if used else began,
            "last": marks.get(used - 1) if used else None,
        }

    def to_json(self, *, repeating: bool = False) -> dict[str, Any]:
        """Return the position in the data as JSON values. With `repeating`, it is the position before the
        last trained batch.
        """
        state = self._before_used if repeating else self._state()
        assert state is not None
        return {
            name: value.to_json() if hasattr(value, "to_json") else value for name, value in state.items()
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the position that `to_json` returned. Raises `TypeError` for invalid counts."""
        for name in ("epoch", "place"):
            if type(state[name]) is not int or state[name] < 0:
                raise TypeError(f'"{name}" is {state[name]!r}; it must be a whole number from 0')
        states_from_json(state["next"]), mark_from_json(state.get("last"))  # errors name the file
        self.epoch, self._data.used = state["epoch"], state["place"]
        self._saved = {**state, "now": state["began"]}
        self._data.resume(self._saved)
