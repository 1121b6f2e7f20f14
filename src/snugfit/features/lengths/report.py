"""Report of a dataset's sequence lengths for a terminal and Markdown: ways of padding with their memory and
speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from snugfit.features.lengths.dataset import Lengths
from snugfit.features.lengths.length_plan import Cut, LengthPlan
from snugfit.features.lengths.padding import Way
from snugfit.features.lengths.sizes import Size
from snugfit.report.text.grid import Grid
from snugfit.report.text.job import job_line
from snugfit.report.text.page import Page, Sentence
from snugfit.units import GIB, show_bytes

ORDERS = {"fixed": "one length", "random": "at random", "grouped": "grouped"}
"""Description of each order of the samples in the report."""

ASSUMPTION = (
    "Assumed, not measured on this GPU: the speed of a matmul whose rows are not a multiple of 16 bytes. "
    "Since cuBLAS 11 it runs on tensor cores, less efficiently (NVIDIA, Matrix Multiplication Background "
    "User's Guide, 2.2)."
)


def render(plan: LengthPlan) -> Page:
    """Return the report of a dataset's lengths: the best padding, the memory and speed of each way, and
    inefficient sizes.
    """
    return Page(
        [Sentence(title_line(plan), "heading"), dataset(plan.lengths)],
        [Sentence(best_way(plan), "good" if plan.best else "bad")],
        tightness(plan),
        tables(plan),
        remarks(plan),
        (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in plan.doubts),
    )


def title_line(plan: LengthPlan) -> str:
    """Return the report's first line: the job, the recipe and the GPU."""
    memory = f", {show_bytes(plan.memory_bytes)}" if plan.memory_bytes else ""
    return f"{job_line(plan.job)} · {plan.recipe} · {plan.gpu.name}{memory}"


def dataset(lengths: Lengths) -> str:
    """Return a line with the dataset's number of samples and their lengths."""
    return (
        f"{lengths.samples:,} samples of {lengths.shortest:,} to {lengths.longest:,} tokens, half of them up "
        f"to {lengths.median:,}, {lengths.mean:,.1f} on average ({lengths.source})."
    )


def best_way(plan: LengthPlan) -> str:
    """Return the report's line on the best way of padding, with its memory and speed."""
    best = plan.best
    if not plan.ways:
        return f"The longest sequence is too long for the model: {plan.lengths.longest:,} tokens."
    if best is None:
        least = min((way for way in plan.ways if way.needed_bytes), key=lambda way: way.needed_bytes or 0)
        short = show_bytes((least.needed_bytes or 0) - (plan.memory_bytes or 0))
        return f"The longest batch does not fit: it is short by {short}, whichever way batches are padded."
    text = f"Pad each batch {_how(best)}: {best.samples_per_second:,.1f} samples/s on average, "
    text += f"{show_bytes(best.needed_bytes or 0)} for the longest batch"
    whole = next((way for way in plan.ways if way.order == "fixed" and way.step_seconds), best)
    times = (whole.step_seconds or 0.0) / (best.step_seconds or 1.0)
    if best.order != "fixed" and times > 1.01:
        text += f"; {times:.2f} times as fast as padding everything to {whole.length:,}"
    return text + "."


def tightness(plan: LengthPlan) -> Iterator[str]:
    """Yield a warning if no way of padding leaves the requested headroom of memory free."""
    if plan.best and plan.is_tight(plan.best):
        yield (
            f"Tight: no way of padding leaves the headroom free. This one leaves "
            f"{show_bytes(plan.spare_bytes(plan.best))}; {show_bytes(plan.headroom_bytes)} should stay free "
            "(--headroom)."
        )


def _how(way: Way) -> str:
    """Return a description of a way of padding, with transformers' arguments that select it."""
    text = {
        "fixed": "to the longest sample of the dataset",
        "random": "to its own longest sample",
        "grouped": "to its own longest sample, with samples of similar lengths together "
        '(train_sampling_strategy="group_by_length")',
    }[way.order]
    if way.multiple == 1:
        return text
    return f"{text}, rounded up to a multiple of {way.multiple} (pad_to_multiple_of={way.multiple})"


def tables(plan: LengthPlan) -> Iterator[Grid]:
    """Yield tables of the ways of padding, of those for truncated sequences, and of inefficient sizes."""
    if plan.ways:
        title = (
            f"Predicted for {plan.steps:,} steps drawn from the dataset, each micro-batch padded on its own"
        )
        yield _table(plan, plan.ways, title, mark=plan.best)
    if plan.cut:
        yield _table(plan, plan.cut.ways, _of_cut(plan.cut))
    if plan.sizes:
        yield sizes(plan.sizes)


