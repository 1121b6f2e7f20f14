"""A user's data loader: a copy with other arguments, or a restart in the middle of an epoch.

A resumed run must continue with the next batches in order. The loader is restarted with the random states of
the epoch's beginning.

    torch's own, without workers    draws the order again, and creates only the last of the previous batches,
                                    from the states before it.
    any other                       (streams, workers, custom loaders) creates all previous batches again, and
                                    they are discarded.

In both cases the last trained batch is loaded again, and its fingerprint must match the checkpoint's.
Otherwise the data has changed, or depends on state outside of the checkpoint. The run is then not resumed.

**Position.** The data has random generators of its own (`data_rng.py`). A checkpoint stores their states at
an epoch's beginning and before each batch. It also stores the epoch and its number of trained batches. A
resumed run restores them. transformers itself computes the position from the number of steps. That is wrong
for a stream after its first epoch. It also does not load the last trained batch for a comparison.

**Prefetching.** A run that checks the gradients before each update makes the GPU wait. The GPU is idle until
the update and the next forward pass are launched. The plain Trainer loads the next batch in between, after
the update. With BERT-large at 4 x 512 in fp32, a step thus took 6.1 % longer than in the bare loop
(results/h200-2026-11-22/train-overhead-doors-waiting.json). Loading the batch while the device is still in
the previous backward pass reduces this to 2.8 % (train-overhead-doors.json).

**The first batch.** The first batch of a user's loader, which gives a job its input shapes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, final

from snugfit.errors import SnugfitError, UsageError, one_line
from snugfit.features.loops.data_rng import DataRng, DataRngStates, states_from_json
from snugfit.job.batch_layout import map_leaves
from snugfit.training.rng import preserve_rng

if TYPE_CHECKING:
    import torch


SAMPLED = 4096
"""Number of values of a tensor that enter its fingerprint, spread evenly.

