"""The short report of a prediction on one screen: the fit, four numbers, the largest tensors, the speed
limit, one uncertainty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.report.items import BOUND_BY, items_at_peak
from snugfit.report.plan.ways_out import in_short, plan_command
from snugfit.report.text.answer import (
    SCALED_RATES,
    UNREAD,
    four_numbers,
    show_fit,
    show_gib,
    subject,
    uncertain,
)
from snugfit.report.text.facts import LABEL, Facts
from snugfit.report.text.page import Page, Sentence

if TYPE_CHECKING:
    from snugfit.results.prediction import Prediction
    from snugfit.results.step_seconds import StepSeconds

ITEMS = 3
"""Largest number of groups of tensors in a short report."""

LEAST_ROUGH = 0.05
"""Smallest share of a step in kernels without a measured rate that the report mentions (chosen)."""

LOSS_OVER_ALL_LOGITS = "Evaluation is a forward pass that computes the loss over all logits."


def render(prediction: Prediction) -> Page:
    """Return the short report of a prediction, at most 15 lines of 100 columns.

    If the step does not fit, changes that make it fit are in the place of its seconds and their limit.
    """
    fits = prediction.fits is not False
    return Page(
        [verdict(prediction), Sentence(f"{'recipe':{LABEL}}  {prediction.recipe}", "recipe")],
        [Facts(tuple(numbers(prediction)))],
        [] if fits else ways_out(prediction),
        [
            Facts(
                (
                    *show_largest(prediction),
                    *(show_bound(prediction) if fits and prediction.job.added_phase is None else ()),
                    *show_phases(prediction),
                )
            )
        ],
        note(prediction),
        uncertain(prediction.doubts, widest(prediction)),
    )


def verdict(prediction: Prediction) -> Sentence:
    """Return a sentence on whether the step fits in the memory, with the condition under which this holds."""
    gpu, memory = prediction.gpu, prediction.memory_bytes
    return Sentence(
        f"{subject(prediction.job, prediction.recipe, gpu, prediction.gpus, memory=memory)}: "
        + show_fit(
            prediction.needed_bytes,
            memory,
            headroom=prediction.headroom_bytes if prediction.tight else 0,
            speed=prediction.speed,
            condition="" if prediction.read_in_full else UNREAD,
            limit=_limit(prediction),
            turn=prediction.job.words.turn,
        ),
        _role(prediction),
    )


def _limit(prediction: Prediction) -> str:
    """Return the beginning of a clause on the memory limit: `the card has`, or `the limit is`."""
    gpu = prediction.gpu
    if gpu is None or gpu.memory_bytes != prediction.memory_bytes:
        return "the limit is"
    return "each card has" if prediction.gpus > 1 else "the card has"


def _role(prediction: Prediction) -> str:
    if prediction.fits is None:
        return "heading"
    if not prediction.fits:
        return "bad"
    return "good" if prediction.read_in_full and not prediction.tight else "tight"


def numbers(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield labelled lines with the memory on the GPU and its parts. For a step that fits, they include
    seconds and throughput.
    """
    footprint = prediction.footprint
    per_gpu = " on each GPU" if prediction.gpus > 1 else ""
    parts = [
        (footprint.requested_bytes, "tensors"),
        ((footprint.reserved_bytes or 0) - (footprint.requested_bytes or 0), "allocator's reserve"),
        (footprint.context_bytes, "CUDA context"),
        (footprint.communication_bytes, "NCCL"),
    ]
    needed, memory = prediction.needed_bytes, prediction.memory_bytes
    speed = None if prediction.fits is False else prediction.speed
    yield from four_numbers(needed, memory, parts, speed, prediction.job.words, per_gpu)
    if footprint.pinned_bytes and footprint.host_bytes:
        yield (
            "host memory",
            f"{show_gib(footprint.host_bytes)}, {show_gib(footprint.pinned_bytes)} of it page-locked",
        )


def ways_out(prediction: Prediction) -> Iterator[Facts | Sentence]:
    """Yield the changes with which a step would fit, or else the command of a plan."""
    if lines := in_short(prediction.ways_out, prediction.job.words.turn):
        yield from lines
        return
    yield from map(Sentence, about_build(prediction))
    if command := plan_command(prediction):
        yield Sentence(f"Plan one that fits: {command}", "command")


def about_build(prediction: Prediction) -> Iterator[str]:
    """Yield a sentence on a memory peak while the model is built, if `build_on=host` avoids it."""
    moment = prediction.footprint.at
    if moment is None or moment.step:
        return
    from snugfit.step.build import could_be_spread_from_the_host  # its handlers take 0.1 s to import

    if could_be_spread_from_the_host(prediction.job, prediction.recipe.setup()):
        yield (
            "Each GPU builds the whole model before it keeps its part. With --set build_on=host it takes "
            "that from the host, layer by layer."
        )


def show_largest(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield labelled lines with the largest groups of tensors at the peak."""
    label = "at the peak"
    for item in items_at_peak(prediction)[:ITEMS]:
        yield label, f"{show_gib(item.bytes)} {item}"
        label = ""


def show_bound(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield a labelled line with the hardware limit of the step's speed, if seconds are predicted."""
    if (timing := prediction.timing) and timing.step_seconds:
        busy = 100 * timing.device_seconds / timing.step_seconds
        bound = BOUND_BY.get(timing.bound, timing.bound)
        turn, clock = prediction.job.words.turn, about_clock(timing)
        yield (
            "bound by",
            f"{bound}; the GPU is busy for {busy:.0f} % of the {turn}{clock}{about_rates(timing)}",
        )


def about_clock(timing: StepSeconds) -> str:
    """Return a clause on the clock of a GPU at its power limit; empty below the limit."""
    return f", power-limited, about {timing.limited_mhz:,.0f} MHz" if timing.limited_mhz else ""


def about_rates(timing: StepSeconds) -> str:
    """Return a clause on the share of the GPU's time in kernels without a measured rate; empty if small."""
    share = timing.rough_seconds / max(
        timing.device_seconds, timing.step_seconds, 1e-9
    )  # an empty step has no share
    return f"; {100 * share:.0f} % in kernels without a measured rate" if share >= LEAST_ROUGH else ""


def show_phases(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield labelled lines with the results of another use of the model (phase), such as text generation."""
    if (added := prediction.job.added_phase) is not None:
        yield from added.lines(prediction.phase_results).items()


def note(prediction: Prediction) -> list[str]:
    """Return a sentence, in a list, that the job only evaluates or generates; empty for training."""
    if prediction.job.trains:
        return []
    added = prediction.job.added_phase
    return [LOSS_OVER_ALL_LOGITS if added is None else added.note]


def widest(prediction: Prediction) -> str:
    """Return the most important warning of a prediction; empty if it has no warnings."""
    if not prediction.doubts:
        return ""
    # The last doubts are those about unread parts of the configuration.
    if not prediction.read_in_full:
        return prediction.doubts[-1]
    scaled = prediction.timing is not None and not prediction.timing.measured_rates
    return SCALED_RATES if scaled else prediction.doubts[0]
