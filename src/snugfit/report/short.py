"""A prediction on one screen: the verdict, four numbers, the largest items, the bound, one uncertainty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from snugfit.job.inputs import has_sequence
from snugfit.report.items import BOUND_BY, items_at_peak
from snugfit.report.text.facts import LABEL, Facts
from snugfit.report.text.job import sizes
from snugfit.report.text.pace import roughly, show_rates, show_spread
from snugfit.report.text.page import Page, Sentence
from snugfit.techniques.technique import Slot, first_sentence
from snugfit.units import GIB, show_bytes

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.results.prediction import Prediction
    from snugfit.results.speed import StepSpeed
    from snugfit.techniques.recipe import Recipe

ITEMS = 3
"""Number of items at the peak in a short answer."""

UNREAD = "if the unread parts change nothing"
"""Condition of a verdict on a configuration that was not read in full."""

SCALED_RATES = "the step time, because no rates of this GPU were measured"

LOSS_OVER_ALL_LOGITS = "Evaluation is a forward pass that computes the loss over all logits."


def render(prediction: Prediction) -> Page:
    """Return the short answer, at most 15 lines of 100 columns."""
    fits = prediction.fits is not False
    return Page(
        [verdict(prediction), Sentence(f"{'recipe':{LABEL}}  {prediction.recipe}", "recipe")],
        [Facts(tuple(numbers(prediction)))],
        [] if fits else ways_out(prediction),
        [Facts((*_largest(prediction), *_bound(prediction)))],
        [] if prediction.job.trains else [LOSS_OVER_ALL_LOGITS],
        uncertain(prediction.doubts, widest(prediction)),
    )


def verdict(prediction: Prediction) -> Sentence:
    """Return the fit in everyday words, with the condition under which it holds."""
    return Sentence(
        f"{subject(prediction.job, prediction.recipe, prediction.gpu, prediction.gpus)}: "
        + show_fit(
            prediction.needed_bytes,
            prediction.memory_bytes,
            headroom=prediction.headroom_bytes if prediction.tight else 0,
            speed=prediction.speed,
            condition="" if prediction.read_in_full else UNREAD,
            limit=_limit(prediction),
        ),
        _role(prediction),
    )


def _limit(prediction: Prediction) -> str:
    """Return the owner of the memory limit with its verb."""
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


def subject(job: Job, recipe: Recipe | None, where: Gpu | str | None, gpus: int = 1) -> str:
    """Return `Llama-3.1-8B, LoRA r=16, 16 × 2048, RTX 4090`: model, trained weights, batch and GPU.

    The weights are left out without a recipe, and the GPU where none was named.
    """
    name = where if isinstance(where, str) else where.name if where else ""
    card = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    card = f"{gpus} x {card}" if gpus > 1 else card
    model = job.model.name.rpartition("/")[2]
    batch = sizes(job) if has_sequence(job.task) else f"batch {sizes(job)}"
    return ", ".join(filter(None, (model, _trained(job, recipe) if recipe else "", batch, card)))


def _trained(job: Job, recipe: Recipe) -> str:
    adapters = recipe[Slot.ADAPTERS]
    if not job.trains:
        return "evaluation"
    if adapters.plain:
        return "all weights"
    rank = "" if adapters.trained_rank is None else f" r={adapters.trained_rank}"
    return f"{adapters.title or adapters.name}{rank}"


def show_fit(
    needed: int,
    memory: int | None,
    *,
    headroom: int = 0,
    speed: StepSpeed | None = None,
    condition: str = "",
    limit: str = "the card has",
) -> str:
    """Return `fits, 2.5 GiB free, about 16 s a step`, or the need of a step that does not fit.

    `headroom` is given for a step that leaves less free, `condition` for a verdict that may not hold.
    """
    if memory is None:
        return f"needs {show_gib(needed)}; add --gpu NAME to see whether it fits"
    if needed > memory:
        size, has = show_apart(needed, memory)
        return f"does not fit{condition and f' {condition}'}: needs {size}, {limit} {has}"
    free = f"{show_gib(memory - needed)} free"
    if headroom:
        less, more = show_apart(memory - needed, headroom)
        free = f"{less} free, less than the headroom of {more}"
    pace = f", about {roughly(speed.step_seconds)} a step" if speed and speed.step_seconds else ""
    tight = "fits, but tight" if headroom else "fits"
    return f"{tight}{condition and f' {condition}'}{':' if headroom or condition else ','} {free}{pace}"


def show_gib(size: int, digits: int = 1) -> str:
    """Return `21.1 GiB`, `241 GiB`, or small sizes as `show_bytes` does."""
    if size < GIB / 20:
        return show_bytes(size)
    return f"{size / GIB:.{digits if size < 100 * GIB or digits > 1 else 0}f} GiB"


def show_apart(one: int, other: int) -> tuple[str, str]:
    """Return both sizes with as many digits as show their difference."""
    for digits in (1, 2, 3):
        shown = show_gib(one, digits), show_gib(other, digits)
        if shown[0] != shown[1]:
            break
    return shown


def numbers(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield the memory on the GPU and its parts, the seconds of a step, and the throughput."""
    found = prediction.footprint
    each = " on each GPU" if prediction.gpus > 1 else ""
    parts = [
        (found.requested_bytes, "tensors"),
        ((found.reserved_bytes or 0) - (found.requested_bytes or 0), "allocator's reserve"),
        (found.context_bytes, "CUDA context"),
        (found.communication_bytes, "NCCL"),
        (found.managed_bytes, "managed memory"),
    ]
    yield from four_numbers(prediction.needed_bytes, prediction.memory_bytes, parts, prediction.speed, each)
    if found.pinned_bytes and found.host_bytes:
        yield "host memory", f"{show_gib(found.host_bytes)}, {show_gib(found.pinned_bytes)} of it page-locked"


