"""The data loader of snugfit's own loop: the host micro-batches of each step, from worker processes if there
are any.

One torch DataLoader provides all steps of a run, so its workers start only once. If a worker dies, torch
raises a `RuntimeError` from a signal handler, at any point of the main thread. This module turns it into an
error with a clear cause.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, final

from snugfit.errors import OutOfMemory, SnugfitError
from snugfit.step.batches import cast_inputs
from snugfit.step.wishes.model import input_dtype
from snugfit.training.run.order import SampleOrder

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

Collate = Callable[[list[Any]], dict[str, Any]]
Fetched = TypeVar("Fetched")

PREFETCH_STEPS = 2
"""Number of steps for which data loader workers prepare batches in advance."""

_WORKER_DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? [0-9, ]+\) (?:is killed by |exited )([^.]*)")
"""Pattern of torch's messages about a dead data loader worker (torch/csrc/DataLoader.cpp and
torch/utils/data/dataloader.py)."""

REPORTED_WITHIN = 2.0
"""Seconds to wait for the system to report a dead worker's exit code."""


def collate_for(job: Job, setup: Setup, collate: Collate) -> Collate:
    """Return a collate function that also casts inputs to the weights' dtype, unless autocast casts them.

    Pictures and sound are made in fp32, and a model with all weights in bfloat16 takes only bfloat16.
    """
    dtype = input_dtype(job, setup)
    return collate if dtype is None else functools.partial(_collate_and_cast, collate, dtype)


def _collate_and_cast(collate: Collate, dtype: str, samples: list[Any]) -> dict[str, Any]:
    return cast_inputs(collate(samples), dtype)


