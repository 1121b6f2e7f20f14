"""Sentences that all short reports share: the fit in memory, four numbers, and the most important warning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from snugfit.job.inputs import has_sequence
from snugfit.report.text.job import sizes
from snugfit.report.text.pace import roughly, show_rates, show_spread
from snugfit.report.text.page import Sentence
from snugfit.techniques.technique import Slot, first_sentence
from snugfit.units import GIB, show_bytes

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.job.phases import PhaseWords
    from snugfit.results.speed import StepSpeed
    from snugfit.techniques.recipe import Recipe

UNREAD = "if the unread parts change nothing"
"""Condition in a report's first sentence if the user's configuration file was not read completely."""

SCALED_RATES = "step time, as no rates of this GPU were measured"


def subject(
    job: Job, recipe: Recipe | None, device: Gpu | str | None, gpus: int = 1, *, memory: int | None = None
) -> str:
    """Return `Llama-3.1-8B, LoRA r=16, 16 × 2048, RTX 4090`: model, trained weights, batch and GPU.

    The weights are left out without a recipe, and the GPU where none was named. A limit of `memory` that the
    GPU does not have follows its name: `Tesla T4 with 80.0 GiB`.
    """
    name = device if isinstance(device, str) else device.name if device else ""
    card = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    if gpus > 1:
        card = f"{gpus} x {card}" if card else f"{gpus} GPUs"
    if memory and device and not isinstance(device, str) and _is_more_than(memory, device):
        card += f" with {show_gib(memory)}"
    model = job.model.name.rpartition("/")[2]
    batch = sizes(job) if has_sequence(job.task) else f"batch {sizes(job)}"
    return ", ".join(filter(None, (model, trained_weights(job, recipe) if recipe else "", batch, card)))


def _is_more_than(memory: int, gpu: Gpu) -> bool:
    """Return True for more memory than the GPU's nominal memory, though less is usable."""
    return gpu.memory_bytes is not None and memory > max(gpu.memory_bytes, (gpu.marketed_gb or 0) * GIB)


def trained_weights(job: Job, recipe: Recipe) -> str:
    """Return the trained weights of a job as text: `all weights`, `LoRA r=16`, or `evaluation` if
    none train.
    """
    adapters = recipe[Slot.ADAPTERS]
    if not job.trains:
        return "evaluation" if job.added_phase is None else job.added_phase.title
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
    turn: str = "step",
) -> str:
    """Return text on the fit in memory: `fits, 2.5 GiB free, about 16 s a step`, or the missing memory.

    `headroom` is given for a step that leaves less free, `condition` for a verdict that may not hold. `turn`
    is the noun for a step.
    """
    if memory is None:
        return f"needs {show_gib(needed)}; add --gpu NAME to see whether it fits"
    if needed > memory:
        size, has = show_distinct(needed, memory)
        return f"does not fit{condition and f' {condition}'}: needs {size}, {limit} {has}"
    free = f"{show_gib(memory - needed)} free"
    if headroom:
        less, more = show_distinct(memory - needed, headroom)
        free = f"{less} free, less than the headroom of {more}"
    pace = f", about {roughly(speed.step_seconds)} a {turn}" if speed and speed.step_seconds else ""
    tight = "fits, but tight" if headroom else "fits"
    return f"{tight}{condition and f' {condition}'}{':' if headroom or condition else ','} {free}{pace}"


def show_gib(size: int, digits: int = 1) -> str:
    """Return `21.1 GiB`, `241 GiB`, or small sizes as `show_bytes` does."""
    if size < GIB / 20:
        return show_bytes(size)
    # For 100 GiB or more, decimals are only shown to distinguish two sizes.
    return f"{size / GIB:.{digits if size < 100 * GIB or digits > 1 else 0}f} GiB"


def show_distinct(first: int, other: int) -> tuple[str, str]:
    """Return two sizes in bytes as text, with enough digits to show their difference."""
    for digits in (1, 2, 3):
        shown = show_gib(first, digits), show_gib(other, digits)
        if shown[0] != shown[1]:
            break
    return shown


def four_numbers(
    needed: int,
    memory: int | None,
    parts: Sequence[tuple[int | None, str]],
    speed: StepSpeed | None,
    words: PhaseWords,
    per_gpu: str = "",
) -> Iterator[tuple[str, str]]:
    """Yield four labelled lines: the memory, its parts, the seconds of a step and the throughput."""
    limit = f" of {show_gib(memory)}" if memory else ""
    yield "GPU memory", f"{show_gib(needed)}{limit}{per_gpu}"
    yield "of which", ", ".join(f"{show_gib(size)} {label}" for size, label in parts if size)
    if speed and speed.step_seconds:
        spread = ", ".join(filter(None, (show_spread(speed), speed.assumption)))
        yield f"{words.turn} time", f"about {roughly(speed.step_seconds)}{spread and f' ({spread})'}"
        yield "throughput", show_rates(speed, words)


def uncertain(doubts: Sequence[str], shown: str) -> Iterator[Sentence]:
    """Yield labelled lines with the most important warning, `shown`, and the number of further warnings."""
    if doubts:
        more = f" ({len(doubts) - 1} more: --details)" if len(doubts) > 1 else ""
        text = (first_sentence(shown) or shown).rstrip(".")
        yield Sentence(f"Uncertain: {text}{more or '.'}", "uncertain")
