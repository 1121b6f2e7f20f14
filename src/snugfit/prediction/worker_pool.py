"""A pool of worker processes that predict in parallel.

Each worker has its own copy of an object and calls its methods, one at a time. The object caches its results,
so the caller chooses the worker for each call. The object stays in this process if it cannot be pickled, or
if one process is enough. Each call then returns immediately.

The processes are forks of a fork server, which has imported torch but not run any operator. A fork of a
process that has run operators is not safe. A worker and its parent share only a pipe, so nothing of the
worker remains when it ends. It also ends with its parent, even when that is killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

from snugfit.errors import SnugfitError, UsageError

PRELOAD = ("snugfit.prediction.quiet_workers", "torch", "transformers", "snugfit.prediction.predict")
"""Modules that the fork server imports before it starts workers."""

FEW_COLLECTIONS = 1_000_000, 50, 50
"""Thresholds of Python's garbage collector (`gc.set_threshold`). Traces have millions of objects without
reference cycles. Models have cycles, of some megabytes each. With a tenth of the first threshold, garbage
collection took 5 % of a plan's time. With Python's default it took 20 % of a prediction's time.
"""

END_SECONDS = 2.0
"""Seconds that a worker process has to end by itself after its last call."""

UNGUARDED_EXIT_CODE = 76
"""Exit code of a worker process that imported a user's script without a `__main__` guard, and would start
workers itself.
"""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Question(NamedTuple):
    """A request to a worker process: the method to call on its object, with arguments."""

    number: int
    """Number of the call. The answer to it has the same number."""
    method: str
    arguments: tuple[Any, ...] = ()


class CallResult(NamedTuple):
    """The result of a method call in a worker."""

    number: int
    value: Any
    """The method's return value, or the `SnugfitError` that it raised."""


class _Worker:
    """A process with its own object, which runs one method call at a time."""

    def __init__(self, context: Any, make: Callable[[], Any]) -> None:
        # Each worker has a separate pipe, so no data of it remains if the worker is killed.
        self.connection, child_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(child_end, make), daemon=True)
        with _main_of_a_file():
            self._start()
        # Only the child needs its end. An open copy here would hide its death.
        child_end.close()

    def _start(self) -> None:
        """Start the process. Raises `SnugfitError` if the fork server is killed twice meanwhile."""
        with suppress(EOFError, OSError):
            self.process.start()
        if self.process.pid is not None:
            return
        try:
            self.process.start()  # which starts another fork server
        except (EOFError, OSError) as error:
            raise SnugfitError(
                f"No worker process can be started ({str(error) or 'the fork server was killed'}), perhaps "
                "because memory ran out. Try one worker (--workers 1; workers=1 in Python)."
            ) from None

    def send(self, question: Question) -> None:
        """Send the method call without waiting. Raises `SnugfitError` when the process has died."""
        try:
            self.connection.send(question)
        except OSError:
            raise self._death() from None

    def receive(self) -> CallResult:
        """Wait for the answer to the last call, and return it.

        Raises `SnugfitError` when the process has died. Raises `RuntimeError` with the worker's traceback for
        an unexpected exception.
        """
        try:
            answer, bug = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if bug:
            raise RuntimeError(f"in a worker process:\n{bug}")
        return CallResult(*answer)

    def _death(self) -> SnugfitError:
        # The exit code is known only after the process has ended.
        self.process.join(END_SECONDS)
        if self.process.exitcode != UNGUARDED_EXIT_CODE:
            return SnugfitError(
                "A worker process was killed, perhaps because memory ran out. Try one worker "
                "(--workers 1; workers=1 in Python)."
            )
        return UsageError(
            "snugfit starts worker processes, and each of them imports the calling script. Put the call "
            "under `if __name__ == '__main__':`, or use workers=1."
        )

    def end(self) -> None:
        """Wait for the process to end, and kill it after `END_SECONDS` seconds. The caller has closed its
        connection."""
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            # The answers have arrived, so nothing depends on the end of this process.
            self.process.join(END_SECONDS)


