"""A plan in a terminal and as Markdown: the best recipe, the reasons for it, and the alternatives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snugfit.planning.plan import Choice, Exclusion, Plan, Reason
from snugfit.report.plan.next_steps import next_steps
from snugfit.report.plan.short import UNEQUAL, verdict
from snugfit.report.plan.shown_front import shown_front
from snugfit.report.plan.ways_out import of_plan
from snugfit.report.text.grid import Grid
from snugfit.report.text.job import job_line
from snugfit.report.text.pace import pace, show_tokens
from snugfit.report.text.page import Page, Sentence, with_commands
from snugfit.units import GIB, show_bytes, show_per_cent, show_seconds

if TYPE_CHECKING:
    from snugfit.techniques.feature import Configuration

LEAST_STARTUP = 0.05
"""Smallest difference between two recipes' start-up times, in seconds, that a sentence mentions."""


def render(plan: Plan, *, everything: bool = False, configuration: Configuration | None = None) -> Page:
    """Return the whole report of one plan. With `everything`, it has the whole Pareto front of memory and
    time.

    `configuration` is the user's configuration file from which the plan started, if there was one.
    """
    return Page(
        [verdict(plan, configuration), Sentence(plan.best_or_nearest.recipe, "recipe")],
        [question(plan), f"A {_turn(plan)} takes {_pace(plan)}."],
        headroom(plan),
        (Sentence(sentence, "bullet") for sentence in reasons(plan)),
        about_run(plan),
        about_cost(plan),
        changes(plan),
        [front(plan, everything=everything), *([refusals(plan)] if plan.refused else [])],
        plan.cures,
        with_commands((*of_plan(plan), *next_steps(plan, configuration))),
        [search_counts(plan)],
        (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in _doubts(plan)),
    )


def _turn(plan: Plan) -> str:
    return plan.job.words.turn


def _pace(plan: Plan) -> str:
    return pace(plan.timed(plan.best_or_nearest), plan.job.words)


def question(plan: Plan) -> str:
    """Return the report's first line: the job, the GPU, its memory and the allowed change of results
    (fidelity).
    """
    device = plan.gpu.name if plan.gpu else "no GPU named"
    memory = f", {show_bytes(plan.memory_bytes)}" if plan.memory_bytes else ""
    return f"{job_line(plan.job)} · {device}{memory} · fidelity {plan.fidelity}"


def answer(plan: Plan) -> str:
    """Return the line with the plan's best recipe, its memory and its speed. If no recipe fits, it has the
    one that is nearest to fitting.
    """
    shown = plan.best_or_nearest
    figures = f"{show_bytes(shown.needed_bytes)}, a {_turn(plan)} takes {_pace(plan)}"
    if plan.best is None:
        short = show_bytes(shown.needed_bytes - (plan.memory_bytes or 0))
        return f"Nothing fits. The nearest miss is short by {short}: {shown.recipe} ({figures})."
    return f"{shown.recipe}: {figures}."


def headroom(plan: Plan) -> Iterator[str]:
    """Yield a sentence on the memory that the best recipe leaves free, and the amount that should stay free
    (headroom).
    """
    if plan.best and plan.memory_bytes and plan.headroom_bytes:
        left = plan.memory_bytes - plan.best.needed_bytes
        requested = f"{show_bytes(plan.headroom_bytes)} should stay free (--headroom)"
        if plan.tight:
            yield (
                f"Tight: no recipe leaves the headroom free. This one leaves {show_bytes(left)}; {requested}."
            )
        else:
            yield f"It leaves {show_bytes(left)} of {show_bytes(plan.memory_bytes)}; {requested}."


