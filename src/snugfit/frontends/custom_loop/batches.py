"""The batches of a hand-written loop: a loader's, epoch after epoch, from where a run was.

A resumed run must see the batches that were to come, so the loader has random generators of its own
(`frontends/data_rng.py`). Their states are kept before the next batch too.

Of a plain `DataLoader` without workers the batches that were seen are passed over without being made; any
other loader gives them once more, and they are thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from snugfit.frontends.data_rng import DataRng, DataRngStates, states_from_json

if TYPE_CHECKING:
    import torch


@final
class Batches:
    """The batches of one loader, epoch after epoch, with their own random generators."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._rng = DataRng(own_generators(loader))
        self._before = self._rng.now
        self._next: DataRngStates | None = None
        self._iterator: Iterator[Any] | None = None
        self._fetched: list[tuple[DataRngStates, Any]] = []
        self._fault: Exception | None = None
        self._within = False
        self._lent = False
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
            self._next, batch = self._fetched.pop(0)
            self._lent = True
            yield batch
        self.leave()

    def leave(self) -> bool:
        """Ends an epoch whose batches were not all taken; whether one was going on."""
        if self._iterator is None:
            return False
        self._iterator, self._next, self._lent = None, None, False
        self._fetched.clear()
        self.epoch, self.position = self.epoch + 1, 0
        return True

    def _open(self) -> None:
        self.leave()
        if not self._within:
            self._rng.begin_epoch()
            self.position = 0
        with self._rng.drawing():
            self._iterator = self._from(self.position)
        self._within = False

    def _from(self, position: int) -> Iterator[Any]:
        """An epoch's batches from this one on."""
        rest = without_first(self._loader, position, then=self._draw_what_came_next) if position else None
        if rest is not None:
            return iter(rest)
        batches = iter(self._loader)
        for _ in range(position):
            next(batches, None)
        return batches

    def _draw_what_came_next(self) -> None:
        assert self._next is not None
        self._before = self._next
        self._rng.set(self._next)

    def _count_lent(self) -> None:
        """The batch that was lent last is behind us."""
        if self._lent:
            self._lent = False
            self.position += 1

    def fetch(self) -> None:
        """Has the loader make the next batch, where an epoch goes on and none waits. What goes
        wrong is raised where the batch is taken."""
        if self._iterator is None or self._fetched or self._fault is not None:
            return
        begun, self._before = time.perf_counter(), self._rng.now
        with self._rng.drawing():
            try:
                self._fetched.extend((self._before, batch) for batch in islice(self._iterator, 1))
            except Exception as fault:
                self._fault = fault
        self.fetching_seconds = time.perf_counter() - begun

    def used(self) -> None:
        """The batch that was lent last has gone into a step. One that was not comes again in a resumed
        run."""
        if self._lent:
            self._count_lent()
            self._next = self._fetched[0][0] if self._fetched else self._rng.now

    @property
    def samples(self) -> int | None:
        """Of the loader's dataset, where that says how many it has."""
        dataset = getattr(self._loader, "dataset", None)
        return len(dataset) if isinstance(dataset, Sized) else None

    @property
    def epochs_passed(self) -> float:
        """Epochs that are done, with the part of this one, where the loader knows how long it is."""
        count = len(self._loader) if isinstance(self._loader, Sized) else 0
        return self.epoch + self.position / count if count else float(self.epoch)

    # ---- kept --------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Where the run is in its data."""
        began = self._rng.now if self._iterator is None else self._rng.at_epoch_start
        following = self._next if self.position and self._next is not None else began
        return {
            "epoch": self.epoch,
            "place": self.position,
            "began": began.to_json(),
            "next": following.to_json(),
        }

    def resume(self, state: dict[str, Any]) -> None:
        """As it was when `to_json` was asked."""
        self.epoch, self.position = state["epoch"], state["place"]
        self._within = self.position > 0
        self._next = states_from_json(state["next"])
        self._rng.now = self._rng.at_epoch_start = states_from_json(state["began"])


def own_generators(loader: Any) -> list[torch.Generator]:
    """torch's generators that a loader or its sampler was given; each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list({id(own): own for own in generators if own is not None}.values())


def made_like(loader: Any, **changed: Any) -> Any:
    """The `DataLoader` once more, with these arguments changed."""
    import torch

    same = (
        "dataset", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
        "multiprocessing_context", "generator",
    )  # fmt: skip
    return torch.utils.data.DataLoader(**{**{name: getattr(loader, name) for name in same}, **changed})


def is_plain(loader: Any) -> bool:
    """Whether this is torch's own `DataLoader`, over a dataset whose batches a sampler names."""
    import torch

    return (
        type(loader) is torch.utils.data.DataLoader
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
    )


def without_first(loader: Any, batches: int, then: Callable[[], None]) -> Any:
    """A loader without an epoch's first batches, which are not made; `then` is called when they are passed.
    None where that cannot be had."""
    if not is_plain(loader) or loader.num_workers:
        return None
    return made_like(loader, batch_sampler=_WithoutFirst(loader.batch_sampler, batches, then))


@final
class _WithoutFirst:
    def __init__(self, real: Iterable[Any], batches: int, then: Callable[[], None]) -> None:
        self._real, self._batches, self._then = real, batches, then

    def __iter__(self) -> Iterator[Any]:
        named = iter(self._real)
        for _ in range(self._batches):
            next(named, None)
        self._then()
        yield from named
