"""Compare a batch in pieces with the whole batch, by the gradients of a few samples of the user's own.

Their gradients together are compared with those of two pieces of unlike samples, each counted as the
front-end counts it. Losses alone show little: a new model gives all samples the same one, whatever weights
their classes have. Gradients of the same samples in another order show what numbers in this precision, and
draws by chance, make of them by themselves.

    the same      the batch may be cut
    another       samples look at each other (in-batch negatives, statistics of a batch), or the loss is a
                  mean over something that is not counted: weights of classes, tokens under a name of the
                  user's, answers that are left out, two means, the balance of experts
    not decided   an error, no gradient at all, noise, or memory that ran out

Of the last two no plan and no recovery cuts the batch, and a cut of the user's gets a warning. Asked when a
cut is first wanted, and again after some steps (`compares_again`): the first batch may have one class alone,
and a new model zeros. Batch norms are found by their class before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import one_line
from snugfit.frontends.cut_gradients import CutRuns, PieceLoss, Taken, distances, give_back_unused, is_number
from snugfit.frontends.cut_samples import Parts, chosen_samples, evenly
from snugfit.frontends.items import items_in, shifts_labels
from snugfit.job.batch_layout import BatchLayout
from snugfit.job.sample_mixing import mixing_of
from snugfit.step.memory_errors import memory_cause

if TYPE_CHECKING:
    from snugfit.job.job import Job

SAMPLES, ON_THE_HOST, FEWEST = 6, 4, 2
"""Samples of which gradients are taken, where a micro-batch has so many; at least on the CPU; and at least on
a GPU, whose memory may have room for no more."""


class Tolerance(NamedTuple):
    """Relative differences up to which gradients are equal."""

    relative: float
    """Of a parameter's gradient."""
    floor: float
    """Of the norm of all gradients: what a gradient that is 0 by its mathematics may come to."""
    loss: float
    """Of a loss, where losses are compared."""


OF_32_BIT, OF_16_BIT = Tolerance(0.01, 1e-4, 1e-3), Tolerance(0.15, 1e-2, 0.02)
"""In 16 bits, kernels for other sizes round otherwise: gradients of BERT-large in bfloat16 differed by 7 % on
an H200. Tensor cores round fp32 like that where tf32 is allowed."""

LossOf = Callable[[Any, dict[str, Any]], Any]
"""Of the model and a batch on its device: the loss, ()."""

ItemsOf = Callable[[Mapping[str, Any]], float]
"""Of a batch: how many items its loss is a mean over."""


class Verdict(NamedTuple):
    """Result of a comparison; both are empty where the batch may be cut."""

    differs: str = ""
    unclear: str = ""


def weighed_by_items(loss_of: LossOf, items_of: ItemsOf) -> PieceLoss:
    """Weigh the loss of a piece by its share of the items."""

    def piece_loss(model: Any, piece: dict[str, Any], whole: dict[str, Any]) -> Any:
        items = items_of(piece)
        return loss_of(model, piece) * (items / items_of(whole)) if items else None

    return piece_loss


def counted_by(job: Job, model: Any) -> ItemsOf:
    """Count items where no function is given: labels, or samples."""
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
    """Return the job, with a reason in `mixes_samples` where gradients of pieces do not add up to those of
    the whole, and in `unclear_cut` where the comparison is not decided. On a GPU at most `most` samples are
    taken, of the job's example or of this one. `context` is entered for a model that fails without it.
    With `again`, the run has begun: on a GPU losses are compared then, which keep nothing for a backward
    pass, so that the run needs no more memory than is predicted."""
    if mixing_of(job).reason:
        return job
    batch = example or job.model.example or {}
    verdict = None
    give_back_unused(model)  # of other sizes, blocks of the steps would only stand beside those of the runs
    try:
        verdict = _verdict(job, model, loss_of, batch, most, again)
    except Exception as fault:  # whatever the user's loss raises
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
    if layout.unclear:  # it is refused to be cut, with what to do
        return Verdict()
    if layout.samples < FEWEST:
        return Verdict(unclear="the first batch has one sample only")
    runs = CutRuns(model, batch, layout, loss_of)
    fewest = ON_THE_HOST if runs.device.type == "cpu" else FEWEST
    parts = chosen_samples(batch, layout, max(fewest, min(most, SAMPLES)))
    if not runs.can_take_gradients or (again and runs.device.type == "cuda"):
        return _of_losses(runs, parts)
    for attempt in (parts, chosen_samples(batch, layout, FEWEST)):
        with contextlib.suppress(MemoryError):
            return _of_either_parts(runs, attempt)
    return _of_losses(runs, parts)


def _of_either_parts(runs: CutRuns, parts: Parts) -> Verdict:
    """Compare gradients, in halves where a loss cannot be taken of one sample. Raise `MemoryError` where
    memory ran out."""
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
    if not is_number(cut):
        return Verdict(differs=f"{_what(parts)}, where they are no numbers")

    def beyond(other: Taken) -> list[tuple[float, str]]:
        """Return the parameters whose gradients differ, by how much, the most first."""
        by_name = zip(distances(whole, other), runs.names, strict=True)
        return sorted(
            (
                (apart / size, name)
                for (apart, size), name in by_name
                if apart > tolerance.relative * size + tolerance.floor * total
            ),
            reverse=True,
        )

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
    """Compare losses, where gradients cannot be taken."""
    samples = [*parts[0], *parts[1]]
    orders = runs.take([samples], [samples[::-1]], parts, gradients=False)
    whole, reverse, cut = (taken.loss for taken in orders)
    bound = (OF_16_BIT if runs.has_few_digits else OF_32_BIT).loss * abs(whole)
    if not abs(whole - reverse) <= bound:
        return Verdict(unclear=f"the loss of {len(samples)} samples depends on their order or random draws")
    if not abs(whole - cut) <= bound:
        few, many = map(len, parts)
        return Verdict(
            differs=f"the loss of {few + many} samples is {whole:.4g} together and {cut:.4g} in pieces of "
            f"{few} and {many}"
        )
    return Verdict()
