"""A step's batches: synthetic samples through torch's own DataLoader, cut into micro-batches.

A simulation needs no workers and no pinned memory, since its batches are never copied. It reads little of
their content either, so one sample represents all: a batch is that sample, expanded. Thus a search can
simulate batches that would not fit on the host. A batch records the samples that it represents, and
`REAL_VALUES` of its tensors returns their content. All other batches come from the loader of the Setup.

Pictures and sound are fp32. Without autocast, a model with weights of another dtype accepts them only in that
dtype. So each sample is cast on the host, as users do who train in bfloat16 throughout.
"""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from snugfit.job.batch import REAL_VALUES, Batch, SyntheticDataset
from snugfit.job.batch_layout import map_leaves
from snugfit.job.inputs import inputs_of
from snugfit.step.applier import loader_arguments
from snugfit.step.wishes.model import input_dtype

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup

SAMPLES = 512
"""Number of samples in the synthetic dataset, as in Hugging Face's guide."""

EPOCH = 1_000
"""Number of optimizer steps in an epoch of the plain loop. Each epoch starts the loader's workers again.
Measured steps should include this as rarely as real ones. Samples are created on access.
"""


def dataset_size(job: Job, device: torch.device, steps: int = 1) -> int:
    """Return the number of samples in the synthetic dataset: 512 for a measurement, or at least one global
    batch. A simulation has only the samples that it uses.
    """
    return job.batch_size * steps if device.type == "meta" else max(SAMPLES, job.batch_size * steps)


class _StandIn(UserDict[str, Any]):
    """Lazy copy of the first sample of a synthetic dataset, which replaces another sample in a simulation. It
    can compute the other sample's real values. It is not a `dict`, since a Trainer would copy it to a plain
    one.
    """

    def __init__(self, first: Batch, real: Callable[[], Mapping[str, Any]]) -> None:
        self.data, self.real = first, real


class _OneSample(SyntheticDataset):
    """A dataset of unchanged length in which each sample is a copy of the first one."""

    def __init__(self, dataset: SyntheticDataset) -> None:
        super().__init__(dataset.job, len(dataset))
        self._of = dataset

    @cached_property
    def _first(self) -> Batch:
        return self._of[0]

    def __getitem__(self, index: int) -> Any:
        return _StandIn(self._first, lambda: self._of[index])

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the samples of a batch lazily, since a simulated batch may have millions."""
        return _StandIns(self, indices)


class _StandIns(Sequence[Any]):
    """The samples of one batch as a lazy sequence, given by their indices in the dataset."""

    def __init__(self, sample: _OneSample, indices: Sequence[int]) -> None:
        self._of, self._indices = sample, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._of[self._indices[index]]


def collate(samples: list[Any]) -> Any:
    """Collate like torch's `default_collate`, but leave values that are not tensors (a flag, a name, None)
    unchanged.
    """
    from torch import is_tensor
    from torch.utils.data import default_collate

    tensors = [{name: value for name, value in sample.items() if is_tensor(value)} for sample in samples]
    return {**samples[0], **default_collate(tensors)}


def collator(job: Job, device: torch.device, *, always_mask: bool = False) -> Callable[[list[Any]], Any]:
    """Return the function that joins samples into a batch.

    In a simulation, it repeats the first sample without a copy. Samples of a user's example are joined
    unchanged, since the work of a step may depend on their content. `always_mask` adds an attention mask of
    ones to batches without padding.
    """
    if always_mask:
        unmasked = collator(job, device)
        return lambda samples: _with_mask(unmasked(samples))
    if job.model.module is not None:
        return job.model.layout(job.batch_size).join
    joined = inputs_of(job.task, job.model.architecture).joined
    collate_joined = functools.partial(_collate_joined, joined)
    if device.type != "meta":
        return collate_joined

    def repeat_first(samples: list[Any]) -> Any:
        batch = {
            # Each image is the first one, since a copy of all would need memory.
            name: value[0].expand(len(samples) * len(value), *value.shape[1:])
            if name in joined
            else value.expand(len(samples), *value.shape)
            for name, value in samples[0].items()
        }
        # Real samples are created only if a model reads their values, and once for all inputs.
        few = range(min(len(samples), SAMPLES))
        real = functools.cache(lambda: collate_joined([samples[index].real() for index in few]))
        for name, value in batch.items():
            if name != "attention_mask":  # all samples are padded alike
                setattr(value, REAL_VALUES, functools.partial(_tensor_of, real, name, len(value)))
        return batch

    return repeat_first


def _collate_joined(joined: frozenset[str], samples: list[Any]) -> Any:
    """Collate samples, and join the images of all in the first dimension of the inputs with these names."""
    batch = collate(samples)
    return {**batch, **{name: batch[name].flatten(0, 1) for name in joined & batch.keys()}}


def _with_mask(batch: Any) -> Any:
    if "input_ids" in batch:
        batch.setdefault("attention_mask", (batch["input_ids"] >= 0).long())
    return batch


def _tensor_of(batch: Callable[[], Mapping[str, Any]], name: str, samples: int) -> Any:
    """Return a tensor of a batch with this number of samples. Those of a smaller batch are repeated until
    there are enough.
    """
    value = batch()[name]
    times = -(-samples // len(value))
    return value if times == 1 else value.repeat(times, *[1] * (value.dim() - 1))[:samples]


class _CastSamples(SyntheticDataset):
    """Synthetic samples with floating-point inputs in the weights' dtype; labels are not changed."""

    def __init__(self, dataset: SyntheticDataset, dtype: str) -> None:
        super().__init__(dataset.job, len(dataset))
        self._of, self._dtype = dataset, dtype

    def __getitem__(self, index: int) -> Batch:
        return cast_inputs(self._of[index], self._dtype)


