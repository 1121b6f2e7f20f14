"""A plan in a terminal and as Markdown: what to do, because, and what else there is."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from snugfit.planning.plan import Choice, Plan, Reason
from snugfit.report.grid import Grid, escape, terminal
from snugfit.report.grid import markdown as markdown_table
from snugfit.report.terminal import words
from snugfit.units import GIB, show_bytes, show_per_cent, show_seconds


def render(plan: Plan) -> RenderableType:
    """The whole report of one plan."""
    parts: list[RenderableType] = [words(question(plan), "bold"), words(answer(plan), _style(plan)), Text()]
    parts += [words(sentence) for sentence in because(plan)]
    parts += [Text(), terminal(front(plan))]
    parts += [terminal(refusals(plan))] if plan.refused else []
    parts += [words(line) for line in plan.cures]
    parts += [words(looked_at(plan))]
    parts += [words(f"Doubt: {doubt}", "yellow") for doubt in _doubts(plan)]
    return Group(*parts)


def markdown(plan: Plan) -> str:
    """The same for a file."""
    lines = [f"## {escape(question(plan))}", f"**{escape(answer(plan))}**"]
    lines += ["\n".join(f"- {escape(sentence)}" for sentence in because(plan))]
    lines += [markdown_table(front(plan)).rstrip()]
    lines += [markdown_table(refusals(plan)).rstrip()] if plan.refused else []
    lines += [escape(line) for line in plan.cures]
    lines += [escape(looked_at(plan)), *(f"Doubt: {escape(doubt)}" for doubt in _doubts(plan))]
    return "\n\n".join(lines) + "\n"


def question(plan: Plan) -> str:
    """What was asked, in one line."""
    job = plan.job
    size = f"batch {job.batch_size} × {job.sequence_length}"
    where = plan.gpu.name if plan.gpu else "no GPU named"
    memory = f", {show_bytes(plan.memory_bytes)}" if plan.memory_bytes else ""
    what = f"{job.model.name} · {job.task} · {job.phase} · {size}"
    return f"{what} · {where}{memory} · fidelity {plan.fidelity}"


def answer(plan: Plan) -> str:
    """What to do, in one line."""
    shown = plan.shown
    taking = f"{show_bytes(shown.needed_bytes)}, {show_seconds(shown.step_seconds)} a step, " + (
        f"{shown.samples_per_second:,.1f} samples/s"
    )
    if plan.best is None:
        lacking = shown.needed_bytes - (plan.memory_bytes or 0)
        return f"Nothing fits. The nearest miss lacks {show_bytes(lacking)}: {shown.recipe} ({taking})."
    return f"{shown.recipe}: {taking}."


def because(plan: Plan) -> Iterator[str]:
    """A sentence for each slot, with its bytes and per cents."""
    for reason in plan.reasons:
        yield _sentence(plan.shown, reason)


def _sentence(shown: Choice, reason: Reason) -> str:
    head = f"{reason.slot}: {reason.chosen} and not {reason.against}"
    if reason.needed_bytes is None or reason.step_seconds is None:
        return f"{head}, because {reason.why_not}."
    more = reason.needed_bytes - shown.needed_bytes
    size = f"{show_bytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "the same memory"
    share = f" ({show_per_cent(reason.needed_bytes, shown.needed_bytes)})" if more else ""
    slower = show_per_cent(reason.step_seconds, shown.step_seconds)
    length = f"a step of {show_seconds(reason.step_seconds)} ({slower})"
    return f"{head}, which takes {size}{share} and {length}."


def front(plan: Plan) -> Grid:
    """The Pareto front: no other recipe is both as fast and as small."""
    rows = tuple(
        (
            "best" if choice == plan.best else "" if _fits(plan, choice) else "does not fit",
            choice.recipe,
            f"{choice.needed_bytes / GIB:,.2f}",
            f"{choice.reserved_bytes / GIB:,.2f}",
            f"{choice.step_seconds * 1e3:,.1f}",
            f"{choice.samples_per_second:,.1f}",
        )
        for choice in plan.front
    )
    heads = ("", "Recipe", "GiB on the GPU>", "reserved>", "ms a step>", "samples/s>")
    return Grid(title="Memory against speed: each is the smallest at its speed", heads=heads, rows=rows)


def refusals(plan: Plan) -> Grid:
    """What was not considered."""
    rows = tuple(
        (refusal.what, refusal.why, f"{refusal.recipes:,}" if refusal.recipes else "")
        for refusal in plan.refused
    )
    return Grid(title="Not considered", heads=("What", "Why", "Recipes>"), rows=rows)


def looked_at(plan: Plan) -> str:
    """How much the search looked at, and what it was held to."""
    counts = plan.counts
    text = (
        f"{counts.recipes:,} lawful recipes, {counts.tapes:,} of them different, with {counts.footprints:,} "
        f"different footprints; {counts.passes:,} kinds of passes rehearsed, {counts.replayed:,} recipes put "
        "together whole."
    )
    return text + (" Rehearsed whole, the answer came out the same to the byte." if plan.verified else "")


def _doubts(plan: Plan) -> Iterator[str]:
    if plan.verified is False:
        yield (
            "rehearsed whole, the answer takes other bytes than its parts. That is a fault of snugfit: "
            "please report it, and ask snugfit predict about this recipe."
        )
    yield from plan.doubts


def _fits(plan: Plan, choice: Choice) -> bool:
    return plan.memory_bytes is None or choice.needed_bytes <= plan.memory_bytes


def _style(plan: Plan) -> str:
    return "bold green" if plan.fits else "bold red"
