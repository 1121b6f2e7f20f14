"""Choose the samples that best test a split batch: unlike samples overall, alike ones in each piece.

A sample is described by its tensors. A single number (a class, a weight, a position) counts by itself. A row
of labels or of a mask counts by its number of valid values. Samples of one class and one length would hide
weights of classes and counts of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from snugfit.job.batch import IGNORED
from snugfit.job.batch_layout import BatchLayout, leaves

LONGEST_ROW = 1 << 16
"""Most values of a sample in one counted tensor; counts of pictures and sound mean nothing."""

Traits = Sequence[Sequence[float]]
"""Features of each sample, each from 0 to 1."""

Parts = tuple[tuple[int, ...], tuple[int, ...]]
"""Indices of samples in two pieces, the smaller one first."""


def chosen_samples(batch: Mapping[str, Any], layout: BatchLayout, most: int) -> Parts:
    """Choose at most `most` samples of a batch of two or more, in two pieces: a third, and the rest."""
    traits = _traits(batch, layout)
    chosen = _unlike(traits, min(most, layout.samples))
    return divide(traits, chosen, max(1, len(chosen) // 3))


def evenly(parts: Parts) -> Parts:
    """Divide the same samples into halves."""
    samples = [*parts[0], *parts[1]]
    half = len(samples) // 2
    return tuple(samples[:half]), tuple(samples[half:])


def divide(traits: Traits, chosen: Sequence[int], size: int) -> Parts:
    """Divide the chosen samples into `size` samples and the rest, as unlike as two pieces can be."""

    def distance(piece: tuple[int, ...]) -> float:
        rest = [index for index in chosen if index not in piece]
        means = [[sum(traits[i][at] for i in part) / len(part) for part in (piece, rest)] for at in columns]
        return sum(abs(one - other) for one, other in means)

    columns = range(len(traits[0]))
    piece = max(combinations(chosen, size), key=distance)
    return piece, tuple(index for index in chosen if index not in piece)


def _unlike(traits: Traits, count: int) -> list[int]:
    """Choose samples, each as far as possible from the previous ones."""
    chosen = [0]
    nearest = [_distance(traits[0], other) for other in traits]
    while len(chosen) < count:
        rest = [index for index in range(len(traits)) if index not in chosen]
        chosen.append(max(rest, key=nearest.__getitem__))
        nearest = [
            min(known, _distance(traits[chosen[-1]], other))
            for known, other in zip(nearest, traits, strict=True)
        ]
    return chosen


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _traits(batch: Mapping[str, Any], layout: BatchLayout) -> Traits:
    import torch

    columns = []
    for name, value in leaves(batch):
        if name not in layout.rows or not torch.is_tensor(value):
            continue
        dimension, rows = layout.rows[name]
        values = value.detach().movedim(dimension, 0)
        values = values[: layout.samples * rows].reshape(layout.samples, -1)
        if not 0 < values.shape[1] <= LONGEST_ROW:
            continue
        if values.shape[1] > 1:
            values = (values.ne(0) & values.ne(IGNORED)).sum(1, keepdim=True)
        column = values[:, 0].double().nan_to_num().cpu()
        if (width := float(column.max() - column.min())) > 0:
            columns.append(((column - column.min()) / width).tolist())
    return [[column[sample] for column in columns] for sample in range(layout.samples)]
