"""The report of a plan: a few different rows, the next steps for the user, and cards in rental sizes."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from itertools import pairwise

import pytest

from snugfit.job.gpu import find_gpu
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.prices import Prices
from snugfit.planning.plan import Exclusion, Plan
from snugfit.report.plan.gpu_plans import headline, unknown
from snugfit.report.plan.next_steps import next_steps
from snugfit.report.plan.plan import front, refusals, render
from snugfit.report.plan.shown_front import MIN_DIFFERENCE, MOST_ROWS, SLOWEST, shown_front
from snugfit.report.text.terminal import as_text
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB
from test_plan_command import choice, made_up


def long_plan() -> Plan:
    """Return forty rows of the front, with close figures first and much slower rows last."""
    whole = made_up()
    rows = [
        choice(f"bf16 + micro_batches({number})", int((30 - number / 2) * GIB), 0.05 * 1.1 ** (number - 1))
        for number in range(1, 41)
    ]
    close = choice("bf16 + expandable", int(29.49 * GIB), 0.0501)
    return replace(whole, front=(rows[0], close, *rows[1:]), best=rows[0])


def test_the_front_shows_few_rows_that_differ() -> None:
    plan = long_plan()
    rows = shown_front(plan)
    assert len(rows) == MOST_ROWS
    assert plan.best in rows
    assert max(row.step_seconds for row in rows) <= SLOWEST * rows[0].step_seconds
    for one, other in pairwise(rows):
        apart = abs(other.step_seconds / one.step_seconds - 1), abs(other.needed_bytes / one.needed_bytes - 1)
        assert max(apart) >= MIN_DIFFERENCE
    assert "33 more rows" in as_text(front(plan))
    assert len(front(plan, everything=True).rows) == 41
    assert "more rows" not in as_text(render(plan, everything=True))
    assert len(plan.to_json()["front"]) == 41, "JSON has everything"


def test_what_fits_stands_first_and_few_near_misses_below() -> None:
    """The report shows two of the many faster rows that do not fit: those that miss by the least."""
    whole = long_plan()
    limit = whole.front[12].needed_bytes
    plan = replace(whole, best=whole.front[12], memory_bytes=limit)
    rows = shown_front(plan)
    assert rows[0] == plan.best
    assert [plan.fitting(row) for row in rows] == [True] * (MOST_ROWS - 2) + [False] * 2
    assert set(rows[-2:]) == {plan.front[10], plan.front[11]}
    everything = shown_front(plan, everything=True)
    assert everything[0] == plan.best
    assert len(everything) == len(plan.front)
    document = plan.to_json()
    assert [entry["recipe"] for entry in document["front"]] == [choice.recipe for choice in everything]
    assert Plan.from_json(document) == plan
    first, *_, last = front(plan).rows
    assert first[1] == "1 best"
    assert last[1].startswith("41 short by "), "numbers are those of the JSON and the page"


def test_an_answer_that_is_not_on_the_front_is_shown() -> None:
    """The simplest of equally fast recipes takes the place of the fastest."""
    plan = made_up()
    simple = replace(plan.front[0], recipe="plain", step_seconds=plan.front[0].step_seconds * 1.004)
    rows = shown_front(replace(plan, best=simple))
    assert rows == [simple, plan.front[1]]


def test_gpus_of_one_reason_stand_in_one_row() -> None:
    plan, gpus = made_up(), [find_gpu(name) for name in ("mi210", "mi300x", "k80")]
    why = ("is not a CUDA GPU", "is not a CUDA GPU", "is too old")
    answers = tuple(OnGpu(gpu=gpu, fits=None, why=f"{gpu.name} {what}.") for gpu, what in zip(gpus, why))
    (table,) = unknown(GpuPlans(job=plan.job, fidelity="rounds", objective="speed", answers=answers))
    assert table.rows == (
        ("MI210, MI300X", "This GPU is not a CUDA GPU."), ("K80", f"{gpus[2].name} is too old."),
    )  # fmt: skip


def test_what_was_not_considered_has_a_column_of_counts_only_where_there_are_some() -> None:
    plan = replace(made_up(), refused=(Exclusion(what="fp32", why="it changes nothing", recipes=0),))
    assert refusals(plan).heads == ("What", "Why")
    counted = replace(plan, refused=(*plan.refused, Exclusion(what="tf32", why="too old", recipes=8)))
    assert refusals(counted).rows[1] == ("tf32", "too old", "8")


def test_every_plan_says_how_to_train() -> None:
    plan = made_up()
    best = replace(plan.front[0], recipe="bf16 + micro_batches(4)")
    train, *_ = next_steps(replace(plan, best=best))
    words = shlex.split(train.partition(": ")[2])
    assert words[:5] == ["snugfit", "train", "bert-large-uncased", "--task", "sequence-classification"]
    assert Recipe.parse(words[words.index("--recipe") + 1]) == Recipe.parse(best.recipe)
    large = replace(plan.job, batch_size=16, sequence_length=128)
    assert "--batch-size 16 --sequence-length 128" in next(iter(next_steps(replace(plan, job=large))))
    assert train in " ".join(as_text(render(replace(plan, best=best)), width=500).split("\n"))
    assert list(next_steps(replace(plan, best=None))) == []


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_command_can_be_copied_from_a_terminal_of_any_width(width: int) -> None:
    recipe = "lora(r=16, targets=all-linear) + bf16 + chunked_loss + every_layer + micro_batches(4)"
    plan = made_up()
    plan = replace(plan, best=replace(plan.front[0], recipe=recipe))
    text = as_text(render(plan), width=width)
    shown = text[text.index("snugfit train") :].partition("FOLDER")[0] + "FOLDER"
    assert max(map(len, shown.splitlines())) <= width
    for before in itertools.accumulate(shown.splitlines(keepends=True)[:-1]):
        assert before.endswith("\\\n") or before.count("'") % 2 == 1, "a shell would run half of it"
    words = shlex.split(shown.replace("\\\n", ""))
    expected = shlex.split(next(iter(next_steps(plan))).partition(": ")[2])
    place = expected.index("--recipe") + 1
    assert Recipe.parse(words.pop(place)) == Recipe.parse(expected.pop(place))
    assert words == expected


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a100-80gb", "h100-80gb", "h200"), "an 80 GB card (A100, H100)"), (("rtx 4090",), "a 24 GB card (")],
)
def test_the_smallest_card_is_named_as_one_rents_it(names: tuple[str, ...], said: str) -> None:
    plan = made_up()
    answers = tuple(OnGpu(gpu=find_gpu(name), fits=True, choice=plan.best) for name in names)
    plans = GpuPlans(job=plan.job, fidelity="rounds", objective="speed", answers=answers)
    assert f"The smallest GPU that can train this: {plans.smallest.key}, {said}" in next(
        headline(plans, Prices())
    )  # type: ignore[union-attr]