def _of_cut(cut: Cut) -> str:
    return (
        f"A different job: sequences cut at {cut.at:,} tokens ({100 * cut.samples:.1f} % of the samples "
        f"are cut, {100 * cut.tokens:.1f} % of the tokens lost)"
    )


def _table(plan: LengthPlan, ways: Sequence[Way], title: str, mark: Way | None = None) -> Grid:
    heads: tuple[str, ...] = ("Batches", "multiple>", "longest>", "GiB>", "padding>")
    heads += ("ms a step>", "at most>", "samples/s>", "tokens/s>", "")
    rows = tuple(_row(plan, way, "best" if way is mark or way == mark else "") for way in ways)
    refused = next((way.why_not for way in ways if way.why_not), "")
    return Grid(title=title, heads=heads, rows=rows, note=f"not possible: {refused}" if refused else "")


def _row(plan: LengthPlan, way: Way, mark: str) -> tuple[str, ...]:
    head = (ORDERS[way.order], f"{way.multiple}", f"{way.length:,}")
    if way.why_not:
        return (*head, *[""] * 6, "not possible")
    return (
        *head,
        f"{(way.needed_bytes or 0) / GIB:,.2f}",
        f"{100 * (way.padding or 0):.1f} %",
        f"{1e3 * (way.step_seconds or 0):,.1f}",
        f"{1e3 * (way.longest_step_seconds or 0):,.1f}",
        f"{way.samples_per_second:,.1f}",
        f"{way.tokens_per_second:,.0f}",
        "does not fit" if plan.fits(way) is False else " ".join([mark, "tight" * plan.is_tight(way)]).strip(),
    )


# ---- remarks --------------------------------------------------------------------------------------------


def remarks(plan: LengthPlan) -> Iterator[str]:
    """Yield sentences on the resource that limits the step's speed, the effect of grouping, and the
    assumptions.
    """
    if plan.bound == "host":
        yield (
            "The host is the bottleneck, even for the longest batch. So padding costs little time, and "
            "better matmul sizes would not help. A larger micro-batch would."
        )
    if plan.bound == "loading":
        yield (
            "Loading data is the bottleneck, even for the longest batch. So padding costs little time, and "
            "better matmul sizes would not help. More loader workers would."
        )
    if plan.best and plan.best.order == "grouped":
        yield ("Grouping by length shuffles less: the order of the samples is only partly random.")
    if plan.is_assumed:
        yield "Rounding lengths up gains only what unaligned rows are assumed to cost."
    if plan.is_assumed or any(size.assumed for size in plan.sizes):
        yield ASSUMPTION
    yield simulated_lengths_line(plan)


def simulated_lengths_line(plan: LengthPlan) -> str:
    """Return a sentence on the numbers of simulated and interpolated sequence lengths."""
    off = f" (error at most {100 * plan.off:.2g} %)" if plan.off else ""
    return (
        f"{plan.rehearsed} lengths were simulated, the others are interpolated{off}. All figures are "
        "predictions."
    )


def sizes(costly: Sequence[Size]) -> Grid:
    """Return a table of sizes (batch, length, vocabulary) that are slow on the GPU, each with a faster
    alternative.
    """
    rows = tuple(
        (
            size.what,
            f"{size.given:,}",
            f"{size.instead:,}" if size.instead else "",
            f"{100 * size.gain:.1f} %{' *' if size.assumed else ''}",
            _memory(size),
            f"{1e3 * size.step_seconds:,.1f}" if size.step_seconds else "",
            _means(size),
        )
        for size in costly
    )
    return Grid(
        title="Inefficient sizes in the longest batch",
        heads=("Size", "is>", "better>", "gain>", "memory>", "ms a step>", "what to do"),
        rows=rows,
        note="* only by the assumed cost of unaligned rows" if any(size.assumed for size in costly) else "",
    )


def _cuts(size: Size) -> bool:
    return size.what == "sequence length" and not size.proposed


def _means(size: Size) -> str:
    """Return a sentence on the effect of changing a size, such as the vocabulary, and the way to change
    it.
    """
    if size.what == "vocabulary":
        multiple = 64 if (size.instead or 0) % 64 == 0 else 8
        return f"add unused rows with resize_token_embeddings, to a multiple of {multiple}"
    if size.what == "sequence length":
        return (
            "a different job: it cuts sequences (gain in tokens/s)"
            if _cuts(size)
            else "more padding, with pad_to_multiple_of"
        )
    if size.what == "batch":
        larger = (size.instead or 0) > size.given
        return (
            "a different job: more samples in the same time"
            if larger
            else "a different job: fills a tile or a wave"
        )
    return f"fixed by the model, in {size.where}"


def _memory(size: Size) -> str:
    more = size.more_bytes
    if more is None:
        return ""
    return f"{show_bytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "the same"
