"""Comparison of micro-batches with the whole batch, by the gradients of a few of the user's samples.

The gradients of the samples together are compared with those of two pieces of unlike samples. Each piece is
weighted as the front-end weights it. Losses alone show little: a new model gives all samples the same loss
under any weights of classes. Gradients of the same samples in another order show the effect of rounding in
this precision, and of random draws.

The comparison has three results:

- Same gradients: the batch may be split.
- Different gradients: samples depend on each other (in-batch negatives, statistics of a batch). Or the loss
  is a mean over uncounted items: weights of classes, tokens under a custom name, omitted answers, two means,
  the balance of experts.
- Undecided: an error, no gradient at all, noise, or out of memory.

After the last two results, plans and recoveries do not split the batch, and the user's own split gets a
warning. The comparison runs before the first split, and again after some steps (`compares_again`). The first
batch may contain one class alone, and a new model zeros. Batch norms are found by their class earlier.

A sample is described by its tensors. A single number (a class, a weight, a position) counts by itself. A row
of labels or of a mask counts by its number of valid values. Samples of one class and one length would hide
weights of classes and counts of tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import one_line
from snugfit.frontends.cut_gradients import CutRuns, PieceLoss, Taken, distances, give_back_unused, is_number
from snugfit.frontends.items import items_in, shifts_labels
from snugfit.job.batch import IGNORED
from snugfit.job.batch_layout import BatchLayout, leaves
from snugfit.job.sample_mixing import mixing_of
from snugfit.step.memory_errors import memory_cause

if TYPE_CHECKING:
    from snugfit.job.job import Job

SAMPLES, ON_THE_HOST, FEWEST = 6, 4, 2
"""Numbers of compared samples: for gradients if a micro-batch has as many, at least on the CPU, and at least
on a GPU. A GPU's memory may have room for no more."""


class Tolerance(NamedTuple):
    """Relative differences up to which two gradients count as equal."""

    relative: float
    """Bound for the gradient of one parameter, relative to its norm."""
    floor: float
    """Bound relative to the norm of all gradients, for gradients that are mathematically 0."""
    loss: float
    """Relative bound for losses, where losses are compared."""


OF_32_BIT, OF_16_BIT = Tolerance(0.01, 1e-4, 1e-3), Tolerance(0.15, 1e-2, 0.02)
"""The tolerances for 32 and 16 bits.

In 16 bits, kernels for other sizes round differently: gradients of BERT-large in bfloat16 differed by 7 % on
an H200. Tensor cores round fp32 in this way if tf32 is allowed.
"""

LossOf = Callable[[Any, dict[str, Any]], Any]
"""The type of a function of the model and a batch on its device that returns the loss, a scalar tensor."""

ItemsOf = Callable[[Mapping[str, Any]], float]
"""The type of a function of a batch that returns the number of items over which its loss is a mean."""


class Verdict(NamedTuple):
    """Result of a comparison of gradients: the reason why the batch may not be split, or why that is unknown.
    Both texts are empty if it may be split.
    """

    differs: str = ""
    unclear: str = ""


def weighed_by_items(loss_of: LossOf, items_of: ItemsOf) -> PieceLoss:
    """Return a loss function for a part of a batch, weighted by its fraction of the labels (or samples) that
    count.
    """

    def piece_loss(model: Any, piece: dict[str, Any], whole: dict[str, Any]) -> Any:
        items = items_of(piece)
        return loss_of(model, piece) * (items / items_of(whole)) if items else None

    return piece_loss


def counted_by(job: Job, model: Any) -> ItemsOf:
    """Return the default function that counts the terms of a batch's loss: labels that are not ignored, or
    samples.
    """
    shifts = shifts_labels(model)
    return lambda piece: items_in(piece, shifts=shifts, dims=job.model.batch_dims)


