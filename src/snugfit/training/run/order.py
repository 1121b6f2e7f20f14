"""Which samples each optimizer step sees, as a function of (seed, step), and the loader that brings them.

    epoch e          a permutation of all samples, drawn from (seed, e)
    step k           the (k mod steps)-th global batch of epoch k // steps
    micro-batches    that batch, cut into pieces of one size

There is no state: asked for step 70,000, `Order` answers as it would have after 69,999 others. So a resumed
run goes on with the very samples that come next, whatever happened before, and another cut into micro-batches
(after memory ran out) changes no step's samples.

With `bucket`, samples of like length come together, as transformers' `group_by_length` has it: the
permutation is cut into windows of 50 batches, each window is sorted by length and cut into batches, and the
batches are shuffled. Within a batch samples are sorted too, so that each micro-batch is padded least. An
epoch's last, smaller batch is set apart before sorting, so that it is a random sample like any other, and
comes last.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast, final

from snugfit.errors import SnugfitError, UsageError
from snugfit.training.run.worker_death import deaths_told

if TYPE_CHECKING:
    import numpy as np
    import torch

WINDOW = 50
"""Batches that are sorted together: transformers' own number."""

Pieces = tuple[tuple[int, ...], ...]
"""The samples of each micro-batch of a step."""


@final
@dataclass(frozen=True, eq=False)
class Order:
    """The samples of every step of a run."""

    samples: int
    """How many there are."""

    batch_size: int
    """Samples of one optimizer step."""

    micro_batches: int
    """Pieces that each step is cut into."""

    seed: int = field(kw_only=True)
    """Of the permutations."""

    shuffle: bool = field(default=True, kw_only=True)
    """False keeps the samples as they lie."""

    drop_last: bool = field(default=False, kw_only=True)
    """Leave out the samples that do not fill an epoch's last batch."""

    lengths: Sequence[int] | np.ndarray | None = field(default=None, kw_only=True, repr=False)
    """Tokens of each sample, for `bucket`."""

    bucket: bool = field(default=False, kw_only=True)
    """Put samples of like length together."""

    def __post_init__(self) -> None:
        for name, value in (
            ("batch size", self.batch_size),
            ("micro-batches", self.micro_batches),
            ("samples", self.samples),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}: {value!r} is not allowed; it is a whole number from 1 up.")
        if self.batch_size % self.micro_batches:
            raise UsageError(
                f"A batch of {self.batch_size} cannot be cut into {self.micro_batches} micro-batches of one"
                " size."
            )
        if not self.steps_per_epoch:
            raise UsageError(
                f"{self.samples} samples do not fill one batch of {self.batch_size}, and drop_last leaves out"
                " what does not. Turn it off, or take a smaller batch."
            )
        if self.bucket and (self.lengths is None or len(self.lengths) != self.samples):
            raise UsageError("Grouping by length needs the length of every sample.")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sample once."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def epoch(self, step: int) -> int:
        """The one that this step belongs to, from 0."""
        return step // self.steps_per_epoch

    def step(self, step: int) -> Pieces:
        """The samples of the micro-batches of the `step`-th optimizer step of the whole run, from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        batch = _epoch(self, epoch)[first : first + self.batch_size].tolist()
        size = self.batch_size // self.micro_batches
        pieces = -(-len(batch) // size)
        ends = [len(batch) * (piece + 1) // pieces for piece in range(pieces)]
        return tuple(tuple(batch[start:end]) for start, end in zip([0, *ends], ends, strict=False))


@lru_cache(maxsize=4)
def _epoch(order: Order, epoch: int) -> np.ndarray:
    """An epoch's samples, global batch after global batch."""
    import numpy as np

    draw = np.random.Generator(np.random.PCG64([order.seed, epoch]))
    samples = draw.permutation(order.samples) if order.shuffle else np.arange(order.samples)
    if not order.bucket:
        return samples
    size = order.batch_size
    whole = order.samples // size
    lengths = np.asarray(order.lengths)
    batches = _by_length(samples[: whole * size], lengths, WINDOW * size).reshape(whole, size)
    if order.shuffle:
        batches = draw.permutation(batches)
    last = _by_length(samples[whole * size :], lengths, size)
    return np.concatenate([_by_length(batches.ravel(), lengths, size), last])