def cast_inputs(batch: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a sample or a batch with its floating-point inputs in this dtype; labels stay as they are."""
    import torch

    return {
        name: value.to(getattr(torch, dtype))
        if name != "labels" and torch.is_tensor(value) and torch.is_floating_point(value)
        else value
        for name, value in batch.items()
    }


def dataset(job: Job, setup: Setup, device: torch.device, steps: int = 1) -> SyntheticDataset:
    """Return synthetic samples in the dtypes that the model of this Setup takes. A user's own example is
    unchanged."""
    samples = SyntheticDataset(job, dataset_size(job, device, steps))
    if job.model.module is not None:
        layout, size = job.model.layout(job.batch_size), setup.per_piece(job.batch_size)
        if size != layout.samples:
            layout.refuse_unclear(f"{job.model.name} needs batches of {size}")
        return samples
    if (dtype := input_dtype(job, setup)) is not None:
        samples = _CastSamples(samples, dtype)
    return _OneSample(samples) if device.type == "meta" else samples


def loader(
    job: Job, setup: Setup, device: torch.device, *, always_mask: bool = False
) -> torch.utils.data.DataLoader[Any]:
    """Return a DataLoader of host micro-batches over one epoch of synthetic samples."""
    import torch

    batches: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        cast("torch.utils.data.Dataset[Any]", dataset(job, setup, device, EPOCH)),
        batch_size=setup.per_piece(job.batch_size),
        drop_last=True,
        collate_fn=collator(job, device, always_mask=always_mask),
        persistent_workers=False,
        **loader_arguments(setup, device),
    )
    return batches


def micro_batches(
    job: Job, setup: Setup, device: torch.device, count: int, *, always_mask: bool = False
) -> Generator[list[dict[str, Any]], None, None]:
    """Yield, without end, the list of `count` host micro-batches of each optimizer step."""
    batches = loader(job, setup, device, always_mask=always_mask)
    pieces: list[dict[str, Any]] = []
    while True:
        for batch in batches:
            pieces.append(batch)
            if len(pieces) == count:
                yield pieces
                pieces = []


def place(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the batch to the device, asynchronously if its memory is pinned. Values that are not tensors (a
    switch, a name) are unchanged.
    """
    import torch

    return map_leaves(
        batch,
        lambda _, value: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value,
    )
