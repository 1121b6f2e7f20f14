"""Properties that identify a user's data, compared on a resume: the loader's order, and some samples.

A few samples of an indexable dataset are read, spread evenly, each twice. Values that differ the second time
do not identify the data and are left out. A dataset may draw augmentations from a generator of its own. The
generators of the process and of the data are restored afterwards.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from snugfit.features.loops.loader import count_of, fingerprint_of
from snugfit.features.loops.own_state import OwnState
from snugfit.features.loops.users_optimizer import settings_of
from snugfit.training.checkpoint.facts import CONTENT, Facts
from snugfit.training.rng import preserve_rng

READ = 8
"""Number of samples in the fingerprint of a dataset (chosen). Other data differs in nearly all samples, and
reading pictures takes time.
"""


def loader_facts(loader: Any) -> Facts:
    """Return properties of a loader's sampler, dropped batches, collator and dataset, to compare runs."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    facts = {
        **settings_of("loader.sampler", sampler),
        **settings_of("loader.batch_sampler", batches),
        **settings_of("loader.collate_fn", getattr(loader, "collate_fn", None)),
        **dataset_facts(getattr(loader, "dataset", None)),
    }
    # The epoch is progress, and the batch size is compared separately.
    return {name: value for name, value in facts.items() if not name.endswith((".epoch", ".batch_size"))}


def dataset_facts(dataset: Any) -> Facts:
    """Return a fingerprint of some samples of an indexable dataset.

    Return an empty result for other datasets, and for unreadable ones, which raise their errors in training.
    """
    count = count_of(dataset)
    if not count or not hasattr(dataset, "__getitem__"):
        return {}
    # Reading samples may advance the random generators of the dataset.
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
    """Return fingerprints, by name, of those values of a sample that are equal in two reads."""
    first, second = (dict(_values(_sample(dataset, index))) for _ in range(2))
    return sorted((name, value) for name, value in first.items() if second.get(name) == value)


def _sample(dataset: Any, index: int) -> Any:
    """Return a dataset's sample, read while the host's random generators have a fixed state."""
    import numpy
    import torch

    with preserve_rng(torch.device("cpu")):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        return dataset[index]


def _values(sample: Any) -> Iterator[tuple[str, str]]:
    """Yield a fingerprint of each value in a sample, with its name or position."""
    if isinstance(sample, tuple):
        sample = dict(enumerate(sample))
    for name, value in sample.items() if isinstance(sample, Mapping) else [("", sample)]:
        yield str(name), fingerprint_of(value)
