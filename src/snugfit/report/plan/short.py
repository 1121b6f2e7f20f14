"""The short report of a plan on one screen: the fit, the recipe, four numbers, the largest savings,
alternatives, the command.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import methodcaller
from typing import TYPE_CHECKING, NamedTuple

from snugfit.planning.plan import Choice, Plan
from snugfit.report.plan.next_steps import next_steps
from snugfit.report.plan.shown_front import shown_front
from snugfit.report.plan.ways_out import in_short
from snugfit.report.text.answer import (
    SCALED_RATES,
    UNREAD,
    four_numbers,
    show_fit,
    show_gib,
    subject,
    uncertain,
)
from snugfit.report.text.facts import Facts
from snugfit.report.text.pace import roughly
from snugfit.report.text.page import Page, Sentence
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.units import show_bytes

if TYPE_CHECKING:
    from snugfit.techniques.feature import Configuration

GAINS = 3
"""Largest number of techniques of which the report lists the savings."""

LEAST_GAIN = 0.005
"""Smallest saving of bytes or seconds that the report lists, as a share of the total."""

ALTERNATIVES = 2
"""Largest number of alternative recipes in the report."""

MEASURE = "Measure"
"""First word of the title of commands that compare predictions with a GPU."""

CURES = 3
"""Largest number of changes in the report with which a step would fit."""


def render(plan: Plan, *, configuration: Configuration | None = None) -> Page:
    """Return the short report of a plan. `configuration` is the user's configuration file, if
    there was one.
    """
    shown = plan.best_or_nearest
    return Page(
        [verdict(plan, configuration), Sentence(shown.recipe, "recipe")],
        [Facts(tuple(_numbers(plan)))],
        [] if plan.fits else ways_out(plan),
        [Facts(gains)] if (gains := tuple(_gains(plan))) else [],
        [Facts(rows)] if (rows := (*_alternatives(plan), *_engines_left_out(plan))) else [],
        (Sentence(step, "command") for step in _commands(next_steps(plan, configuration))),
        _uncertain(plan, configuration),
    )


def _commands(steps: Iterator[str]) -> list[str]:
    """Return the first command, and those that measure."""
    return [*islice(steps, 1), *filter(methodcaller("startswith", MEASURE), steps)]


def verdict(plan: Plan, configuration: Configuration | None = None) -> Sentence:
    """Return a sentence on whether the best recipe fits in the memory, with the condition under which this
    holds.
    """
    shown, limit = plan.best_or_nearest, plan.memory_bytes
    unread = bool(configuration and configuration.doubts)
    is_limited = plan.gpu is None or plan.gpu.memory_bytes != limit
    fit = show_fit(
        shown.needed_bytes,
        limit,
        headroom=plan.headroom_bytes if plan.tight else 0,
        speed=plan.timed(shown),
        condition=UNREAD if unread else "",
        limit="the limit is" if is_limited else "the card has",
        turn=plan.job.words.turn,
    )
    # The verdict replaces the text of `show_fit` before its colon.
    fit = fit if plan.fits else f"no recipe fits. The nearest {fit.partition(': ')[2]}"
    role = "bad" if not plan.fits else "tight" if plan.tight or unread else "good"
    about = subject(plan.job, Recipe.parse(shown.recipe), plan.gpu, memory=plan.memory_bytes)
    return Sentence(f"{about}: {fit}", role)


def _numbers(plan: Plan) -> Iterator[tuple[str, str]]:
    shown = plan.best_or_nearest
    parts = [
        (shown.requested_bytes, "tensors"),
        (shown.reserved_bytes - shown.requested_bytes, "allocator's reserve"),
        (shown.context_bytes, "CUDA context"),
    ]
    return four_numbers(shown.needed_bytes, plan.memory_bytes, parts, plan.timed(shown), plan.job.words)


def ways_out(plan: Plan) -> Iterator[Facts | Sentence | str]:
    """Yield sentences on changes of the nearest recipe with which a step would fit."""
    yield from in_short(plan.ways_out, plan.job.words.turn) or plan.cures[:CURES]


class Gain(NamedTuple):
    """Memory and time that one technique saves in comparison with another."""

    text: str
    saved_bytes: int
    saved_seconds: float
    needed_bytes: int
    step_seconds: float
    turn: str
    """Noun for one repetition of the timed work, such as `step`."""

    @property
    def shares(self) -> tuple[float, float]:
        """The saved fractions of the bytes and of the seconds, negative for a loss."""
        return self.saved_bytes / self.needed_bytes, self.saved_seconds / (self.step_seconds or 1)

    def __str__(self) -> str:
        (bytes_share, seconds_share), parts = self.shares, []
        if abs(bytes_share) >= LEAST_GAIN:
            sign = "less" if self.saved_bytes > 0 else "more"
            parts.append(f"{show_gib(abs(self.saved_bytes))} {sign} memory")
        if abs(seconds_share) >= LEAST_GAIN:
            sign = "faster" if self.saved_seconds > 0 else "slower"
            parts.append(f"{roughly(abs(self.saved_seconds))} a {self.turn} {sign}")
        return f"{self.text}: {', '.join(parts)}"


def _gains(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield labelled lines on the techniques that save the most bytes or seconds. Each is compared, alone,
    with the user's or the default technique.
    """
    gains = sorted(_all_gains(plan), key=lambda gain: -sum(max(0.0, share) for share in gain.shares))
    label = "gains"
    for gain in [gain for gain in gains if max(gain.shares) >= LEAST_GAIN][:GAINS]:
        yield label, str(gain)
        label = ""


