"""Datasets that are hard to resume: streams, samples that draw random numbers, and generators of their
own."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

from fitted import classified, padded

Sample = dict[str, Any]
SAMPLES = classified(20)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
        set_seed(seed)


def with_tokens(sample: Sample, *drawn: int) -> Sample:
    return {**sample, "input_ids": [*drawn, *sample["input_ids"]]}


class Drawing(Dataset[Any]):
    """Samples that draw from all of the process's generators."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Sample:
        drawn = [torch.randint(5, 90, ()).item(), random.randrange(5, 90), numpy.random.randint(5, 90)]
        return with_tokens(SAMPLES[index], *map(int, drawn))


class DrawingOwn(Drawing):
    """Samples that draw from the dataset's own generators."""

    def __init__(self) -> None:
        self.numbers = numpy.random.default_rng(3)
        self.parts = {"choice": random.Random(4)}

    def __getitem__(self, index: int) -> Sample:
        drawn = (int(self.numbers.integers(5, 90)), self.parts["choice"].randrange(5, 90))
        return with_tokens(SAMPLES[index], *drawn)


class Stream(IterableDataset[Any]):
    """All samples but the last, each with a random token."""

    def __iter__(self) -> Iterator[Sample]:
        for sample in SAMPLES[:19]:
            yield with_tokens(sample, random.randrange(5, 90))


class Counting(IterableDataset[Any]):
    """A stream whose order depends on the number of its iterators so far."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Sample]:
        self.epoch += 1
        yield from random.Random(self.epoch).sample(SAMPLES, 18)


class Entropy(Drawing):
    """Samples that draw from the system's entropy."""

    def __getitem__(self, index: int) -> Sample:
        return with_tokens(SAMPLES[index], *(5 + byte % 80 for byte in os.urandom(4)))


class ReadOnce(IterableDataset[Any]):
    """A stream that can be read only once."""

    def __init__(self) -> None:
        self.rest = iter(SAMPLES * 3)

    def __iter__(self) -> Iterator[Sample]:
        yield from self.rest


class Masking:
    """A collator that creates its generator at the first batch, as transformers' collators with a seed do."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(11)
        batch = padded(samples)
        hidden = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
        return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 3)}


def hub_stream() -> Any:
    """Return the streams of `datasets`, shuffled by epoch."""
    import datasets

    return datasets.Dataset.from_list(SAMPLES).to_iterable_dataset(num_shards=2).shuffle(5, buffer_size=8)


RESUMABLE: dict[str, Callable[[], Any]] = {
    "drawing": Drawing,
    "drawing from its own": DrawingOwn,
    "a stream": Stream,
    "a stream of datasets": hub_stream,
    "a counting stream": Counting,
}
"""Datasets that can be read again from the state in a checkpoint."""
