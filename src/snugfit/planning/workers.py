"""Processes that rehearse for a plan, side by side.

Each holds its own `Parts` and remembers what it rehearsed, so whoever asks says which one. Where a plan
cannot travel (a module of the user's own, a clock that is a closure) or one process is enough, the parts are
here and every answer is there at once.

The processes come from a fork server, which has imported torch once and never computed anything: a copy of a
process that has is not safe. They die with whoever asked, also when it is killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.clock import Clock
    from snugfit.planning.parts import Parts

_PRELOADED = ["torch", "transformers", "snugfit.planning.parts", "snugfit.planning.clock"]

FEW_COLLECTIONS = 100_000
"""Objects made between two collections: tapes are millions of them, and hold no cycles."""

Question = tuple[int, str, tuple[Any, ...]]
"""Number, method of `Parts`, arguments."""


class Bench:
    """`Parts` in so many places, each doing one thing at a time."""

    def __init__(self, places: Sequence[ProcessPoolExecutor | Parts]) -> None:
        self.places = places

    def answers(self, ask: Callable[[int], Question | None]) -> Iterator[tuple[int, Any | SnugfitError]]:
        """Asks what `ask(place)` says whenever a place is free, until it says None to all; gives each answer
        with its number as it comes, an error among them."""
        working: dict[Future[Any], tuple[int, int]] = {}
        while True:
            busy = {place for place, _ in working.values()}
            for place in range(len(self.places)):
                if place not in busy and (question := ask(place)) is not None:
                    number, method, arguments = question
                    working[self._asked(place, method, arguments)] = place, number
            if not working:
                return
            for done in wait(working, return_when=FIRST_COMPLETED).done:
                _, number = working.pop(done)
                yield number, _result(done)

    def one(self, place: int, method: str, *arguments: Any) -> Any:
        """The answer to one question; raises what it raises."""
        return self._asked(place, method, arguments).result()

    def _asked(self, place: int, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        where = self.places[place]
        if isinstance(where, ProcessPoolExecutor):
            return where.submit(_ask, method, arguments)
        done: Future[Any] = Future()
        try:
            done.set_result(getattr(where, method)(*arguments))
        except SnugfitError as refusal:
            done.set_exception(refusal)
        return done


@contextmanager
def bench(
    job: Job, gpus: Sequence[Gpu | None], clock: Clock, *, workers: int, shallow: bool
) -> Iterator[Bench]:
    """So many processes with parts of this job in each; here, when it cannot travel or one is enough."""
    if workers <= 1 or not _travels((job, gpus, clock)):
        from snugfit.planning.parts import Parts

        yield Bench([Parts(job, gpus, clock, shallow=shallow)])
        return
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pools = [
        ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(job, gpus, clock, shallow))
        for _ in range(workers)
    ]
    try:
        yield Bench(pools)
    except BrokenProcessPool:
        raise SnugfitError("A process that rehearsed was killed, perhaps for lack of memory.") from None
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def _result(done: Future[Any]) -> Any | SnugfitError:
    try:
        return done.result()
    except SnugfitError as refusal:
        return refusal


def _travels(what: Any) -> bool:
    try:
        pickle.dumps(what)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return what[0].model.module is None


_parts: Parts | None = None
"""In a worker: what it rehearses with."""


def _begin(job: Job, gpus: Sequence[Gpu | None], clock: Clock, shallow: bool) -> None:
    """In a worker: Ctrl-C ends it without a word, and so does the end of whoever asked."""
    from snugfit.planning.parts import Parts

    global _parts
    gc.freeze()
    gc.set_threshold(FEW_COLLECTIONS, 50, 50)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait_for([sentinel]), os._exit(1)), daemon=True).start()
    _parts = Parts(job, gpus, clock, shallow=shallow)


def _ask(method: str, arguments: tuple[Any, ...]) -> Any:
    assert _parts is not None
    return getattr(_parts, method)(*arguments)
