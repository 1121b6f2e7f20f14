"""Tables in terminals of 80, 100 and 160 columns.

Every row keeps its name, every figure is complete, and every line fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import RenderableType
from rich.text import Text

from made_up import measurement, prediction
from snugfit.job.gpu import all_gpus
from snugfit.planning.plan import Change, Choice, Start
from snugfit.report import compare, gpus, techniques
from snugfit.report import measurement as measurement_report
from snugfit.report import prediction as prediction_report
from snugfit.report.plan import gpu_plans, plan
from snugfit.report.text.grid import Grid
from snugfit.report.text.table import PlainTable, table
from snugfit.report.text.terminal import as_text, show
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.roster import techniques as roster
from snugfit.units import GIB
from test_gpus_command import PRICES
from test_gpus_command import made_up as made_up_gpu_plans
from test_plan_command import made_up as made_up_plan
from tiers import slow_but


@pytest.mark.parametrize(("columns", "longest"), [("40", 40), ("0", 120), ("", 120), ("wide", 120)])
@pytest.mark.parametrize("stderr", [False, True])
def test_a_pipe_has_the_columns_that_are_asked_for(
    columns: str,
    longest: int,
    stderr: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """COLUMNS applies as in git, on both streams. Without it the width is 120."""
    monkeypatch.setenv("COLUMNS", columns)
    show(Text("word " * 60), stderr=stderr)
    lines = capsys.readouterr()[stderr].splitlines()
    assert longest - len("word ") <= max(map(len, lines)) <= longest


LONG = "lora(r=16, targets=all-linear) + bf16_pure + tf32 + every_nth_layer(n=2) + micro_batches(16)"
SHORTER = LONG.replace("every_nth_layer(n=2)", "every_layer")


def _choice(recipe: str, seconds: float) -> Choice:
    return Choice(
        recipe=recipe, requested_bytes=GIB, allocated_bytes=GIB, reserved_bytes=1234 * GIB, context_bytes=GIB,
        step_seconds=seconds, samples_per_second=4 / seconds, once_seconds=123.4,
    )  # fmt: skip


def _plan() -> RenderableType:
    best, other = _choice(LONG, 1.5), _choice(SHORTER, 1.75)
    change = Change(slot="checkpointing", theirs="every_layer", ours="every_nth_layer(n=2)", needed_bytes=GIB,
                    step_seconds=123.4567)  # fmt: skip
    start = Start(recipe=SHORTER, needed_bytes=2 * GIB, step_seconds=2.0, changes=(change,))
    return plan.render(replace(made_up_plan(memory=4000 * GIB), best=best, front=(best, other), start=start))


def _gpu_plans() -> RenderableType:
    plans = made_up_gpu_plans()
    answers = [
        replace(answer, choice=answer.choice and replace(answer.choice, recipe=recipe))
        for answer, recipe in zip(plans.answers, [SHORTER, LONG, LONG, SHORTER, ""], strict=True)
    ]
    return gpu_plans.render(replace(plans, answers=tuple(answers), steps=12_345_678), PRICES)


REPORTS = {
    "gpus": lambda: gpus.render(all_gpus()),
    "gpus --for --price": _gpu_plans,
    "plan": _plan,
    "predict --operators": lambda: prediction_report.render(prediction(), operators=True),
    "predict --compare": lambda: compare.render(
        [prediction(recipe=Recipe.parse(LONG)), prediction(8 * GIB, recipe=Recipe.parse(SHORTER))]
    ),
    "techniques": lambda: techniques.render(roster()),
    "measure": lambda: measurement_report.render(measurement()),
}


@pytest.mark.parametrize("width", slow_but([80, 100, 160], lambda width: width != 100))
@pytest.mark.parametrize("name", REPORTS)
def test_every_row_keeps_its_name_and_every_figure_is_whole(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_rows_and_figures(REPORTS[name], width, monkeypatch)


def hold_rows_and_figures(
    render: Callable[[], RenderableType], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that a report of this width breaks neither the name of a row nor a figure."""
    tables: list[PlainTable] = []
    monkeypatch.setattr(PlainTable, "__init__", _noting(PlainTable.__init__, tables))
    lines = as_text(render(), width=width).splitlines()
    recipes = {str(cell) for shown in tables if shown.columns[0].recipe for cell in shown.columns[0].cells}
    assert max(len(line) for line in lines if line not in {*recipes, LONG}) <= width
    words = [line.split() for line in lines]
    for shown in tables:
        first, *others = shown.columns
        for cell in map(str, first.cells):
            assert any(line.lstrip().startswith(cell) for line in lines), f"{cell!r} leads no row"
        for column in others:
            for figure in map(str, column.cells if column.figures else ()):
                assert any(_stands_in(figure.split(), line) for line in words), f"{figure!r} is not whole"


def _noting(init: Callable[..., None], tables: list[PlainTable]) -> Callable[..., None]:
    def noting(self: PlainTable, *given: Any) -> None:
        init(self, *given)
        tables.append(self)

    return noting


def _stands_in(figure: list[str], line: list[str]) -> bool:
    """Return True if these words are consecutive in the line."""
    return any(line[at : at + len(figure)] == figure for at in range(len(line) + 1))


def test_recipes_come_first_and_are_whole_lines() -> None:
    """A line with a recipe is never broken, so that it can be copied."""
    lines = as_text(_plan(), width=80).splitlines()
    assert [lines.count(LONG), lines.count(SHORTER)] == [2, 1]
    for heads in (("GPU", "MiB>", "Recipe<"), ("Recipe<", "GPU", "MiB>")):
        row = dict(zip(heads, ("T4", "1,234", "bf16") if heads[0] == "GPU" else ("bf16", "T4", "1,234")))
        text = as_text(table(heads, [tuple(row.values())]), width=80)
        assert [line.split() for line in text.splitlines() if "T4" in line] == [["bf16", "T4", "1,234"]]
    grid = Grid(title="", heads=("GPU", "Recipe<"), rows=(("T4", "bf16"),))
    assert "| bf16 | T4 |" in grid.markdown()


def test_recipes_stand_on_a_line_of_their_own_where_there_is_no_room() -> None:
    rows = [("T4", "1,234", "bf16"), ("H200-SXM", "1", LONG)]
    narrow = as_text(table(("GPU", "MiB>", "Recipe<"), rows), width=60).splitlines()
    assert [line for line in narrow if line.strip()[:2] in ("T4", "H2")] == [
        "    T4       1,234",
        "    H200-SXM     1",
    ]
    assert narrow[narrow.index(LONG) + 1] == "    H200-SXM     1"
    assert as_text(table(("GPU", "MiB>", "Recipe<"), rows), width=160).count("Recipe") == 1