Noise changes nearly all values. Reading every value of a batch of pictures would take longer than creating
it.
"""


class BatchMark(NamedTuple):
    """States of the random generators before a batch is loaded, and a fingerprint of the batch."""

    before: DataRngStates
    fingerprint: str

    def to_json(self) -> list[Any]:
        """Return the random states and the batch's fingerprint as JSON values, which `mark_from_json`
        reads.
        """
        return [self.before.to_json(), self.fingerprint]


def mark_from_json(document: list[Any] | None) -> BatchMark | None:
    """Return the `BatchMark` in the JSON values of `BatchMark.to_json`; None for None."""
    return None if document is None else BatchMark(states_from_json(document[0]), document[1])


def fingerprint_of(batch: Any) -> str:
    """Return a hash of a batch's content: tensors, arrays, numbers and text in mappings and sequences."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(batch):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    import numpy
    import torch

    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(numpy.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        # Equal bytes of another shape are a different batch.
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if value.device.type == "cpu" and value.layout is torch.strided and value.numel():
            flat = value.detach().flatten()[:: max(1, value.numel() // SAMPLED)].contiguous()
            yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name).encode()
            yield from _parts(inner)
    elif isinstance(value, list | tuple):
        # The length distinguishes [[a], b] from [[a, b]].
        yield str(len(value)).encode()
        for inner in value:
            yield from _parts(inner)
    elif isinstance(value, str | bool | int | float):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()


def count_of(things: Any) -> int | None:
    """Return the length of a loader or dataset, or None if it has no length. A `DataLoader` over a stream
    raises in `__len__`.
    """
    try:
        return len(things)
    except (TypeError, NotImplementedError):
        return None


def made_like(loader: Any, **changed: Any) -> Any:
    """Return a copy of a torch `DataLoader` with these constructor arguments changed."""
    import torch

    names = [
        "dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
        "multiprocessing_context", "generator", "in_order",
    ]  # fmt: skip
    is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    # torch allows no sampler for an iterable dataset
    names += ["batch_size", "drop_last"] if is_stream else ["batch_sampler"]
    return torch.utils.data.DataLoader(**{**{name: getattr(loader, name) for name in names}, **changed})


def is_torchs(loader: Any) -> bool:
    """Return True for a torch `DataLoader` that collates its samples to batches itself."""
    import torch

    return type(loader) is torch.utils.data.DataLoader and loader.batch_sampler is not None


def is_plain(loader: Any) -> bool:
    """Return True for a torch `DataLoader` whose batches of an indexable dataset come from a sampler."""
    import torch

    return is_torchs(loader) and not isinstance(loader.dataset, torch.utils.data.IterableDataset)


def has_an_order(loader: Any) -> bool:
    """Return True if two epochs from the same random state yield the batches in the same order.

    With `in_order=False` and several workers, the order depends on their speed.
    """
    return getattr(loader, "num_workers", 0) < 2 or getattr(loader, "in_order", True)


def without_workers(loader: Any) -> Any:
    """Return the loader, or for a torch `DataLoader` a copy without worker processes."""
    return made_like(loader, num_workers=0) if is_torchs(loader) and loader.num_workers else loader


def renew_workers(loader: Any) -> None:
    """Start the loader's next epoch with new worker processes, even with `persistent_workers`.

    Workers of an earlier epoch have advanced their generators, which a resumed run cannot repeat. Starting
    new workers also draws a seed.
    """
    real = getattr(loader, "base_dataloader", loader)
    if getattr(real, "persistent_workers", False):
        # torch reuses this iterator, and with it the workers, as long as it exists.
        real._iterator = None


def batches_from(
    loader: Any, position: int, rng: DataRng, last: BatchMark | None, following: DataRngStates | None
) -> Iterator[Any]:
    """Return an iterator over an epoch's batches from `position` on.

    `rng` must be at the epoch's beginning. The batch before `position` is compared with `last`, unless `last`
    is None because the batch size changed. Then the random states before the `following` batch are restored.
    Raises `SnugfitError` when the compared batch differs.
    """
    renew_workers(loader)
    if not position:
        return iter(loader)
    # The last trained batch is loaded again for the comparison.
    passed = position - (last is not None)
    # Without workers the sampler alone is advanced, so that skipped batches are not loaded.
    named = _IteratorKeeper(loader.batch_sampler) if is_plain(loader) and not loader.num_workers else None
    batches: Iterator[Any] = iter(loader if named is None else made_like(loader, batch_sampler=named))
    for _ in range(passed):
        next(batches if named is None else named.names, None)
    if named is not None and last is not None:
        # The skipped batches have drawn no random numbers, so the states before this batch are restored.
        rng.set(last.before)
    if last is not None and fingerprint_of(next(batches, None)) != last.fingerprint:
        raise SnugfitError(
            f"The run cannot be resumed within its epoch: {name_of(loader)} gave another batch "
            f"{position:,} than before. Either the data changed, or it draws random numbers from something "
            "that checkpoints do not contain. They contain the generators of torch, numpy and Python, and "
            "those that are attributes of the loader, its sampler, dataset and collator. Restore the data, "
            "or start a new run."
        )
    if named is not None and following is not None:
        rng.set(following)
    return batches


def name_of(loader: Any) -> str:
    """Return the name of the loader's dataset or class, for messages."""
    dataset = getattr(loader, "dataset", None)
    return f"the {type(loader).__name__}" if dataset is None else f"the dataset {type(dataset).__name__}"


@final
class _IteratorKeeper:
    """A wrapper of a batch sampler that stores the latest iterator over its sample indices."""

    def __init__(self, real: Iterable[Any]) -> None:
        self._real = real
        self.names: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self.names = iter(self._real)
        return self.names


# ---- the position of a run -------------------------------------------------------------------------------

ONCE = Fraction(1)


@final
class DataPosition:
    """The position of a run in its data, with the random states to continue from it.

    It consists of the epoch, its trained batches, and the states of the random generators before each
    remaining batch.
    """

    def __init__(self, loader: Any = None) -> None:
        self.rng = DataRng(loader)
        """Random generators of the loader and its dataset."""

        self.marks: dict[int, BatchMark] = {}
        """Fingerprints and generator states of the epoch's batches, from the last trained one on, by index of
        the batch.
        """

        self.used = 0
        """Number of trained batches in this epoch."""

        self._saved: Mapping[str, Any] | None = None
        self._epoch = self._made = 0
        self._is_exhausted = False
        self.epoch_is_over = False
        """True from an epoch's last batch until the work at its end is done."""

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Restore the random generators to the states in a checkpoint."""
        self.rng.resume(**_states_of(saved, "now"))

    # ---- an epoch ----------------------------------------------------------------------------------------

    def watch(self, loader: Any) -> Any:
        """Return the trainer's loader in a wrapper whose epochs begin at the run's position. accelerate's
        loader wraps the user's.
        """
        shell = loader if hasattr(loader, "base_dataloader") else None
        real = loader if shell is None else shell.base_dataloader
        if isinstance(real, _WatchedLoader):
            return loader
        self.rng.watch(real)
        watched = _WatchedLoader(real, self.batches)
        if shell is None:
            return watched
        shell.base_dataloader = watched
        return loader

    def begin_epoch(self, loader: Any, epoch: int, skipped: int, saved: Mapping[str, Any] | None) -> Any:
        """Return an iterable over the remaining batches of this epoch of a wrapped loader.

        For a resumed run, `saved` has its state, and the first `skipped` batches are left out.
        """
        self._epoch, self.used, self._made, self._saved = epoch, skipped, 0, saved
        self._is_exhausted = self.epoch_is_over = False
        self.marks.clear()
        if saved is not None:
            # The order is drawn at the start of an epoch, so a continued epoch begins with those states.
            self.rng.resume(**_states_of(saved, "began" if skipped else "now"))
        if not skipped:
            self.rng.begin_epoch()
        if skipped and saved and not saved.get("left", True):
            return ()  # accelerate's loaders raise this error if an iterable dataset has no batch
        return loader

    def end_epoch(self) -> None:
        """Mark all batches of the epoch as used, before the Trainer logs and saves at its end."""
        self.epoch_is_over = True
        if self._saved is not None and not self._made:  # the epoch had no batches left at the resume
            self.rng.resume(**_states_of(self._saved, "now"))

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the remaining batches of this epoch from the loader."""
        saved, self._made = self._saved or {}, self.used + 1
        last, following = mark_from_json(saved.get("last")), saved.get("next")
        if last is not None:
            self.marks[self.used - 1] = last
        states = None if following is None else states_from_json(following)
        batches = batches_from(loader, self.used, self.rng, last, states)
        for index in count(self.used):
            before = self.rng.states()
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            self.marks[index] = BatchMark(before, fingerprint_of(batch))
            yield batch

    def use(self, batches: int) -> None:
        """Count this many batches as used by a training step."""
        # The mark of the last trained batch is kept for the comparison after a resume.
        self.marks = {index: mark for index, mark in self.marks.items() if index >= self.used - 1}
        self.used += batches

    def unuse(self, batches: int) -> None:
        """Return `batches` batches of a failed step to the epoch, so that it yields them again."""
        self.used -= batches

    # ---- state for checkpoints ---------------------------------------------------------------------------

    def to_json(self, rows: int) -> dict[str, Any]:
        """Return the data position as JSON values for a checkpoint; `rows` is the number of samples in a
        batch.
        """
        following, last = self.marks.get(self.used), self.marks.get(self.used - 1)
        return {
            "epoch": self._epoch + self.epoch_is_over,
            "place": 0 if self.epoch_is_over else self.used,
            "rows": rows,
            "left": not self._is_exhausted or following is not None,
            "began": self.rng.at_epoch_start.to_json(),
            "now": self.rng.between_epochs.to_json(),
            "next": following.before.to_json() if following else None,
            "last": last.to_json() if last else None,
        }


def position_of(saved: Mapping[str, Any], rows: int, *, more: Fraction = ONCE) -> tuple[int, int]:
    """Return the epoch in a checkpoint, and its number of trained batches of `rows` samples in each
    process.
    """
    # If the batch size has changed, a partly trained batch counts as trained.
    return saved["epoch"], math.ceil(saved["place"] * saved["rows"] * more / rows)


def _states_of(saved: Mapping[str, Any], now: str) -> dict[str, DataRngStates]:
    return {"at_epoch_start": states_from_json(saved["began"]), "now": states_from_json(saved[now])}


@final
class _WatchedLoader:
    """A wrapper of a data loader whose epochs begin at the run's position in the data."""

    def __init__(self, loader: Any, batches: Callable[[Any], Iterator[Any]]) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # In a copy without this attribute, `self._loader` would recurse endlessly.
        return getattr(vars(self)["_loader"], name)


# ---- the first batch ---------------------------------------------------------------------------------------


def example_of(
    make_loader: Callable[[], Iterable[Any]], device: torch.device, *, resumes: bool
) -> dict[str, Any]:
    """Return the first batch (B, ...) of a loader, on the CPU. Restore all random generators afterwards.

    Raises `UsageError` for an invalid batch. With `resumes`, also raises it if the same random states give
    another batch.
    """
    import torch

    first = _first_of(make_loader(), device)
    if not isinstance(first, Mapping) or not first:
        raise UsageError(
            f"A batch must map the model's arguments to tensors, but the loader gave {first!r:.80}. A "
            "collate_fn can make one."
        )
    if resumes and not has_an_order(make_loader()):
        raise UsageError(
            "With in_order=False batches come in the order in which workers finish, so a resumed run could "
            "not know which it has seen. Leave it out."
        )
    if resumes and fingerprint_of(first) != fingerprint_of(_first_of(loader := make_loader(), device)):
        raise UsageError(
            f"{name_of(loader)[0].upper()}{name_of(loader)[1:]} cannot be read again from its start: its "
            "first batch differs although all random generators were reset. So a resumed run would see "
            "other samples. It may use the system's entropy or a new generator each time, or be a stream "
            "that can be read only once. Draw from torch, numpy or random, or from a generator that is an "
            "attribute of the dataset, and open a stream in __iter__."
        )
    return map_leaves(
        first, lambda _, value: value.detach().cpu() if isinstance(value, torch.Tensor) else value
    )


def _first_of(loader: Any, device: torch.device) -> Any:
    """Return the loader's first batch, without starting worker processes."""
    with preserve_rng(device):
        loader = without_workers(getattr(loader, "base_dataloader", loader))  # accelerate's is a wrapper
        rng = DataRng(loader)
        with rng.preserve():
            rng.begin_epoch()
            try:
                return next(iter(loader), None)
            except SnugfitError:
                raise
            except Exception as error:  # raised by the user's dataset or collate function
                raise UsageError(
                    f"The first batch could not be made ({type(error).__name__}: {one_line(error)}). Try it "
                    "without snugfit: next(iter(loader)), or next(iter(trainer.get_train_dataloader()))."
                ) from error