class SpareProcesses:
    """Thread-safe counter of additional processes that a pool may start, because another pool has ended."""

    def __init__(self) -> None:
        self._spare = threading.Semaphore(0)

    def give(self) -> None:
        """Add one process to the count of spare processes."""
        self._spare.release()

    def take(self) -> bool:
        """Claim permission to start one more process, without waiting. Return False if the count is zero."""
        return self._spare.acquire(blocking=False)


class WorkerPool:
    """A pool of workers, each a process or an object in this process. `another` starts and returns a further
    worker (a helper), or None if no process is spare."""

    def __init__(self, workers: Sequence[Any], another: Callable[[], _Worker | None] = lambda: None) -> None:
        self.workers, self._another = workers, another
        self._helpers: list[_Worker] = []

    def results(
        self, next_call: Callable[[int], Question | None], *, helped: bool = False
    ) -> Iterator[CallResult]:
        """Send the method call that `ask(worker number)` returns to each idle worker, and yield each answer
        when it arrives.

        Iteration ends when `next_call` returns None for every worker. With `helped`, helpers (additional
        processes) receive calls too.
        """
        busy: dict[Any, _Worker] = {}
        while True:
            # An object in this process returns its answer at once, without a pipe.
            at_once: list[CallResult] = []
            if helped and (helper := self._another()) is not None:
                self._helpers.append(helper)
            for number, worker in enumerate([*self.workers, *(self._helpers if helped else ())]):
                if worker in busy.values() or (question := next_call(number)) is None:
                    continue
                if isinstance(worker, _Worker):
                    worker.send(question)
                    busy[worker.connection] = worker
                else:
                    at_once.append(_call(worker, question))
            yield from at_once
            if not busy and not at_once:
                return
            for connection in wait(busy) if busy and not at_once else ():
                yield busy.pop(connection).receive()

    def answers_to(
        self,
        questions: Iterable[Question],
        is_for: Callable[[int, Question], bool] = lambda worker, question: True,
    ) -> Iterator[CallResult]:
        """Run these method calls in the workers, and yield each answer when it arrives.

        Each call goes to the next idle worker or helper for which `is_for(worker number, question)` is True.
        """
        waiting = list(questions)

        def next_call(worker: int) -> Question | None:
            question = next((candidate for candidate in waiting if is_for(worker, candidate)), None)
            if question is not None:
                waiting.remove(question)
            return question

        return self.results(next_call, helped=True)


@contextmanager
def worker_pool(
    make: Callable[[], Any],
    *,
    workers: int,
    preload: Sequence[str] = (),
    own_process: bool = False,
    spare: SpareProcesses | None = None,
) -> Iterator[WorkerPool]:
    """Yield a pool of this number of processes, each with an object that `make` creates there.

    The object is in this process instead if `make` cannot be pickled. The same holds for one worker, unless
    `own_process` requires its own process. `preload` names further modules that the fork server imports.
    Helpers are started while `spare` has processes.
    """
    # Without a pickle, another process could not create the object.
    if (workers <= 1 and not own_process) or not is_picklable(make):
        yield WorkerPool([make()])
        return
    context = _context(preload)
    processes = [_Worker(context, make) for _ in range(workers)]

    def another() -> _Worker | None:
        if spare is None or not spare.take():
            return None
        processes.append(_Worker(context, make))
        return processes[-1]

    try:
        yield WorkerPool(processes[:], another)
    except BaseException:
        # After an error or Ctrl-C the answers are of no use.
        for worker in processes:
            worker.process.terminate()
        raise
    finally:
        for worker in processes:
            # Workers end when their pipe is closed, so all are closed before the first wait.
            worker.connection.close()
        for worker in processes:
            worker.end()