def _all_gains(plan: Plan) -> Iterator[Gain]:
    shown, start, turn = plan.best_or_nearest, plan.start, plan.job.words.turn
    if start and start.needed_bytes and start.step_seconds:
        for change in start.changes:
            if change.needed_bytes and change.step_seconds:
                less, faster = (
                    start.needed_bytes - change.needed_bytes,
                    start.step_seconds - change.step_seconds,
                )
                text = f"{change.ours} in place of your {change.theirs}"
                yield Gain(text, less, faster, start.needed_bytes, start.step_seconds, turn)
        return
    for reason in plan.reasons:
        is_plain = reason.chosen == str(roster.plain(Slot(reason.slot)))
        if reason.needed_bytes and reason.step_seconds and not is_plain:
            less, faster = reason.needed_bytes - shown.needed_bytes, reason.step_seconds - shown.step_seconds
            text = f"{reason.chosen} in place of {reason.against}"
            if reason.is_estimated:
                text += " (estimated)"
            yield Gain(text, less, faster, shown.needed_bytes, shown.step_seconds, turn)


def _alternatives(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield labelled lines on a few other recipes of the Pareto front of memory and time, with their bytes
    and seconds."""
    shown = shown_front(plan, most=1 + ALTERNATIVES)
    for number, choice in enumerate(candidate for candidate in shown if candidate != plan.best_or_nearest):
        figures = f"{show_gib(choice.needed_bytes)}, {roughly(choice.step_seconds)} a {plan.job.words.turn}"
        yield "" if number else "alternative", f"{figures}{_mark(plan, choice)}: {choice.recipe}"


def _engines_left_out(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield a labelled line on the engines that a plan of inference left out, with the reasons."""
    engines = {technique.name for technique in roster.techniques() if technique.slot is Slot.ENGINE}
    names_by_reason: dict[str, list[str]] = {}
    for refusal in plan.refused:
        if not (plan.job.trains or refusal.recipes) and engines.issuperset(refusal.what.split(", ")):
            names_by_reason.setdefault(refusal.why.rstrip("."), []).append(refusal.what)
    if names_by_reason:
        texts = (f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items())
        yield "left out", "; ".join(texts)


def _mark(plan: Plan, choice: Choice) -> str:
    """Return a note on a recipe that does not fit or leaves less than the headroom (memory to keep free);
    else an empty text.
    """
    if not plan.fitting(choice):
        return f", short by {show_bytes(int(-plan.spare_bytes(choice)))}"
    return ", tight" if plan.is_tight(choice) else ""


def _uncertain(plan: Plan, configuration: Configuration | None) -> Iterator[Sentence]:
    doubts = (*[UNEQUAL] * (plan.verified is False), *plan.doubts)
    if not doubts:
        return iter(())
    widest = doubts[0]
    # The last doubts are those about the configuration file.
    if plan.verified is not False and configuration and configuration.doubts:
        widest = doubts[-1]
    elif plan.verified is not False and plan.timing and not plan.timing.measured_rates:
        widest = SCALED_RATES
    return uncertain(doubts, widest)


UNEQUAL = (
    "a full simulation of the answer gave other bytes than the search. This is a bug in snugfit: please "
    "report it, and check this recipe with snugfit predict."
)
"""Sentence for a plan whose chosen recipe gave other figures in a full simulation than in the search."""
