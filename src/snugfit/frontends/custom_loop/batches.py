"""The batches of a hand-written loop: a loader's batches, epoch after epoch, from the position of a run.

A resumed run must continue with the next batches in order, so the loader has random generators of its own
(`frontends/data_rng.py`). A checkpoint stores their states before the next batch and before the previous one.
The previous batch is then produced again to check that it is the same (`frontends/loader.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, final

from snugfit.frontends.data_facts import loader_facts
from snugfit.frontends.data_rng import DataRng, DataRngStates, states_from_json
from snugfit.frontends.loader import BatchMark, batches_from, count_of, fingerprint_of, mark_from_json
from snugfit.training.checkpoint.facts import Facts


@final
class Batches:
    """The batches of one loader, epoch after epoch, with their own random generators."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._rng = DataRng(loader)
        self._next: DataRngStates | None = None
        self._last: BatchMark | None = None
        self._iterator: Iterator[Any] | None = None
        self._fetched: list[tuple[BatchMark, Any]] = []
        self._fault: Exception | None = None
        self._within = False
        self._lent: BatchMark | None = None
        self._before_used: dict[str, Any] | None = None
        self.epoch = 0
        """Number of finished epochs."""

        self.position = 0
        """Batches of this epoch that have gone into a step."""

        self.fetching_seconds = 0.0
        """Duration of the last fetch in seconds."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch; after a resume, the remaining ones of the interrupted epoch."""
        self._open()
        while True:
            if not self._fetched and self._fault is None:
                self.fetch()
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            if not self._fetched:
                break
            self._count_lent()
            self._lent, batch = self._fetched.pop(0)
            self._next = self._lent.before
            yield batch
        self.leave()

    def leave(self) -> bool:
        """End an epoch before its last batch; return True if an epoch was running."""
        if self._iterator is None:
            return False
        self._iterator = self._next = self._last = self._lent = None
        self._fetched.clear()
        self.epoch, self.position = self.epoch + 1, 0
        return True

    def _open(self) -> None:
        self.leave()
        if not self._within:
            self._rng.begin_epoch()
            self.position = 0
        with self._rng.drawing():
            self._iterator = batches_from(self._loader, self.position, self._rng, self._last, self._next)
        self._within = False

    def _count_lent(self) -> None:
        """Count the last yielded batch as processed."""
        if self._lent is not None:
            self._last, self._lent = self._lent, None
            self.position += 1

    def fetch(self) -> None:
        """Fetch the next batch during an epoch, unless one is ready.

        An error of the loader is raised when the batch is taken.
        """
        if self._iterator is None or self._fetched or self._fault is not None:
            return
        begun, before = time.perf_counter(), self._rng.now
        with self._rng.drawing():
            try:
                for batch in islice(self._iterator, 1):
                    self._fetched.append((BatchMark(before, fingerprint_of(batch)), batch))
            except Exception as fault:
                self._fault = fault
        self.fetching_seconds = time.perf_counter() - begun

    def used(self) -> None:
        """Mark the last yielded batch as trained; without this mark, a resumed run yields it again."""
        if self._lent is not None:
            began = self._rng.at_epoch_start
            following = self._lent.before if self.position else began
            self._before_used = {
                "epoch": self.epoch,
                "place": self.position,
                "began": began,
                "next": following,
                "last": self._last if self.position else None,
            }
            self._count_lent()
            self._next = self._fetched[0][0].before if self._fetched else self._rng.now

    @property
    def samples(self) -> int | None:
        """Number of samples in the loader's dataset; None if unknown."""
        return count_of(getattr(self._loader, "dataset", None))

    def facts(self) -> Facts:
        """Return the facts that determine the loader's order and content."""
        return loader_facts(self._loader)

    @property
    def epochs_passed(self) -> float:
        """Finished epochs, with the fraction of the current one if the loader's length is known."""
        count = count_of(self._loader)
        return self.epoch + self.position / count if count else float(self.epoch)

    # ---- state for checkpoints ---------------------------------------------------------------------------

    @property
    def can_repeat(self) -> bool:
        """True when the last trained batch can be yielded again."""
        return self._before_used is not None

    def to_json(self, *, repeating: bool = False) -> dict[str, Any]:
        """Return the position in the data; with `repeating`, the position before the last trained batch."""
        if repeating:
            assert self._before_used is not None
            return {
                name: value.to_json() if hasattr(value, "to_json") else value
                for name, value in self._before_used.items()
            }
        began = self._rng.now if self._iterator is None else self._rng.at_epoch_start
        following = self._next if self.position and self._next is not None else began
        return {
            "epoch": self.epoch,
            "place": self.position,
            "began": began.to_json(),
            "next": following.to_json(),
            "last": self._last.to_json() if self.position and self._last is not None else None,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the position that `to_json` returned. Raises `TypeError` for invalid counts."""
        for name in ("epoch", "place"):
            if type(state[name]) is not int or state[name] < 0:
                raise TypeError(f'"{name}" is {state[name]!r}; it must be a whole number from 0')
        self.epoch, self.position = state["epoch"], state["place"]
        self._within = self.position > 0
        self._next, self._last = states_from_json(state["next"]), mark_from_json(state.get("last"))
        began = states_from_json(state["began"])
        self._rng.resume(began, now=began)