def reasons(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each slot (such as the optimizer) with the reason for the best recipe's technique:
    its bytes and seconds against another's.
    """
    for reason in plan.reasons:
        yield _sentence(plan.best_or_nearest, reason, _turn(plan))


def _sentence(shown: Choice, reason: Reason, turn: str) -> str:
    chosen = f"{reason.chosen}, {reason.kept}" if reason.kept else reason.chosen
    if not reason.against:
        return f"{reason.slot}: {chosen}."
    if reason.needed_bytes is None or reason.step_seconds is None:
        return f"{reason.slot}: {chosen}. Not {reason.against}: {reason.why_not}."
    more = reason.needed_bytes - shown.needed_bytes
    share = show_per_cent(reason.needed_bytes, shown.needed_bytes)
    size = f"{'+' if more > 0 else '-'}{show_bytes(abs(more))} ({share})" if more else "same memory"
    slower = show_per_cent(reason.step_seconds, shown.step_seconds)
    text = f"{reason.slot}: {chosen}. With {reason.against}: {size}, "
    text += f"{show_seconds(reason.step_seconds)} a {turn} ({slower})"
    extra_seconds = (reason.once_seconds or shown.once_seconds) - shown.once_seconds
    if abs(extra_seconds) >= LEAST_STARTUP:
        text += f", {'+' if extra_seconds > 0 else '-'}{show_seconds(abs(extra_seconds))} start-up"
    if reason.because:
        text += f", {reason.because}"
    if reason.is_estimated:
        text += " (estimated from uncompiled steps)"
    return f"{text}."


def about_run(plan: Plan) -> Iterator[str]:
    """Yield a sentence on the seconds of the run's start-up, and on their part in the ranking of recipes."""
    once, steps = plan.best_or_nearest.once_seconds, plan.steps
    if steps:
        stepping = plan.best_or_nearest.step_seconds * steps
        yield (
            f"Ranked for a run of {steps:,} steps, {steps * plan.job.batch_size:,} samples: about "
            f"{show_seconds(once)} of start-up (as on the host of an H200), and {show_seconds(stepping)} of "
            "steps."
        )
    elif once:
        yield (
            f"Start-up takes about {show_seconds(once)} more, which is not counted here. For a short run "
            "add --steps N or --samples N."
        )


def about_cost(plan: Plan) -> Iterator[str]:
    """Yield a sentence that the fastest recipe on one GPU is also the cheapest, for a plan with the objective
    `cost`.
    """
    if plan.objective == "cost":
        yield (
            "On one GPU the fastest recipe is also the cheapest, because an hour costs the same. To find "
            "the cheapest GPU: snugfit gpus --for MODEL --price NAME=USD."
        )


def changes(plan: Plan) -> list[Grid]:
    """Return a table of the plan's changes to the recipe of the user's configuration file; empty without such
    a file.
    """
    start = plan.start
    if start is None:
        return []
    rows = [("as it is", *_figures(start.needed_bytes, start.step_seconds), start.recipe, "")]
    rows += [
        (change.slot, *_figures(change.needed_bytes, change.step_seconds), change.theirs, change.ours)
        for change in start.changes
    ]
    shown = plan.best_or_nearest
    rows += [("all of them", *_figures(shown.needed_bytes, shown.step_seconds), "", shown.recipe)]
    title = "Changes to your recipe, each change alone" if start.changes else "Your recipe is the best"
    note = f"Your recipe cannot run: {start.why_not} " if start.why_not else ""
    return [
        Grid(
            title=title,
            heads=("Slot", "GiB on the GPU>", f"ms a {_turn(plan)}>", "Yours<", "The plan's<"),
            rows=tuple(rows if start.changes else rows[:1]),
            note=f"{note}Figures are for the plain loop.",
        )
    ]


def _figures(needed: int | None, seconds: float | None) -> tuple[str, str]:
    if needed is None or seconds is None:
        return "cannot run", ""
    return f"{needed / GIB:,.2f}", f"{seconds * 1e3:,.1f}"


def front(plan: Plan, *, everything: bool = False) -> Grid:
    """Return a table of the Pareto front of memory and time. No recipe is both faster and smaller than one of
    the front.

    It shows selected rows (`shown_front`), or all of them for `everything`.
    """
    shown = shown_front(plan, everything=everything)
    # The chart of the Pareto front uses the same numbers.
    numbers = {choice: number for number, choice in enumerate(plan.fitting_first, 1)}
    rows = tuple(
        (
            choice.recipe,
            f"{numbers.get(choice, '')} {_mark(plan, choice)}".strip(),
            f"{choice.needed_bytes / GIB:,.2f}",
            f"{choice.reserved_bytes / GIB:,.2f}",
            f"{choice.step_seconds * 1e3:,.1f}",
            f"{choice.samples_per_second:,.1f}",
            show_tokens(plan.timed(choice).tokens_per_second),
            f"{choice.once_seconds:,.1f}",
        )
        for choice in shown
    )
    heads = (
        "Recipe<",
        "No.",
        "GiB on the GPU>",
        "reserved>",
        f"ms a {_turn(plan)}>",
        f"{plan.job.words.item}/s>",
        "tokens/s>",
        "start-up s>",
    )
    left_out = len({*plan.front} - {*shown})
    noun = "row is" if left_out == 1 else "rows are"
    hidden = f"{left_out} more {noun} not shown (--all shows all, and slower ones)." if left_out else ""
    return Grid(
        title="The Pareto front: memory against speed",
        heads=heads,
        rows=rows,
        note=hidden,
    )


def refusals(plan: Plan) -> Grid:
    """Return a table of the techniques that the plan did not consider, by reason, with the numbers of their
    recipes.
    """
    heads = (
        ("What", "Why", "Recipes>")
        if any(exclusion.recipes for exclusion in plan.refused)
        else ("What", "Why")
    )
    by_reason: dict[str, list[Exclusion]] = defaultdict(list)
    for refusal in plan.refused:
        by_reason[refusal.why].append(refusal)
    cells = (
        (
            ", ".join(dict.fromkeys(exclusion.what for exclusion in several)),
            reason,
            f"{count:,}" if (count := sum(exclusion.recipes for exclusion in several)) else "",
        )
        for reason, several in by_reason.items()
    )
    return Grid(title="Not considered", heads=heads, rows=tuple(row[: len(heads)] for row in cells))


def search_counts(plan: Plan) -> str:
    """Return a sentence on the number of recipes that the search considered, and on the full simulation of
    the best one.
    """
    counts = plan.counts
    text = (
        f"{counts.recipes:,} valid recipes, {counts.tapes:,} of them distinct, with {counts.footprints:,} "
        f"distinct footprints; {counts.passes:,} different forward and backward passes simulated, "
        f"{counts.replayed:,} recipes "
        "joined from these passes."
    )
    return text + (" The answer was simulated in full and takes the same bytes." if plan.verified else "")


def _doubts(plan: Plan) -> Iterator[str]:
    if plan.verified is False:
        yield UNEQUAL
    yield from plan.doubts


def _mark(plan: Plan, choice: Choice) -> str:
    if choice == plan.best:
        return "best"
    if not plan.fitting(choice):
        return f"short by {show_bytes(int(-plan.spare_bytes(choice)))}"
    return "tight" if plan.is_tight(choice) else ""
