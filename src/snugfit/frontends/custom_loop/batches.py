"""The batches of a hand-written loop: a loader's, epoch after epoch, from where a run was.

A resumed run must see the batches that were to come, so the loader has random generators of its own
(`frontends/data_rng.py`). Their states are kept before the next batch and the one before it too, which is
made again to see that it is the same (`frontends/loader.py`).
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
        """Epochs that are done."""

        self.position = 0
        """Batches of this epoch that have gone into a step."""

        self.fetching_seconds = 0.0
        """How long the last fetch took."""

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch: of the one that a resumed run was in, those that are left."""
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
        """Ends an epoch whose batches were not all taken; whether one was going on."""
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
        """The batch that was lent last is behind us."""
        if self._lent is not None:
            self._last, self._lent = self._lent, None
            self.position += 1

    def fetch(self) -> None:
        """Has the loader make the next batch, where an epoch goes on and none waits. What goes
        wrong is raised where the batch is taken."""
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
        """The batch that was lent last has gone into a step. One that was not comes again in a resumed
        run."""
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
        """Of the loader's dataset, where that says how many it has."""
        return count_of(getattr(self._loader, "dataset", None))

    def facts(self) -> Facts:
        """What makes the loader's order and content."""
        return loader_facts(self._loader)

    @property
    def epochs_passed(self) -> float:
        """Epochs that are done, with the part of this one, where the loader knows how long it is."""
        count = count_of(self._loader)
        return self.epoch + self.position / count if count else float(self.epoch)

    # ---- kept --------------------------------------------------------------------------------------------

    @property
    def can_repeat(self) -> bool:
        """Whether the batch that was used last can be given again."""
        return self._before_used is not None

    def to_json(self, *, repeating: bool = False) -> dict[str, Any]:
        """Where the run is in its data; for a run that is `repeating`, where it was before the batch that
        was used last."""
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
        """As it was when `to_json` was asked. Raises `TypeError` for what are no counts."""
        for name in ("epoch", "place"):
            if type(state[name]) is not int or state[name] < 0:
                raise TypeError(f'"{name}" is {state[name]!r}; it must be a whole number from 0')
        self.epoch, self.position = state["epoch"], state["place"]
        self._within = self.position > 0
        self._next, self._last = states_from_json(state["next"]), mark_from_json(state.get("last"))
        began = states_from_json(state["began"])
        self._rng.resume(began, now=began)