def four_numbers(
    needed: int,
    memory: int | None,
    parts: Sequence[tuple[int | None, str]],
    speed: StepSpeed | None,
    each: str = "",
) -> Iterator[tuple[str, str]]:
    """Yield the memory, its parts, the seconds of a step and the throughput, with labels."""
    limit = f" of {show_gib(memory)}" if memory else ""
    yield "GPU memory", f"{show_gib(needed)}{limit}{each}"
    yield "of which", ", ".join(f"{show_gib(size)} {what}" for size, what in parts if size)
    if speed and speed.step_seconds:
        spread = f" ({spread})" if (spread := show_spread(speed)) else ""
        yield "step time", f"about {roughly(speed.step_seconds)}{spread}"
        yield "throughput", show_rates(speed)


def ways_out(prediction: Prediction) -> Iterator[Sentence]:
    """Yield ways to make a step fit that does not."""
    from snugfit.report.plan.next_steps import job_words

    if prediction.job.model.module is None and prediction.gpu and prediction.gpus == 1:
        where = f"--gpu {prediction.gpu.key.lower()}"
        yield Sentence(f"Plan one that fits: snugfit plan {job_words(prediction.job)} {where}", "command")


def _largest(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield the largest items at the peak."""
    label = "at the peak"
    for item in items_at_peak(prediction)[:ITEMS]:
        yield label, f"{show_gib(item.bytes)} {item}"
        label = ""


def _bound(prediction: Prediction) -> Iterator[tuple[str, str]]:
    if (timing := prediction.timing) and timing.step_seconds:
        busy = 100 * timing.device_seconds / timing.step_seconds
        bound = BOUND_BY.get(timing.bound, timing.bound)
        yield "bound by", f"{bound}; the GPU is busy for {busy:.0f} % of the step"


def widest(prediction: Prediction) -> str:
    """Return the widest uncertainty of a prediction; empty without one."""
    if not prediction.doubts:
        return ""
    if not prediction.read_in_full:
        return prediction.doubts[-1]
    scaled = prediction.timing is not None and not prediction.timing.measured_rates
    return SCALED_RATES if scaled else prediction.doubts[0]


def uncertain(doubts: Sequence[str], shown: str) -> Iterator[Sentence]:
    """Yield the doubt that is `shown`, the widest, and the number of further ones."""
    if doubts:
        more = f" ({len(doubts) - 1} more: --details)" if len(doubts) > 1 else ""
        text = (first_sentence(shown) or shown).rstrip(".")
        yield Sentence(f"Uncertain: {text}{more or '.'}", "uncertain")
