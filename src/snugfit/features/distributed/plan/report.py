"""A plan for several GPUs, in a terminal and as Markdown: numbers of GPUs with their recipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from snugfit.features.distributed.plan.building import BUILT_ON_HOST
from snugfit.features.distributed.plan.plan import OnGpus, SeveralGpusPlan
from snugfit.report.plan.gpu_plans import kept_line
from snugfit.report.text.answer import uncertain
from snugfit.report.text.grid import Grid
from snugfit.report.text.job import job_line
from snugfit.report.text.page import Page, Sentence
from snugfit.units import GIB, show_bytes, show_seconds


def render(plan: SeveralGpusPlan, *, details: bool = True) -> Page:
    """Return the report of a plan for several GPUs; `details` adds alternatives and every warning."""
    short: list[Iterable[Sentence | Grid | str]] = [
        [Sentence(line, "good" if plan.fitting else "bad") for line in _headline(plan)],
        [f"{job_line(plan.job)} · {plan.gpu.name} · fidelity {plan.fidelity}"],
        kept_line(plan.kept_slots),
        [BUILT_ON_HOST] if plan.job.build_on == "host" else [],
        [_table("The fastest recipe on each number of GPUs", plan, plan.answers)],
        [f"{one.gpus:,} GPUs: {one.why}" for one in plan.answers if one.why],
    ]
    if not details:
        return Page(*short, uncertain(plan.doubts, plan.doubts[0] if plan.doubts else ""))
    return Page(
        *short,
        [_table("What else fits them", plan, plan.alternatives)] if plan.alternatives else [],
        [
            f"{plan.screened:,} recipes were simulated on models of few layers, and those of these tables in "
            "full."
        ],
        (Sentence(f"Left out: {one.what}: {one.why}") for one in plan.refused),
        (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in plan.doubts),
    )


def _headline(plan: SeveralGpusPlan) -> Iterator[str]:
    if not plan.fitting:
        miss = min(plan.answers, key=lambda one: one.needed_bytes)
        spare = plan.memory_bytes - plan.headroom_bytes
        yield (
            f"Nothing fits. The nearest miss is on {miss.gpus} x {plan.gpu.key} and is short by "
            f"{show_bytes(miss.needed_bytes - spare)} on each: {miss.recipe}."
        )
        return
    named = {
        "The fewest GPUs that fit": plan.fewest,
        "The fastest": plan.fastest,
        "The cheapest": plan.cheapest,
    }
    for what, one in named.items():
        if one is not None:
            yield (
                f"{what}: {one.gpus} x {plan.gpu.key}, {show_seconds(one.step_seconds)} a step, "
                f"{one.samples_per_second:,.1f} samples/s, {show_bytes(one.needed_bytes)} each, with "
                f"{one.recipe}."
            )
        # With a single number of GPUs, the fewest, fastest and cheapest are the same.
        if len(plan.answers) == 1:
            return


def _table(title: str, plan: SeveralGpusPlan, answers: Sequence[OnGpus]) -> Grid:
    rows: list[tuple[str, ...]] = [
        (
            f"{one.gpus:,}",
            f"{one.needed_bytes / GIB:,.2f}",
            "" if one.fits else "does not fit",
            f"{one.step_seconds * 1e3:,.1f}",
            f"{one.samples_per_second:,.1f}",
            "" if one.scaling_efficiency is None else f"{100 * one.scaling_efficiency:.0f} %",
            f"{one.gpu_seconds:,.3g}",
            *([] if (usd := plan.usd_per_1000_samples(one)) is None else [f"{usd:,.3g}"]),
            one.recipe,
        )
        for one in answers
    ]
    heads: tuple[str, ...] = (
        "GPUs>", "needs GiB each>", "", "ms a step>", "samples/s>", "scaling>", "GPU s a step>",
        *([] if plan.price_per_hour is None else ["USD per 1,000 samples>"]), "Recipe<",
    )  # fmt: skip
    if not any(row[2] for row in rows):
        heads, rows = (*heads[:2], *heads[3:]), [(*row[:2], *row[3:]) for row in rows]
    note = "Scaling: the share of a step that it would take if exchanges between GPUs took no time."
    return Grid(title=title, heads=heads, rows=tuple(rows), note=note)