def job_with_mixing(
    job: Job,
    model: Any,
    loss_of: PieceLoss,
    example: Mapping[str, Any] | None = None,
    *,
    most: int = SAMPLES,
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    again: bool = False,
) -> Job:
    """Test if micro-batches give the same gradients as the whole batch, and return the job with the result.

    `mixes_samples` gets a reason if gradients of pieces do not add up to those of the whole. `unclear_cut`
    gets a reason if the comparison is undecided. On a GPU at most `most` samples are used, of `example` or of
    the job's example. `context` is entered for a model that fails without it. With `again`, the run has
    already started. Losses are then compared on a GPU, because computing a loss saves nothing for a backward
    pass. The run thus needs no more memory than predicted.
    """
    # A known reason, such as a batch norm, needs no comparison.
    if mixing_of(job).reason:
        return job
    batch = example or job.model.example or {}
    verdict = None
    give_back_unused(model)  # cached blocks of the steps have other sizes
    try:
        verdict = _verdict(job, model, loss_of, batch, most, again)
    except Exception as fault:  # the user's loss may raise anything
        error = f"{type(fault).__name__}: {one_line(fault)}"
    if verdict is None and context is not None:
        with contextlib.suppress(Exception), context():
            verdict = _verdict(job, model, loss_of, batch, most, again)
    if verdict is None:
        verdict = Verdict(unclear=error)
    give_back_unused(model)
    return replace(job, mixes_samples=verdict.differs, unclear_cut=verdict.unclear)


def _verdict(
    job: Job,
    model: Any,
    loss_of: PieceLoss,
    batch: Mapping[str, Any],
    most: int,
    again: bool,
) -> Verdict:
    layout = BatchLayout.of(batch, job.model.batch_dims, samples=job.batch_size)
    if layout.unclear:  # splitting it raises an error with advice elsewhere
        return Verdict()
    if layout.samples < FEWEST:
        return Verdict(unclear="the first batch has one sample only")
    runs = CutRuns(model, batch, layout, loss_of)
    fewest = ON_THE_HOST if runs.device.type == "cpu" else FEWEST
    parts = chosen_samples(batch, layout, max(fewest, min(most, SAMPLES)))
    if not runs.can_take_gradients or (again and runs.device.type == "cuda"):
        return _of_losses(runs, parts)
    # If memory runs out, as few samples as possible are tried before losses alone.
    for attempt in (parts, chosen_samples(batch, layout, FEWEST)):
        with contextlib.suppress(MemoryError):
            return _of_either_parts(runs, attempt)
    return _of_losses(runs, parts)


def _of_either_parts(runs: CutRuns, parts: Parts) -> Verdict:
    """Compare gradients of two parts of a batch with those of the whole; use halves if the loss fails for one
    sample. Raises `MemoryError` when memory ran out.
    """
    for attempt in (parts, evenly(parts)):
        try:
            return _of_gradients(runs, attempt)
        except Exception as fault:
            if memory_cause(fault):
                raise MemoryError from None
            if attempt is not parts or len(parts[0]) > 1 or len(parts[1]) < FEWEST:
                raise
    raise AssertionError("one of two attempts returns or raises")


def _of_gradients(runs: CutRuns, parts: Parts) -> Verdict:
    samples = [*parts[0], *parts[1]]
    whole, reverse, cut = runs.take([samples], [samples[::-1]], parts)
    tolerance = OF_16_BIT if runs.has_few_digits else OF_32_BIT
    total = sum(size * size for _, size in distances(whole, whole)) ** 0.5
    if not is_number(whole):
        return Verdict(unclear=f"the loss of {len(samples)} samples, or a gradient of it, is not a number")
    if not total:
        return Verdict(unclear=f"all gradients of {len(samples)} samples are 0")
    # The whole is a number, so the cut is the cause.
    if not is_number(cut):
        return Verdict(differs=f"{_what(parts)}, where they are no numbers")

    def beyond(other: Taken) -> list[tuple[float, str]]:
        """Return the relative differences above the tolerance with their parameters, the largest first."""
        by_name = zip(distances(whole, other), runs.names, strict=True)
        return sorted(
            (
                (apart / size, name)
                for (apart, size), name in by_name
                if apart > tolerance.relative * size + tolerance.floor * total
            ),
            reverse=True,
        )

    # Noise beyond the tolerance would hide the effect of the cut.
    if beyond(reverse):
        return Verdict(
            unclear=f"the gradients of {len(samples)} samples depend on their order or on random draws"
        )
    if not (different := beyond(cut)):
        return Verdict()
    share, name = different[0]
    return Verdict(differs=f"{_what(parts)}, by {share:.0%} ({name})")