def feed(
    samples: Sequence[Mapping[str, Any]],
    order: SampleOrder,
    collate: Collate,
    *,
    start_step: int,
    stop_step: int,
    workers: int = 0,
    pinned: bool = False,
) -> Generator[list[dict[str, torch.Tensor]]]:
    """Yield the host micro-batches of steps `start_step` up to, not including, `stop_step`.

    One DataLoader of torch serves all of these steps. Workers are started once, not at each epoch, and
    prepare `PREFETCH_STEPS` steps ahead. Its random numbers are its own. A model's dropout is therefore
    independent of the number of workers and restarts.
    """
    import torch

    # The number of prefetched micro-batches is per worker. torch's default is 2.
    ahead = max(2, -(-PREFETCH_STEPS * order.micro_batches // workers)) if workers else None
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        cast("torch.utils.data.Dataset[Any]", _EpochDataset(samples, collate)),
        batch_sampler=_epoch_keys(order, start_step, stop_step),
        collate_fn=_identity,
        num_workers=workers,
        pin_memory=pinned,
        prefetch_factor=ahead,
        worker_init_fn=_ignore_signals_of_others if workers else None,
        # The loader draws a seed for its workers. From the default generator, this draw would change the
        # dropout masks.
        generator=torch.Generator().manual_seed(0),
    )
    batches = iter(loader)
    try:
        for step in range(start_step, stop_step):
            yield [_next(batches) for _ in order.step(step)]
    finally:
        if workers:  # else a traceback keeps the iterator alive, which waits 5 s for each worker
            batches._shutdown_workers()  # type: ignore[attr-defined]


@final
class Prefetcher(Generic[Fetched]):
    """Fetches the next step's batches while the device works, for every front-end."""

    def __init__(self, make: Callable[[], Fetched]) -> None:
        self.make = make
        """Function that returns the next step's batches."""
        self._fetched: list[Fetched] = []
        self._fault: Exception | None = None
        self.fetching_seconds = 0.0
        """Seconds that the last call of `make` took."""

    def fetch(self) -> None:
        """Load the next step's batches and store them, unless they are stored already.

        An error is stored too and raised by `take`, because the current step has not caused it.
        """
        if self._fetched or self._fault is not None:
            return
        began = time.perf_counter()
        try:
            self._fetched.append(self.make())
        except Exception as fault:
            self._fault = fault
        self.fetching_seconds = time.perf_counter() - began

    def take(self) -> Fetched:
        """Return the next batches: those that were fetched ahead, or those of `make()`."""
        self.fetch()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        return self._fetched.pop()


def _epoch_keys(order: SampleOrder, start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the (epoch, sample) index pairs of each micro-batch in order, as keys for the DataLoader."""
    for step in range(start, stop):
        epoch = order.epoch(step)
        for piece in order.with_stand_ins(step):
            yield [(epoch, index) for index in piece]


@final
class _EpochDataset:
    """A dataset of whole batches by epoch and index. Masks differ between epochs, and the same workers serve
    all epochs.

    Errors of snugfit, such as for a damaged picture, are returned in place of a batch. An error raised in a
    worker would have the worker's traceback in its message.
    """

    def __init__(
        self,
        samples: Sequence[Mapping[str, Any]],
        collate: Collate,
    ) -> None:
        self._samples, self._collate = samples, collate

    # torch calls this method once per batch, so a worker collates a whole micro-batch.
    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor] | SnugfitError:
        try:
            return self._collate([self._sample(*key) for key in keys])
        except SnugfitError as fault:
            return fault

    def _sample(self, epoch: int, index: int) -> Mapping[str, Any]:
        if hasattr(self._samples, "sample"):
            sample: Mapping[str, Any] = self._samples.sample(index, epoch=epoch)
            return sample
        return self._samples[index]


def _identity(batch: Any) -> Any:
    """Return the batch unchanged, since `_EpochDataset` has collated it already."""
    return batch


def _next(batches: Iterator[Any]) -> dict[str, torch.Tensor]:
    with report_worker_death(getattr(batches, "_workers", ())):
        batch = next(batches)
    if isinstance(batch, SnugfitError):
        raise batch
    return cast("dict[str, torch.Tensor]", batch)


@contextmanager
def report_worker_death(workers: Sequence[BaseProcess] = ()) -> Iterator[None]:
    """Context that turns the death of a loader's worker into a `SnugfitError`, or `OutOfMemory` if the system
    killed it.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as fault:
        cause = _cause_of_death(fault, workers)
        if cause is None:
            raise
    else:
        return
    text = f"A worker process of the loader has ended ({cause}). Start the command again to resume the run."
    if "signal: Killed" not in cause:
        raise SnugfitError(text)
    raise OutOfMemory(
        f"{text} The system does this when the machine's memory runs out. Fewer worker processes need less."
    )


def _cause_of_death(fault: Exception, workers: Sequence[BaseProcess]) -> str | None:
    """Return the cause of a worker's death if this error comes from one, else None.

    A worker sends its batches itself, so its death during that breaks a connection. torch then reports at
    most that it `exited unexpectedly`.
    """
    reports = (_WORKER_DEATH.match(str(error)) for error in (fault, fault.__cause__))
    reported = next((report[1] for report in reports if report), None)
    if isinstance(fault, RuntimeError) and reported != "unexpectedly":
        return reported
    return _signal_of(workers) or reported


def _signal_of(workers: Sequence[BaseProcess]) -> str | None:
    """Return the signal that ended one of the workers, in torch's wording.

    A process's sockets close a moment before the system reports its end. The exit codes are therefore read
    for `REPORTED_WITHIN` seconds.
    """
    until = time.monotonic() + REPORTED_WITHIN
    while workers and time.monotonic() < until:
        codes = [worker.exitcode for worker in workers]
        killed = next((code for code in codes if code is not None and code < 0), None)
        if killed is not None:
            return f"signal: {signal.strsignal(-killed)}"
        time.sleep(0.01)
    return None


def _ignore_signals_of_others(worker: int) -> None:
    """Ignore signals to the whole process group in a worker, such as Ctrl-C or a scheduler's SIGTERM.

    The training loop handles these signals: it stops at a step's end and needs this worker's batches until
    then. The worker ends on its parent's signal, or after its parent's end, which torch checks every few
    seconds.
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # on Linux, this returns the signal's sender
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_parents_sigterm, args=(os.getppid(),), daemon=True).start()


def _exit_on_parents_sigterm(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
