"""What makes a user's data the data of a run: the order that a loader gives it, and some of its samples.

Of a dataset whose samples have numbers a few are read, spread evenly, each twice. What is not the same twice
(an augmentation that draws from a generator of the dataset's own) says nothing about the data and is left
out. The generators of the process and of the data are afterwards what they were.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from snugfit.frontends.loader import count_of, fingerprint_of
from snugfit.frontends.own_state import OwnState
from snugfit.training.checkpoint.facts import CONTENT, Facts, settings_of
from snugfit.training.rng import preserve_rng

READ = 8
"""Samples that a fingerprint reads. A choice: other data is other in nearly all of them, and reading pictures
takes time."""


def loader_facts(loader: Any) -> Facts:
    """Of a loader: its sampler, what it drops, its collator, and its dataset's content."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    facts = {
        **settings_of("loader.sampler", sampler),
        **settings_of("loader.batch_sampler", batches),
        **settings_of("loader.collate_fn", getattr(loader, "collate_fn", None)),
        **dataset_facts(getattr(loader, "dataset", None)),
    }
    return {name: value for name, value in facts.items() if not name.endswith((".epoch", ".batch_size"))}


def dataset_facts(dataset: Any) -> Facts:
    """A fingerprint of some samples of a dataset that has numbers for them; nothing of any other, or of one
    that cannot be read: whoever trains on it will see why."""
    count = count_of(dataset)
    if not count or not hasattr(dataset, "__getitem__"):
        return {}
    own = OwnState(dataset)
    before = own.state()
    try:
        read = min(READ, count)
        parts = [_same_twice(dataset, number * count // read) for number in range(read)]
    except Exception:
        return {}
    finally:
        own.set(before)
    names = set.intersection(*({name for name, _ in part} for part in parts))
    digest = hashlib.sha256()
    for part in parts:
        for name, value in part:
            if name in names:
                digest.update(f"{name}:{value};".encode())
    return {CONTENT: digest.hexdigest()} if names else {}


def _same_twice(dataset: Any, index: int) -> list[tuple[str, str]]:
    """Names and fingerprints of a sample's values that are the same when it is read again."""
    first, second = (dict(_values(_sample(dataset, index))) for _ in range(2))
    return sorted((name, value) for name, value in first.items() if second.get(name) == value)


def _sample(dataset: Any, index: int) -> Any:
    """A sample, read while the host's generators begin at the same numbers each time."""
    import numpy
    import torch

    with preserve_rng(torch.device("cpu")):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        return dataset[index]


def _values(sample: Any) -> Iterator[tuple[str, str]]:
    """A sample's values by name, or by their place, as fingerprints."""
    if isinstance(sample, tuple):
        sample = dict(enumerate(sample))
    for name, value in sample.items() if isinstance(sample, Mapping) else [("", sample)]:
        yield str(name), fingerprint_of(value)
