"""Documents, tables and shown commands of plans for several GPUs."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from test_cards import cards
from test_several_gpus_plan import made_up

from small_models import small_job
from snugfit.cli.main import run
from snugfit.features.distributed.feature import Distributed
from snugfit.features.distributed.plan import cards_report, report
from snugfit.features.distributed.plan.plan import document_of_cards
from snugfit.planning.plan import Exclusion, KeptSlot
from snugfit.report import show
from snugfit.report.text.terminal import as_text
from test_docs import OF_GPU_GROUPS, answered, commands
from test_gpus_command import PRICES
from test_reference import hold_to_schema
from test_tables import hold_rows_and_figures

__all__ = ["answered"]

pytestmark = pytest.mark.whole


def test_answers_are_valid_against_the_schema() -> None:
    parts: dict[str, Any] = {
        "job": small_job("gpt2", 2, facts={"dtype": "bfloat16"}),
        "kept_slots": (KeptSlot(slot="precision", techniques=("bf16",), why="one"),),
        "refused": (Exclusion(what="fp16", why="one"),),
    }
    several, plans = made_up(), replace(cards(), steps=10, **parts)
    several = replace(several, alternatives=several.answers, doubts=("one",), **parts)
    printed = {
        "plan --gpus N --json": several,
        "gpus --for MODEL --gpus N --json": plans.to_json() | {"run": document_of_cards(plans, PRICES)},
    }
    hold_to_schema(Distributed().documents(), printed.items())


def test_a_plan_prints_its_report() -> None:
    show.attach()
    assert str(made_up()) == as_text(report.render(made_up()))
    assert made_up()._repr_html_().startswith("<")  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_every_row_keeps_its_name_and_every_figure_is_whole(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_rows_and_figures(lambda: cards_report.render(cards(), PRICES), width, monkeypatch)


@pytest.mark.parametrize("command", [one for one in commands() if OF_GPU_GROUPS.match(one)])
def test_a_command_of_the_docs_is_understood(
    command: str, answered: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = "snugfit.features.distributed.plan"
    monkeypatch.setattr(f"{plan}.search.plan_several_gpus", lambda *_, **__: made_up())
    monkeypatch.setattr(f"{plan}.search.plan_cards", lambda *_, **__: cards())
    assert run(shlex.split(command)) == 0, capsys.readouterr().err
