"""Tables of the guide's experiments next to today's fastest recipes."""

from __future__ import annotations

from collections.abc import Iterator

from snugfit.features.guide.cells import show_samples_range
from snugfit.features.guide.methods import UNKNOWN, show_rate, show_share, show_size
from snugfit.features.guide.result import GuideResult, GuideRow, LargeModelRow, ModernRow
from snugfit.report.text.grid import Grid
from snugfit.units import show_bytes


def modern_grids(result: GuideResult) -> Iterator[Grid]:
    """Yield a table of today's fastest recipe for each experiment, and one of large models without DeepSpeed.
    Either is left out if it was not requested.
    """
    if result.modern:
        yield _experiments(result)
    if result.large_models:
        yield _large_models(result.large_models)


def _experiments(result: GuideResult) -> Grid:
    then = {row.name: row for row in result.rows}
    rows = tuple(_cells(then[row.name], row) for row in result.modern)
    heads: tuple[str, ...] = ("Experiment", "MiB>", "Today's MiB>", "MiB change>")
    heads += ("Samples/s>", "Today's samples/s>", "Likely samples/s>", "Speed change>")
    return Grid(
        title=f"The guide's experiments, and today's best recipe in the same memory of {result.gpu}",
        heads=(*heads, "Changed<", "Recipe today<"),
        rows=rows,
        note="Each recipe is the fastest of a plan (--fidelity rounds, AdamW) that takes no more memory than "
        "the experiment does with today's software, or than the GPU has where it cannot run. Layers are "
        "compiled in none: snugfit plan looks at that.",
    )


def _cells(then: GuideRow, now: ModernRow) -> tuple[str, ...]:
    speed_then = then.predicted_speed.samples_per_second if then.predicted_speed else None
    speed_now = now.speed.samples_per_second if now.speed else None
    changed = ", ".join(f"{one.then} -> {one.now}" for one in now.instead)
    return (
        now.name,
        show_size(then.predicted_bytes),
        show_size(now.needed_bytes),
        show_share(now.needed_bytes, then.predicted_bytes),
        show_rate(speed_then),
        show_rate(speed_now),
        show_samples_range(now.speed),
        show_share(speed_now, speed_then),
        changed or now.why_none,
        now.recipe,
    )


def _large_models(models: tuple[LargeModelRow, ...]) -> Grid:
    rows = tuple(
        (
            row.name,
            row.gpu,
            show_bytes(row.needed_bytes) if row.needed_bytes is not None else UNKNOWN,
            {True: "yes", False: "no", None: "refused"}[row.fits],
            show_rate(row.speed.samples_per_second if row.speed else None),
            show_samples_range(row.speed),
            row.refused.strip().rpartition("\n")[2] or row.why,
            row.recipe,
        )
        for row in models
    )
    return Grid(
        title="Large models on one GPU, with DeepSpeed and without",
        heads=(
            "Job",
            "GPU",
            "Needed>",
            "Fits",
            "Samples/s>",
            "Likely samples/s>",
            "Why",
            "Recipe<",
        ),
        rows=rows,
        note="The guide's advice for a model that does not fit is ZeRO with offload to the CPU: T5-3b in a "
        "batch of 20 on a 24 GB RTX 3090, where it did not fit in a batch of 1 (Hugging Face's blog, January "
        "2021). If DeepSpeed is installed, its own engine is simulated; these steps were not measured.",
    )
