"""Plans for many GPUs, in a terminal and as Markdown: the GPUs that can train a job, and their
rental costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from snugfit.errors import some_of
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.prices import Cost, Prices, cheapest, cost
from snugfit.planning.plan import Choice, KeptSlot
from snugfit.report.text.facts import Facts
from snugfit.report.text.grid import Grid
from snugfit.report.text.job import job_line
from snugfit.report.text.pace import show_mfu, show_spread, show_tokens
from snugfit.report.text.page import Page, Sentence
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Slot
from snugfit.units import GIB, show_bytes, show_seconds

HOUR = 3600
FEW = 6
"""Largest number of GPUs that a sentence of the report lists by name."""

SCALED = "~"
"""Mark before predicted seconds, if the GPU's speeds were scaled from another GPU's by their data sheets."""

SCALED_NOTE = (
    f"{SCALED}: this GPU was not measured. Its seconds are scaled from an H200's by the data sheets."
)


def render(plans: GpuPlans, prices: Prices | None = None, *, details: bool = True) -> Page:
    """Return the report of plans for many GPUs: the best GPUs, a table of all, and a description of the
    search.

    More than `FEW` GPUs without `details` have at most 15 lines of 100 columns: a line for each architecture.
    """
    prices = prices or Prices()
    answer = [Sentence(line, "good" if plans.fitting else "bad") for line in headline(plans, prices)]
    if not details and len(plans.answers) > FEW:
        count = f"{len(plans.fitting)} of {len(plans.answers)} GPUs can {plans.job.words.verb} this"
        return Page(
            answer,
            [Facts(tuple(by_architecture(plans, prices)))],
            [f"{count} (--details: all, with recipes). {SCALED}: scaled from an H200's by the data sheets."],
        )
    return Page(
        answer,
        [question(plans)],
        slots_kept(plans),
        run_length(plans, prices),
        [table(plans, prices), *unknown(plans)],
        search_counts(plans),
        (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in doubts(plans)),
    )


def question(plans: GpuPlans) -> str:
    """Return the report's first line: the job, the number of GPUs, the allowed change of results (fidelity)
    and the objective.
    """
    limits = f"fidelity {plans.fidelity} · objective {plans.objective}"
    return f"{job_line(plans.job)} · {len(plans.answers)} GPUs · {limits}"


def headline(plans: GpuPlans, prices: Prices) -> Iterator[str]:
    """Yield sentences with the results: the smallest GPU that can train the job, the fastest, and the
    cheapest to rent.
    """
    if not plans.fitting:
        yield f"None of these GPUs can {plans.job.words.verb} this. {_nearest(plans)}".strip()
        return
    smallest, best, rent = plans.smallest, plans.fastest, cheapest(plans, prices)
    assert smallest is not None
    about = f", {cards_like(plans, smallest)}"
    yield _sentence(plans, f"The smallest GPU that can {plans.job.words.verb} this", smallest, about)
    if best:
        yield _sentence(plans, "The fastest", best)
    if rent:
        costs = cost(rent, prices, plans.steps)
        about = (
            f" ({show_money(costs.per_1000_samples)} USD for 1,000 samples at {costs.per_hour:g} USD an hour)"
        )
        yield _sentence(plans, "The cheapest", rent, about)


def by_architecture(plans: GpuPlans, prices: Prices) -> Iterator[tuple[str, str]]:
    """Yield each architecture with the cheapest of its GPUs that fit. Without prices, it is the smallest."""

    def rank(answer: OnGpu) -> tuple[float, ...]:
        usd = cost(answer, prices, plans.steps).per_1000_samples or float("inf")
        return usd, answer.gpu.memory_bytes or 0, answer.pace(plans.steps) or 0.0

    ranked = sorted(plans.fitting, key=rank, reverse=True)
    # The last entry of a key stays in a dictionary.
    firsts = {answer.gpu.architecture.split()[0]: answer for answer in ranked}
    for name, answer in sorted(firsts.items(), key=lambda item: rank(item[1])):
        yield name, f"{answer.key} ({show_bytes(answer.gpu.memory_bytes or 0)}): {_figures(plans, answer)}"


def slots_kept(plans: GpuPlans) -> Iterator[str]:
    """Yield a line about the techniques that every recipe has because their slots (such as the optimizer)
    were not searched.
    """
    if len(plans.kept) == len(Slot):
        yield f"The same recipe on every GPU: {_recipe(plans)}."
    else:
        yield from (f"{line} --free SLOT allows other techniques there." for line in kept_line(plans.kept))


def kept_line(slots: Sequence[KeptSlot]) -> list[str]:
    """Return a sentence that lists the slots (choices of the recipe) that were not searched, with their
    techniques; none without one.
    """
    shown = ", ".join(f"{slot.slot} ({' or '.join(slot.techniques)})" for slot in slots)
    return [f"Kept: {shown}."] if shown else []


def _recipe(plans: GpuPlans) -> Recipe:
    return Recipe.parse(" + ".join(slot.techniques[0] for slot in plans.kept))


def _sentence(plans: GpuPlans, label: str, answer: OnGpu, about: str = "") -> str:
    assert answer.choice is not None
    return f"{label}: {answer.key}{about}, with {answer.choice.recipe}: {_figures(plans, answer)}."


def cards_like(plans: GpuPlans, answer: OnGpu) -> str:
    """Return a GPU by its nominal memory, with the models of that memory that also train this: `an 80 GB card
    (A100, H100)`.
    """
    size = answer.gpu.marketed_gb
    if size is None:
        return show_bytes(answer.gpu.memory_bytes or 0)
    models = dict.fromkeys(fitting.gpu.model for fitting in plans.fitting if fitting.gpu.marketed_gb == size)
    # English uses `an` before 8, 11, 18 and 80.
    article = "an" if str(size).startswith("8") or size in (11, 18) else "a"
    return f"{article} {size} GB card ({some_of([*models], FEW)})"


def _figures(plans: GpuPlans, answer: OnGpu) -> str:
    spread, choice = show_spread(plans.speed(answer)), answer.choice
    assert choice is not None
    figures = show_bytes(choice.needed_bytes)
    if choice.step_seconds:
        scaled = SCALED if answer.measured_rates is False else ""
        figures += f", {scaled}{show_seconds(choice.step_seconds)} a {plans.job.words.turn}"
    return figures + (f" ({spread})" if spread else "")


def _nearest(plans: GpuPlans) -> str:
    known = [answer for answer in plans.answers if answer.choice]
    if not known:
        return ""
    nearest = min(known, key=lambda answer: answer.lacking_bytes)
    assert nearest.choice is not None
    lacking = show_bytes(nearest.lacking_bytes)
    return f"The nearest miss: {nearest.key} is short by {lacking} for {nearest.choice.recipe}."


def run_length(plans: GpuPlans, prices: Prices) -> Iterator[str]:
    """Yield a sentence on the length of the whole training run if it was given, and on GPUs
    without a price.
    """
    if plans.steps:
        samples = plans.steps * plans.job.batch_size
        yield (
            f"The run: {plans.steps:,} steps, {samples:,} samples. Start-up is counted, as on the host of "
            "an H200. Renting a machine and downloading weights and data are not."
        )
    yield from without_a_price([answer.key for answer in plans.fitting], prices)


def without_a_price(keys: Sequence[str], prices: Prices) -> Iterator[str]:
    """Yield a sentence about GPUs that train the job but have no price, if at least one has a price."""
    unpriced = [key for key in keys if key not in prices.per_hour]
    if prices.per_hour and unpriced:
        yield f"No price was given for {some_of(unpriced, FEW)}, which can train this too."


def table(plans: GpuPlans, prices: Prices) -> Grid:
    """Return a table with a line for each GPU with predicted bytes, the best first. GPUs without a fitting
    recipe are last.
    """

    def price(answer: OnGpu) -> Cost:
        return cost(answer, prices, plans.steps)

    known = sorted(
        (answer for answer in plans.answers if answer.choice),
        key=lambda answer: _order(plans, answer, price(answer)),
    )
    columns = _columns(plans, prices, known)
    rows = [
        (*(show(answer, answer.choice, price(answer)) for _, show in columns), answer.choice.recipe)
        for answer in known
        if answer.choice
    ]
    scaled = any(answer.measured_rates is False for answer in known)
    return Grid(
        title="The best recipe on each GPU; where nothing fits, the nearest miss",
        heads=(*(head for head, _ in columns), "Recipe<"),
        rows=tuple(rows),
        note=SCALED_NOTE if scaled else "",
    )


_Show = Callable[[OnGpu, Choice, Cost], str]


def _columns(plans: GpuPlans, prices: Prices, known: Sequence[OnGpu]) -> list[tuple[str, _Show]]:
    columns: list[tuple[str, _Show]] = [
        ("GPU", lambda answer, choice, cost: answer.key),
        ("GiB>", lambda answer, choice, cost: f"{(answer.gpu.memory_bytes or 0) / GIB:,.1f}"),
        ("needs GiB>", lambda answer, choice, cost: f"{choice.needed_bytes / GIB:,.2f}"),
        (
            f"ms a {plans.job.words.turn}>",
            lambda answer, choice, cost: show_ms(answer, choice) if choice.step_seconds else "?",
        ),
        (f"{plans.job.words.item}/s>", lambda answer, choice, cost: _number(choice.samples_per_second)),
        ("tokens/s>", lambda answer, choice, cost: _tokens(plans, answer)),
        ("MFU>", lambda answer, choice, cost: show_mfu(answer.mfu)),
    ]
    if plans.steps:
        columns.append(("start-up s>", lambda answer, choice, cost: _number(choice.once_seconds)))
    columns += cost_columns(prices, plans.steps)
    if any(map(_verdict, known)):
        columns.insert(3, ("", lambda answer, choice, cost: _verdict(answer)))
    return columns


def cost_columns(prices: Prices, steps: int | None) -> Iterator[tuple[str, Callable[[Any, Any, Any], str]]]:
    """Yield the column titles for the seconds and rental costs of a run, if its length and prices were given.
    Each has a function that returns a cell's text for a GPU, its recipe and its cost.
    """
    if steps:
        yield "run>", lambda answer, recipe, cost: show_duration(cost.run_seconds)
    if prices.per_hour:
        yield "USD/h>", lambda answer, recipe, cost: show_money(cost.per_hour)
        yield "USD/1,000>", lambda answer, recipe, cost: show_money(cost.per_1000_samples)
    if steps and prices.per_hour:
        yield "USD a run>", lambda answer, recipe, cost: show_money(cost.run)


def _verdict(answer: OnGpu) -> str:
    return "tight" if answer.tight else "" if answer.fits else f"short by {show_bytes(answer.lacking_bytes)}"


def _order(plans: GpuPlans, answer: OnGpu, cost: Cost) -> tuple[float, ...]:
    """Return a sort key for a GPU's result: fitting ones first, then by the objective of the search, missing
    values last.
    """
    choice = answer.choice
    assert choice is not None
    seconds, far = answer.pace(plans.steps), float("inf")
    by = {
        "speed": (seconds or far,),
        "memory": (choice.needed_bytes, seconds or far),
        "cost": (far if cost.per_1000_samples is None else cost.per_1000_samples, seconds or far),
    }
    return (0.0, *by[plans.objective]) if answer.fits else (1.0, answer.lacking_bytes)


def unknown(plans: GpuPlans) -> list[Grid]:
    """Return a table of the GPUs that cannot be predicted, with the reason. GPUs with the same reason share a
    line.
    """
    reasons: dict[str, list[OnGpu]] = {}
    for answer in plans.answers:
        if answer.why:
            reasons.setdefault(answer.why.replace(answer.gpu.name, "this GPU"), []).append(answer)
    rows = tuple(
        (
            ", ".join(entry.key for entry in group),
            group[0].why if len(group) == 1 else reason[0].upper() + reason[1:],
        )
        for reason, group in reasons.items()
    )
    return [Grid(title="Not predicted", heads=("GPU", "Why"), rows=rows)] if rows else []


def doubts(plans: GpuPlans) -> dict[str, None]:
    """Return the warnings about assumptions in the simulations of all GPUs, each once."""
    return dict.fromkeys(doubt for answer in plans.answers for doubt in answer.doubts)


def search_counts(plans: GpuPlans) -> Iterator[str]:
    """Yield a sentence on the number of recipes that the search considered. It adds how a full simulation
    checked the best ones.
    """
    if plans.counts:
        recipes, searches = max(counts.recipes for counts in plans.counts), len(plans.counts)
        evaluated = sum(counts.replayed for counts in plans.counts)
        yield (
            f"{recipes:,} valid recipe{'s' * (recipes != 1)}. GPUs that run the same kernels were searched "
            f"together, in {searches} search{'es' * (searches != 1)} that evaluated {evaluated:,} "
            f"recipe{'s' * (evaluated != 1)}. Each answer includes the workspaces of its own GPU. "
            f"{_agreement(plans)}".strip()
        )


def _agreement(plans: GpuPlans) -> str:
    """Return a sentence that compares the bytes of each best recipe in a full simulation with those in the
    search.
    """
    other = [answer.key for answer in plans.answers if answer.verified is False]
    if other:
        return (
            f"Simulated in full, {some_of(other, FEW)} needed other bytes than in the search. The "
            "figures are from the full simulation."
        )
    known = any(answer.verified for answer in plans.answers)
    return "Simulated in full, each answer takes the same bytes." if known else ""


def show_ms(answer: Any, choice: Any) -> str:
    """Return the milliseconds of a step, with a mark if a data sheet scaled the GPU's rates."""
    return f"{SCALED if answer.measured_rates is False else ''}{choice.step_seconds * 1e3:,.1f}"


def _tokens(plans: GpuPlans, answer: OnGpu) -> str:
    speed = plans.speed(answer)
    return show_tokens(speed.tokens_per_second if speed else None)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value else "?"


def show_money(value: float | None) -> str:
    """Return an amount of money with three digits; empty without a value."""
    if value is None:
        return ""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def show_duration(seconds: float | None) -> str:
    """Return a duration in seconds, minutes or hours; empty without a value."""
    if seconds is None:
        return ""
    if seconds < HOUR:
        return show_seconds(seconds) if seconds < 60 else f"{seconds / 60:,.1f} min"
    return f"{seconds / HOUR:,.1f} h"
