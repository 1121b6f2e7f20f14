"""The loader of our own loop: the host micro-batches of each step, from worker processes where there are any.

torch's DataLoader over all steps of a run at once, so that workers are started once. For a worker that dies
torch raises a `RuntimeError` from a signal handler, wherever the main thread is at that moment; here it
becomes an error that says what happened.
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
from typing import TYPE_CHECKING, Any, cast, final

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

PREFETCH_STEPS = 2
"""Steps whose batches the workers make ahead of the step that runs."""

_WORKER_DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? [0-9, ]+\) (?:is killed by |exited )([^.]*)")
"""The wording of torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py."""

REPORTED_WITHIN = 2.0
"""Seconds that the system may take to report a dead worker."""


def collate_for(job: Job, setup: Setup, collate: Collate) -> Collate:
    """`collate`, and a cast to the weights' dtype where nothing else casts: pictures and sound are made in
    fp32, and a model whose weights are all bfloat16 takes them only so."""
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
    """The host micro-batches of steps `start_step` up to, not including, `stop_step`.

    Through torch's DataLoader, over all of these steps at once: workers are started once, not at each epoch,
    and make `PREFETCH_STEPS` steps ahead. Its random numbers are its own, so that a model's dropout is the
    same however often and with however many workers a run was started.
    """
    import torch

    ahead = max(2, -(-PREFETCH_STEPS * order.micro_batches // workers)) if workers else None
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        cast("torch.utils.data.Dataset[Any]", _EpochDataset(samples, collate)),
        batch_sampler=_epoch_keys(order, start_step, stop_step),
        collate_fn=_identity,
        num_workers=workers,
        pin_memory=pinned,
        prefetch_factor=ahead,
        worker_init_fn=_ignore_signals_of_others if workers else None,
        generator=torch.Generator().manual_seed(0),
    )
    batches = iter(loader)
    try:
        for step in range(start_step, stop_step):
            yield [_next(batches) for _ in order.step(step)]
    finally:
        if workers:  # else an error's traceback keeps the iterator, which then waits 5 s for each of them
            batches._shutdown_workers()  # type: ignore[attr-defined]


@final
class Prefetcher:
    """Takes from a feed, and fetches what comes next while something else is going on."""

    def __init__(self, batches: Iterator[list[dict[str, torch.Tensor]]]) -> None:
        self._batches = batches
        self._fetched: list[list[dict[str, torch.Tensor]] | None] = []
        self._fault: Exception | None = None
        self.fetching_seconds = 0.0
        """How long the last fetch took."""

    def fetch(self) -> None:
        """Waits for the next step's micro-batches and keeps them. What goes wrong is raised when they are
        taken: it is no fault of what is going on meanwhile."""
        began = time.perf_counter()
        try:
            self._fetched.append(next(self._batches, None))
        except Exception as fault:
            self._fault = fault
        self.fetching_seconds = time.perf_counter() - began

    def take(self) -> list[dict[str, torch.Tensor]] | None:
        """The next step's micro-batches; None after the last."""
        if not self._fetched and self._fault is None:
            self.fetch()
        if self._fault is not None:
            raise self._fault
        return self._fetched.pop(0)


def _epoch_keys(order: SampleOrder, start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
    """For the loader: the (epoch, sample) pairs of one micro-batch after the other."""
    for step in range(start, stop):
        epoch = order.epoch(step)
        for piece in order.with_stand_ins(step):
            yield [(epoch, index) for index in piece]


@final
class _EpochDataset:
    """Batches of samples by epoch and index: masks differ between epochs, and workers live through all of
    them. An error of ours, such as a picture that is broken, comes as it is in the batch's place: a worker
    that raises it would have its traceback put into the message."""

    def __init__(
        self,
        samples: Sequence[Mapping[str, Any]],
        collate: Collate,
    ) -> None:
        self._samples, self._collate = samples, collate

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
    """What `_EpochDataset` has put together already."""
    return batch


def _next(batches: Iterator[Any]) -> dict[str, torch.Tensor]:
    with report_worker_death(getattr(batches, "_workers", ())):
        batch = next(batches)
    if isinstance(batch, SnugfitError):
        raise batch
    return cast("dict[str, torch.Tensor]", batch)


@contextmanager
def report_worker_death(workers: Sequence[BaseProcess] = ()) -> Iterator[None]:
    """Raises `SnugfitError` for a worker that died in here; `OutOfMemory` where it looks like that."""
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
    """How a worker ended, when this error is of one that did. A worker hands its batches over itself, so one
    that dies meanwhile breaks a connection; torch then knows at most that it `exited unexpectedly`."""
    reports = (_WORKER_DEATH.match(str(error)) for error in (fault, fault.__cause__))
    reported = next((report[1] for report in reports if report), None)
    if isinstance(fault, RuntimeError) and reported != "unexpectedly":
        return reported
    return _signal_of(workers) or reported


def _signal_of(workers: Sequence[BaseProcess]) -> str | None:
    """The signal that ended one of them, as torch writes it. A process's sockets close a moment before the
    system says that it ended, so this is asked for `REPORTED_WITHIN` seconds."""
    until = time.monotonic() + REPORTED_WITHIN
    while workers and time.monotonic() < until:
        codes = [worker.exitcode for worker in workers]
        killed = next((code for code in codes if code is not None and code < 0), None)
        if killed is not None:
            return f"signal: {signal.strsignal(-killed)}"
        time.sleep(0.01)
    return None


def _ignore_signals_of_others(worker: int) -> None:
    """Signals to a whole process group (Ctrl-C, a scheduler's SIGTERM) are for the loop, which stops at a
    step's end and needs this worker's batches until then. The worker ends when its parent says so, or when it
    is gone, for which torch looks every few seconds."""
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux: it tells who has sent the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_parents_sigterm, args=(os.getppid(),), daemon=True).start()


def _exit_on_parents_sigterm(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