@contextmanager
def few_collections() -> Iterator[None]:
    """Context in which Python's garbage collector runs less often."""
    before = gc.get_threshold()
    gc.set_threshold(*FEW_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def start_fork_server(preload: Sequence[str], *, worker_object: Any) -> None:
    """Start the fork server (parent of worker processes). It imports these modules while this process
    continues.

    Do nothing if the workers' object `worker_object` cannot be pickled, since no worker starts then.
    """
    if is_picklable(worker_object):
        _context(preload)


def map_in_processes(
    function: Callable[[_Item], _Result],
    items: Sequence[_Item],
    *,
    workers: int,
    preload: Sequence[str] = (),
) -> Iterator[_Result]:
    """Yield the result of `function` for each item, in order, each as soon as it and all earlier ones are
    available.

    Raises an item's `SnugfitError` in place of its result. Function, items and results must be picklable.
    `preload` names further modules that the fork server imports.
    """
    if workers <= 1 or len(items) <= 1:
        yield from map(function, items)
        return
    early: dict[int, Any] = {}
    done = 0
    workers = min(workers, len(items))
    with worker_pool(partial(_itself, function), workers=workers, preload=preload) as pool:
        questions = (Question(number, "__call__", (item,)) for number, item in enumerate(items))
        for answer in pool.answers_to(questions):
            early[answer.number] = answer.value
            while done in early:
                value = early.pop(done)
                done += 1
                if isinstance(value, SnugfitError):
                    raise value
                yield value


def is_picklable(value: Any) -> bool:
    """Return True if an object can be pickled for a worker process. Objects defined in a script without a
    file (stdin) cannot."""
    try:
        sent = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    # A script from stdin has no file that a worker could import.
    return _is_main_a_file() or b"__main__" not in sent


def _is_main_a_file() -> bool:
    """Return True if the `__main__` module has a file.

    It has none in a notebook, or if it comes from stdin (`python - <<END`).
    """
    return os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or "")


@contextmanager
def _main_of_a_file() -> Iterator[None]:
    """Context in which a new process imports the `__main__` script only if the script is a file.

    The name of a script from stdin is `<stdin>`, and a process that opens such a file fails.
    """
    main: Any = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if name is None or _is_main_a_file():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


def _context(preload: Sequence[str]) -> Any:
    """Return the multiprocessing context of new workers, with its fork server running.

    The fork server ignores Ctrl-C, since Python would print a traceback during its imports. It ends with this
    process.
    """
    # This process is a worker that imports the user's script again, and must not start workers itself.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED_EXIT_CODE)  # the parent reports the reason
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    if threading.current_thread() is not threading.main_thread():  # other threads may not change signals
        forkserver.ensure_running()
        return context
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the new process inherits
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    return context


def _itself(function: _Item) -> _Item:
    return function


def _call(target: Any, question: Question) -> CallResult:
    try:
        return CallResult(question.number, getattr(target, question.method)(*question.arguments))
    except SnugfitError as error:
        return CallResult(question.number, error)


# ---- in a worker -----------------------------------------------------------------------------------------


def _serve(questions: Connection, make: Callable[[], Any]) -> None:
    """Run a worker's main loop: execute method calls and send their results until the pipe is closed. Ctrl-C
    and the parent's end stop it without a message.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no compilation here, and bitsandbytes would load the compiler
    gc.set_threshold(*FEW_COLLECTIONS)
    # Workers inherit an ignored Ctrl-C from the fork server.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        # A killed parent closes its sentinel; the thread ends the worker even in the middle of a computation.
        threading.Thread(target=lambda: (wait([sentinel]), os._exit(1)), daemon=True).start()
    target = make()
    while True:
        try:
            question = questions.recv()
        except EOFError:
            return
        try:
            answer: tuple[CallResult | None, str] = _call(target, question), ""
        except Exception:
            answer = None, traceback.format_exc()
        try:
            questions.send(answer)
        except OSError:  # the parent has closed the pipe
            return