def _what(parts: Parts) -> str:
    few, many = map(len, parts)
    return f"the gradients of {few + many} samples are others in pieces of {few} and {many}"


def _of_losses(runs: CutRuns, parts: Parts) -> Verdict:
    """Compare losses of the parts of a batch with the loss of the whole, if gradients are not available."""
    samples = [*parts[0], *parts[1]]
    orders = runs.take([samples], [samples[::-1]], parts, gradients=False)
    whole, reverse, cut = (taken.loss for taken in orders)
    bound = (OF_16_BIT if runs.has_few_digits else OF_32_BIT).loss * abs(whole)
    # In this form a NaN exceeds the bound, since it compares as False.
    if not abs(whole - reverse) <= bound:
        return Verdict(unclear=f"the loss of {len(samples)} samples depends on their order or random draws")
    if not abs(whole - cut) <= bound:
        few, many = map(len, parts)
        return Verdict(
            differs=f"the loss of {few + many} samples is {whole:.4g} together and {cut:.4g} in pieces of "
            f"{few} and {many}"
        )
    return Verdict()


# ---- the choice of samples --------------------------------------------------------------------------------


LONGEST_ROW = 1 << 16
"""Largest number of values of a sample in a tensor whose values are counted; counts of pictures and sound
mean nothing."""

Traits = Sequence[Sequence[float]]
"""The type of the samples' features, from 0 to 1, by which unlike samples are chosen."""

Parts = tuple[tuple[int, ...], tuple[int, ...]]
"""The type of a division into two pieces: sample indices of each, the smaller piece first."""


def chosen_samples(batch: Mapping[str, Any], layout: BatchLayout, most: int) -> Parts:
    """Choose at most `most` samples of a batch, as different as possible, and divide them into one third and
    two thirds.
    """
    traits = _traits(batch, layout)
    chosen = _unlike(traits, min(most, layout.samples))
    return divide(traits, chosen, max(1, len(chosen) // 3))


def evenly(parts: Parts) -> Parts:
    """Divide the same samples into two halves."""
    samples = [*parts[0], *parts[1]]
    half = len(samples) // 2
    return tuple(samples[:half]), tuple(samples[half:])


def divide(traits: Traits, chosen: Sequence[int], size: int) -> Parts:
    """Divide these samples into `size` samples and the rest, so that the average features of the two differ
    most.
    """

    def distance(piece: tuple[int, ...]) -> float:
        rest = [index for index in chosen if index not in piece]
        means = [[sum(traits[i][at] for i in part) / len(part) for part in (piece, rest)] for at in columns]
        return sum(abs(one - other) for one, other in means)

    columns = range(len(traits[0]))
    piece = max(combinations(chosen, size), key=distance)
    return piece, tuple(index for index in chosen if index not in piece)


def _unlike(traits: Traits, count: int) -> list[int]:
    """Return the indices of `count` samples that differ most from each other in their labels, lengths and
    other traits.
    """
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
        # A trait that all samples share cannot distinguish them.
        if (width := float(column.max() - column.min())) > 0:
            columns.append(((column - column.min()) / width).tolist())
    return [[column[sample] for column in columns] for sample in range(layout.samples)]
