"""Processes that rehearse for a plan, side by side.

Each holds its own `Parts` and remembers what it rehearsed, so whoever asks says which one. Where a plan
cannot travel (a module of the user's own, a clock that is a closure) or one process is enough, the parts are
here and every answer is there at once.

The processes come from a fork server, which has imported torch and the code of the model once and never
computed anything: a copy of a process that has is not safe. A pipe is all that joins them to whoever asked,
so nothing is left of them when they end; and they end with whoever asked, also when that is killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import TYPE_CHECKING, Any, TypeVar

from snugfit.errors import SnugfitError, UsageError
from snugfit.planning.cost.figures import BelowLowerBound
from snugfit.planning.cost.run import ENDLESS

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.cost.parts import Parts
    from snugfit.planning.cost.run import Run
    from snugfit.planning.cost.timer import Clock

FEW_COLLECTIONS = 100_000
"""Objects made between two collections: traces are millions of them, and hold no cycles."""

ENDS_WITHIN = 2.0
"""Seconds that a process has to end by itself when nothing is asked any more."""

UNGUARDED = 76
"""Exit code of a process that was to plan itself, before it could begin: importing the user's script made it
do so."""

_Answer = TypeVar("_Answer")

Question = tuple[int, str, tuple[Any, ...]]
"""Number, method of `Parts`, arguments."""


class Worker:
    """A process with `Parts` of its own, which answers one question at a time."""

    def __init__(
        self, context: Any, job: Job, gpus: Sequence[Gpu | None], clock: Clock, shallow: bool, run: Run
    ) -> None:
        self.connection, there = context.Pipe()
        what = (there, job, gpus, clock, shallow, run)
        self.process = context.Process(target=_answers, args=what, daemon=True)
        self.process.start()
        there.close()

    def ask(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Asks, and does not wait. Raises `SnugfitError` when the process is no more."""
        try:
            self.connection.send((method, arguments))
        except OSError:
            raise self._gone() from None

    def answer(self) -> Any | SnugfitError:
        """What it says; raises `SnugfitError` when the process is no more, and `RuntimeError` with the
        process's own traceback for an error that is ours."""
        try:
            answer, bug = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if bug:
            raise RuntimeError(f"in a process of the plan:\n{bug}")
        return answer

    def _gone(self) -> SnugfitError:
        self.process.join(ENDS_WITHIN)
        if self.process.exitcode != UNGUARDED:
            return SnugfitError("A worker process was killed, perhaps because memory ran out.")
        return UsageError(
            "plan() starts worker processes, and each of them imports the script that calls it. Put the call"
            " under `if __name__ == '__main__':`, or start none with workers=1."
        )

    def hurry(self) -> None:
        """The end is near: nothing is asked any more."""
        self.connection.close()

    def end(self) -> None:
        """Sees the process end, or ends it."""
        self.process.join(ENDS_WITHIN)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


class Bench:
    """`Parts` in so many places, each doing one thing at a time."""

    def __init__(self, places: Sequence[Worker | Parts]) -> None:
        self.places = places

    def answers(self, ask: Callable[[int], Question | None]) -> Iterator[tuple[int, Any | SnugfitError]]:
        """Asks what `ask(place)` says whenever a place is free, until it says None to all; gives each answer
        with its number as it comes, an error among them."""
        working: dict[Any, tuple[int, Worker]] = {}
        while True:
            here: list[tuple[int, Any]] = []
            busy = [worker for _, worker in working.values()]
            for place, where in enumerate(self.places):
                if where in busy or (question := ask(place)) is None:
                    continue
                number, method, arguments = question
                if isinstance(where, Worker):
                    where.ask(method, arguments)
                    working[where.connection] = number, where
                else:
                    here.append((number, _asked(where, method, arguments)))
            yield from here
            if not working and not here:
                return
            for connection in wait_for(working) if working and not here else ():
                number, worker = working.pop(connection)
                yield number, worker.answer()


def load_ahead(job: Job, gpus: Sequence[Gpu | None], clock: Clock, workers: int) -> None:
    """Has everything imported that the processes of a bench need, while whoever asks does something else."""
    if workers > 1 and _travels((job, gpus, clock)):
        _forks(job)
        forkserver.ensure_running()


def _forks(job: Job) -> Any:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # whoever began this process says why
    context: Any = multiprocessing.get_context("forkserver")
    name = job.model.architecture
    code = f"transformers.models.{name}.modeling_{name}"  # passed over where it is not there
    ours = [
        "snugfit.planning.cost.parts",
        "snugfit.rehearsal.record.recorder",
        "snugfit.rehearsal.device.overrides",
    ]
    context.set_forkserver_preload(["torch", "transformers", *(f"snugfit.{name}" for name in ours), code])
    return context


@contextmanager
def bench(
    job: Job, gpus: Sequence[Gpu | None], clock: Clock, *, workers: int, shallow: bool, run: Run = ENDLESS
) -> Iterator[Bench]:
    """So many processes with parts of this job in each; here, when it cannot travel or one is enough."""
    if workers <= 1 or not _travels((job, gpus, clock)):
        from snugfit.planning.cost.parts import Parts

        yield Bench([Parts(job, gpus, clock, shallow=shallow, run=run)])
        return
    context = _forks(job)
    places = [Worker(context, job, gpus, clock, shallow, run) for _ in range(workers)]
    try:
        yield Bench(places)
    except BaseException:
        for place in places:
            place.process.terminate()
        raise
    finally:
        for place in places:
            place.hurry()
        for place in places:
            place.end()


def at_a_bench(
    answer: Callable[[Bench], _Answer],
    job: Job,
    gpus: Sequence[Gpu | None],
    clock: Clock,
    *,
    workers: int,
    run: Run,
    tell: Callable[[str], None],
) -> _Answer:
    """What `answer` finds with parts of few layers, where those tell; else with whole models."""
    for shallow in (True, False):
        with bench(job, gpus, clock, workers=workers, shallow=shallow, run=run) as at:
            try:
                return answer(at)
            except BelowLowerBound:
                tell("the layers do not scale evenly: starting again with whole models")
    raise AssertionError("a whole rehearsal is never less than itself")


def _asked(parts: Parts, method: str, arguments: tuple[Any, ...]) -> Any | SnugfitError:
    try:
        return getattr(parts, method)(*arguments)
    except SnugfitError as refusal:
        return refusal


def _travels(what: Any) -> bool:
    try:
        pickle.dumps(what)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return what[0].model.module is None


# ---- in a worker -----------------------------------------------------------------------------------------


def _answers(
    asked: Connection, job: Job, gpus: Sequence[Gpu | None], clock: Clock, shallow: bool, run: Run
) -> None:
    """Answers until nobody asks any more. Ctrl-C ends it without a word, and so does the end of whoever
    asked."""
    from snugfit.planning.cost.parts import Parts

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled, and bitsandbytes would load the compiler
    gc.freeze()
    gc.set_threshold(FEW_COLLECTIONS, 50, 50)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait_for([sentinel]), os._exit(1)), daemon=True).start()
    parts = Parts(job, gpus, clock, shallow=shallow, run=run)
    while True:
        try:
            method, arguments = asked.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, str] = _asked(parts, method, arguments), ""
        except Exception:
            answer = None, traceback.format_exc()
        try:
            asked.send(answer)
        except OSError:  # nobody listens any more
            return