def _by_length(samples: np.ndarray, lengths: np.ndarray, window: int) -> np.ndarray:
    """The samples, the longest of each window first."""
    import numpy as np

    windows = np.arange(len(samples)) // window
    return samples[np.lexsort((-lengths[samples], windows))]


# ---- the loader -----------------------------------------------------------------------------------------


def feed(
    samples: Sequence[Mapping[str, Any]],
    order: Order,
    collate: Callable[[list[Any]], dict[str, torch.Tensor]],
    *,
    start_step: int,
    stop_step: int,
    workers: int = 0,
    pinned: bool = False,
    prefetch_steps: int = 2,
) -> Generator[list[dict[str, torch.Tensor]]]:
    """The host micro-batches of steps `start_step` up to, not including, `stop_step`.

    Through torch's DataLoader, over all of these steps at once: workers are started once, not at each epoch,
    and make `prefetch_steps` steps ahead. Its random numbers are its own, so that a model's dropout is the
    same however often and with however many workers a run was started.
    """
    import torch

    ahead = max(2, -(-prefetch_steps * order.micro_batches // workers)) if workers else None
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        cast("torch.utils.data.Dataset[Any]", _AtEpoch(samples, collate)),
        batch_sampler=_Keys(order, start_step, stop_step),
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=pinned,
        prefetch_factor=ahead,
        worker_init_fn=_obey_the_parent_alone if workers else None,
        generator=torch.Generator().manual_seed(0),
    )
    batches = iter(loader)
    try:
        for step in range(start_step, stop_step):
            yield [_told(_next(batches)) for _ in order.step(step)]
    finally:
        if workers:  # else an error's traceback keeps the iterator, which then waits 5 s for each of them
            batches._shutdown_workers()  # type: ignore[attr-defined]


@final
class Ahead:
    """Takes from a feed, and fetches what comes next while something else is going on."""

    def __init__(self, batches: Iterator[list[dict[str, torch.Tensor]]]) -> None:
        self._batches = batches
        self._fetched: list[list[dict[str, torch.Tensor]] | None] = []
        self._fault: Exception | None = None
        self.fetching_seconds = 0.0
        """How long the last fetch took."""

    def fetch(self) -> None:
        """Waits for the next step's micro-batches and keeps them. What goes wrong is told to who takes them:
        it is no fault of what is going on meanwhile."""
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


@final
class _Keys:
    """For the loader: the (epoch, sample) pairs of one micro-batch after the other."""

    def __init__(self, order: Order, start: int, stop: int) -> None:
        self._order, self._steps = order, range(start, stop)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self._steps:
            epoch = self._order.epoch(step)
            for piece in self._order.step(step):
                yield [(epoch, index) for index in piece]


@final
class _AtEpoch:
    """Batches of samples by epoch and index: masks differ between epochs, and workers live through all of
    them. An error of ours, such as a picture that is broken, comes as it is in the batch's place: a worker
    that raises it would have its traceback put into the message."""

    def __init__(
        self,
        samples: Sequence[Mapping[str, Any]],
        collate: Callable[[list[Any]], dict[str, torch.Tensor]],
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


def _as_it_is(batch: Any) -> Any:
    """What `_AtEpoch` has put together already."""
    return batch


def _next(batches: Iterator[Any]) -> Any:
    with deaths_told():
        return next(batches)


def _told(batch: Any) -> dict[str, torch.Tensor]:
    if isinstance(batch, SnugfitError):
        raise batch
    return cast("dict[str, torch.Tensor]", batch)


def _obey_the_parent_alone(worker: int) -> None:
    """Signals to a whole process group (Ctrl-C, a scheduler's SIGTERM) are for the loop, which stops at a
    step's end and needs this worker's batches until then. The worker ends when its parent says so, or when it
    is gone, for which torch looks every few seconds."""
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux: it tells who has sent the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_until_told, args=(os.getppid(),), daemon=True).start()


def _until_told(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
