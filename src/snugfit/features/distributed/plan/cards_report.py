"""Plans by number of GPUs, in a terminal and as Markdown: models, numbers and costs of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from snugfit.errors import some_of
from snugfit.features.distributed.plan.building import BUILT_ON_HOST
from snugfit.features.distributed.plan.plan import (
    CardPlans,
    CardsCost,
    CardsOfKind,
    OnGpus,
    cheapest_cards,
    cost_of_cards,
)
from snugfit.planning.fleet.prices import Prices
from snugfit.report.plan.gpu_plans import (
    FEW,
    SCALED,
    SCALED_NOTE,
    cost_columns,
    kept_line,
    show_money,
    show_ms,
    without_a_price,
)
from snugfit.report.text.grid import Grid
from snugfit.report.text.job import job_line
from snugfit.report.text.page import Page, Sentence
from snugfit.units import GIB, show_bytes, show_seconds


def render(plans: CardPlans, prices: Prices | None = None) -> Page:
    """Return the report of plans by number of GPUs: the answers, a table, and a description of the search."""
    prices = prices or Prices()
    return Page(
        (Sentence(line, "good" if plans.fitting else "bad") for line in _headline(plans, prices)),
        [_question(plans)],
        _about_the_run(plans, prices),
        [_table(plans, prices)] if any(kind.answers for kind in plans.answers) else [],
        (
            f"{one.gpus:,} x {kind.key}: {one.why}"
            for kind in plans.answers
            for one in kind.answers
            if one.why
        ),
        _built_on_host(plans),
        _what_more_bring(plans),
        _unknown(plans),
        [
            f"{plans.screened:,} recipes were simulated on models of few layers and few micro-batches, from "
            "which these figures follow; bytes leave 3 % for that. `snugfit plan --gpu NAME --gpus N` "
            "simulates its answers with all layers."
        ],
        (Sentence(f"Left out: {one.what}: {one.why}") for one in plans.refused),
        (Sentence(f"Uncertain: {doubt}", "uncertain") for doubt in plans.doubts),
    )


def _built_on_host(plans: CardPlans) -> list[str]:
    kinds = [kind.key for kind in plans.answers if kind.answers and kind.build_on == "host"]
    return [f"{', '.join(kinds)}: {BUILT_ON_HOST}"] if kinds else []


def _question(plans: CardPlans) -> str:
    kinds = f"{len(plans.answers)} kind{'s' * (len(plans.answers) != 1)} of GPU"
    counts = ", ".join(f"{count:,}" for count in plans.gpus)
    return f"{job_line(plans.job)} · {kinds} · {counts} of each · fidelity {plans.fidelity}"


def _headline(plans: CardPlans, prices: Prices) -> Iterator[str]:
    if not plans.fitting:
        yield f"Nothing fits. {_nearest(plans)}".strip()
        return
    fewest = plans.fewest
    if fewest and fewest.fewest:
        yield f"The fewest GPUs that can train this: {_figures(fewest, fewest.fewest)}."
    best = cheapest_cards(plans, prices)
    for kind in plans.fitting:
        for one in kind.answers:
            if best and (kind.key, one.gpus) == (best.key, best.gpus):
                usd = show_money(best.per_1000_samples)
                yield f"The cheapest: {_figures(kind, one)}: {usd} USD for 1,000 samples."


def _figures(kind: CardsOfKind, one: OnGpus) -> str:
    scaled = SCALED if kind.measured_rates is False else ""
    return (
        f"{one.gpus:,} x {kind.key}, {scaled}{show_seconds(one.step_seconds)} a step, "
        f"{show_bytes(one.needed_bytes)} each, with {one.recipe}"
    )


def _nearest(plans: CardPlans) -> str:
    known = [kind for kind in plans.answers if kind.answers]
    nearest = min(known, key=lambda kind: kind.lacking_bytes, default=None)
    if nearest is None:
        return ""
    miss = nearest.answers[0]
    short = f"is short by {show_bytes(nearest.lacking_bytes)} on each"
    if nearest.lacking_bytes <= 0:
        short = "is within 3 % of the limit, the uncertainty of figures from few layers"
    return f"The nearest miss: {miss.gpus:,} x {nearest.key} {short}: {miss.recipe}."


def _about_the_run(plans: CardPlans, prices: Prices) -> Iterator[str]:
    if plans.uneven:
        counts = some_of([f"{count:,}" for count in plans.uneven], FEW)
        yield f"Skipped: {counts} GPUs, which cannot share a batch of {plans.job.batch_size:,} evenly."
    yield from kept_line(plans.kept_slots)
    if plans.steps:
        samples = plans.steps * plans.job.batch_size
        yield (
            f"The run: {plans.steps:,} steps, {samples:,} samples. Its start-up, renting machines and "
            "downloading weights and data are not counted."
        )
    yield from without_a_price([kind.key for kind in plans.fitting], prices)


def _what_more_bring(plans: CardPlans) -> Iterator[str]:
    """Yield a sentence for each GPU model: a larger number of its GPUs makes training no cheaper."""
    for kind in plans.fitting:
        one = kind.cheapest
        if one is None or one.gpus == plans.gpus[-1]:
            continue
        counts = [f"{count:,}" for count in kind.dearer]
        beyond = "" if kind.dearer[-1:] == plans.gpus[-1:] else " Larger numbers were not simulated."
        yield (
            f"{kind.key}: {' and '.join(counts)} GPUs cost no less a step than {one.gpus:,}, at whatever "
            f"price.{beyond}"
        )


_Row = tuple[CardsOfKind, OnGpus, CardsCost]
_Show = Callable[[CardsOfKind, OnGpus, CardsCost], str]


def _table(plans: CardPlans, prices: Prices) -> Grid:
    """Return a table of the fastest recipe for each GPU model and number of GPUs; those that nearly fit come
    last.
    """
    known = [
        (kind, one, cost_of_cards(kind, one, prices, plans.steps))
        for kind in plans.answers
        for one in kind.answers
    ]
    known.sort(key=lambda row: _sort_key(plans, row))
    columns = _columns(plans, prices)
    rows = tuple((*(show(*row) for _, show in columns), row[1].recipe) for row in known)
    scaled = any(kind.measured_rates is False for kind, *_ in known)
    return Grid(
        title="The fewest of each kind that fit, and more where that is cheaper",
        heads=(*(head for head, _ in columns), "Recipe<"),
        rows=rows,
        note=SCALED_NOTE if scaled else "",
    )


def _sort_key(plans: CardPlans, row: _Row) -> tuple[float, ...]:
    """Return a sort key of a table row: recipes that fit come first.

    Rows are sorted by the model's fewest GPUs and by seconds. With the objective `cost` they are sorted by
    the price of a sample, and rows without a price come last.
    """
    kind, one, cost = row
    if not one.fits:
        return 1.0, kind.lacking_bytes, 0.0, 0.0
    if plans.objective == "cost":
        far = float("inf")
        return 0.0, far if cost.per_1000_samples is None else cost.per_1000_samples, one.gpus, 0.0
    first = kind.answers[0]
    return 0.0, first.gpus, first.step_seconds, one.gpus


def _columns(plans: CardPlans, prices: Prices) -> list[tuple[str, _Show]]:
    columns: list[tuple[str, _Show]] = [
        ("GPU", lambda kind, one, cost: kind.key),
        ("GPUs>", lambda kind, one, cost: f"{one.gpus:,}"),
        ("GiB each>", lambda kind, one, cost: f"{(kind.gpu.memory_bytes or 0) / GIB:,.1f}"),
        ("needs GiB>", lambda kind, one, cost: f"{one.needed_bytes / GIB:,.2f}"),
        ("ms a step>", lambda kind, one, cost: show_ms(kind, one)),
        ("samples/s>", lambda kind, one, cost: f"{one.samples_per_second:,.1f}"),
        ("GPU s a step>", lambda kind, one, cost: f"{one.gpu_seconds:,.3g}"),
    ]
    if any(not one.fits for kind in plans.answers for one in kind.answers):
        columns.insert(4, ("", lambda kind, one, cost: "" if one.fits else "does not fit"))
    return [*columns, *cost_columns(prices, plans.steps)]


def _unknown(plans: CardPlans) -> list[Grid]:
    rows = tuple((kind.key, kind.why) for kind in plans.answers if kind.why)
    return [Grid(title="Not predicted", heads=("GPU", "Why"), rows=rows)] if rows else []
