"""Numbers of GPUs of each model: the fewest that fit and the cheapest. Both are checked against every recipe
on every number of GPUs. Further tests cover simulations shared by GPU models, wrong input and the report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_judge import MadeUpJudge, best_of_all

from kept import REST
from small_models import small_job
from snugfit.cli.main import run
from snugfit.errors import UsageError
from snugfit.features.distributed.plan import search
from snugfit.features.distributed.plan.candidates import cuts, ways
from snugfit.features.distributed.plan.cards_report import render
from snugfit.features.distributed.plan.judge import Judge
from snugfit.features.distributed.plan.plan import (
    CardPlans,
    CardsOfKind,
    OnGpus,
    cheapest_cards,
    costs_of_cards,
)
from snugfit.features.distributed.plan.search import plan_cards, plan_several_gpus
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job
from snugfit.planning.fleet.prices import Prices
from snugfit.planning.keep import Kept
from snugfit.prediction.headroom import headroom_of
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB
from tiers import slow_but

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

JOB = replace(small_job("llama", 12), batch_size=64)
KINDS = tuple(map(find_gpu, ("h200", "h100-sxm", "l4")))
COUNTS = [1, 2, 4, 16]
H100 = KINDS[1]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpJudge]:
    monkeypatch.setattr(MadeUpJudge, "asked", [])
    monkeypatch.setattr(search, "Judge", MadeUpJudge)
    return MadeUpJudge


# ---- the search --------------------------------------------------------------------------------------------


FORMULAS = [(states, *more) for more in ((0.1, 0.02), (6, 1e-4), (20, 0.0)) for states in (1, 160, 700)]
OFTEN = ((700, 20, 0.0),)


@pytest.mark.parametrize(("states", "sample", "exchange"), slow_but(FORMULAS, OFTEN.__contains__))
def test_the_fewest_and_the_cheapest_are_those_of_every_recipe(
    made_up: type[MadeUpJudge],
    monkeypatch: pytest.MonkeyPatch,
    states: int,
    sample: float,
    exchange: float,
) -> None:
    monkeypatch.setattr(made_up, "states", states * GIB)
    monkeypatch.setattr(made_up, "sample", sample * GIB)
    monkeypatch.setattr(made_up, "exchange", exchange)
    plans = plan_cards(JOB, KINDS, gpus=COUNTS, workers=1)
    for kind in plans.answers:
        bound = (kind.gpu.memory_bytes or 0) - headroom_of(None, kind.gpu, one_of_many=True)
        best = {count: best_of_all(JOB, kind.gpu, count, bound, Recipe()) for count in COUNTS}
        known = {count: one for count, one in best.items() if one is not None}
        if not known:
            assert kind.fits is False
            continue
        assert kind.fewest is not None
        assert kind.fewest.gpus == min(known)
        assert kind.fewest.step_seconds == known[min(known)].step_seconds
        assert kind.cheapest is not None
        looked_at = [one.gpus for one in kind.answers] + list(kind.dearer)
        least = min(count * known[count].step_seconds for count in known if count <= max(looked_at))
        assert kind.cheapest.gpu_seconds == pytest.approx(least)
        for count in kind.dearer:
            assert known[count].step_seconds * count >= kind.cheapest.gpu_seconds


def test_kinds_that_run_the_same_kernels_share_rehearsals(made_up: type[MadeUpJudge]) -> None:
    plans = plan_cards(JOB, KINDS, gpus=COUNTS, workers=1)
    assert plans.screened == len(made_up.asked)
    together = {named for _, _, named in made_up.asked}
    assert ("H200-SXM", "H100-SXM") in together
    assert all(named == ("L4",) for named in together if "L4" in named), "it runs other kernels"
    assert len(made_up.asked) == len(set(made_up.asked)), "no candidate is evaluated twice"


def test_most_of_the_recipes_are_never_asked_about(made_up: type[MadeUpJudge]) -> None:
    counts = [2**power for power in range(8)]
    job = replace(JOB, batch_size=128)
    plan_cards(job, [H100], gpus=counts, workers=1)
    every = sum(
        len(cuts(job, shared, Kept())) for count in counts for shared in ways(job, Recipe(), count, Kept())
    )
    assert len(made_up.asked) <= every / 10


def test_larger_numbers_are_not_looked_at_once_two_cost_no_less(
    made_up: type[MadeUpJudge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_up, "states", GIB)
    monkeypatch.setattr(made_up, "exchange", 10.0)
    (kind,) = plan_cards(JOB, ["h200"], gpus=COUNTS, workers=1).answers
    assert [one.gpus for one in kind.answers] == [1]
    assert kind.dearer == (2, 4)
    asked = {count for count, _, _ in made_up.asked}
    assert asked == {1, 2, COUNTS[-1]}, "the precision is chosen on the largest number; 4 cannot be cheaper"


def test_a_kind_without_seconds_says_why(made_up: type[MadeUpJudge]) -> None:
    none, known = plan_cards(JOB, ["mi300x", "h200"], gpus=[1, 2], workers=1).answers
    assert none.fits is None
    assert "not a CUDA GPU" in none.why
    assert known.fits


def test_what_fits_nowhere_is_the_nearest_miss(
    made_up: type[MadeUpJudge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_up, "states", 4000 * GIB)
    plans = plan_cards(JOB, ["l4"], gpus=[1, 2, 4], workers=1)
    (kind,) = plans.answers
    assert (kind.fits, kind.fewest, kind.cheapest, plans.fitting) == (False, None, None, ())
    assert kind.answers[0].gpus == 4
    assert kind.lacking_bytes > 900 * GIB
    text = render(plans).markdown()
    assert "Nothing fits. The nearest miss: 4 x L4 is short by" in text
    assert "does not fit" in text


# ---- rehearsed ---------------------------------------------------------------------------------------------


def test_kinds_judged_together_take_what_each_takes_alone() -> None:
    """Both GPU models use one simulation, with the larger temporary memory of the two, so each needs at most
    slightly more bytes.
    """
    job = replace(small_job("llama", 3), batch_size=8)
    recipe = Recipe.parse("bf16 + fsdp")
    together = Judge(job, *KINDS[:2]).judge_kinds(2, recipe, (0, 1))
    for gpu, judged in zip(KINDS[:2], together, strict=True):
        alone = Judge(job, gpu).judge(2, recipe)
        assert judged.step_seconds == alone.step_seconds
        assert alone.needed_bytes <= judged.needed_bytes <= alone.needed_bytes * 1.01
    assert together[0].doubts == ()
    assert "No exchanges between NVIDIA H100" in together[1].doubts[0]


@pytest.mark.whole
@pytest.mark.slow
def test_answers_are_those_of_a_plan_for_one_kind() -> None:
    """For the numbers of GPUs in the answers, a plan with full simulation finds a step of the same speed. The
    precision is one that both one GPU and several allow."""
    job = replace(small_job("llama", 3), batch_size=8)
    keep = f"whole_batch + bf16 + sdpa + adamw_fused + default + inline + {REST}"
    (kind,) = plan_cards(job, ["h200"], gpus=[1, 2], keep=keep, workers=1).answers
    assert kind.fits
    for one in kind.answers:
        (planned,) = plan_several_gpus(job, gpu="h200", gpus=one.gpus, keep=keep, workers=1).answers
        assert one.step_seconds == pytest.approx(planned.step_seconds, rel=0.03)
        assert one.needed_bytes == pytest.approx(planned.needed_bytes, rel=0.03)


# ---- the document, the costs and the report ----------------------------------------------------------------


def cards() -> CardPlans:
    """Return plans for three GPU models: an H200 that fits alone but is cheaper as a pair, four L4s, and a
    model without known speed.
    """
    one = OnGpus(
        gpus=1, recipe="bf16", needed_bytes=100 * GIB, step_seconds=10.0, samples_per_second=6.4,
        bound="compute",
    )  # fmt: skip
    two = replace(one, gpus=2, step_seconds=4.0, samples_per_second=16.0, recipe="bf16 + fsdp")
    four = replace(one, gpus=4, step_seconds=20.0, samples_per_second=3.2, needed_bytes=20 * GIB)
    return CardPlans(
        job=JOB,
        fidelity="rounds",
        gpus=(1, 2, 4, 8),
        uneven=(3,),
        answers=(
            CardsOfKind(gpu=KINDS[0], fits=True, answers=(one, two), dearer=(4, 8), measured_rates=True),
            CardsOfKind(gpu=KINDS[2], fits=True, answers=(four,), dearer=(8,), measured_rates=False),
            CardsOfKind(gpu=find_gpu("mi300x"), fits=None, why="not a CUDA GPU"),
        ),
        screened=12,
        doubts=("one",),
        versions={"torch": "2.13"},
    )


PRICES = Prices({"H200-SXM": 3.6, "L4": 0.4})


def test_plans_go_through_json() -> None:
    document = json.loads(json.dumps(cards().to_json()))
    assert CardPlans.from_json(document) == cards()
    assert document["fewest"] == "H200-SXM"
    assert [(kind["fewest"], kind["cheapest"]) for kind in document["answers"]] == [
        (1, 2), (4, 4), (None, None),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="not a document 'plans by number of GPUs'"):
        CardPlans.from_json(document | {"what": "plans for many GPUs"})


def test_what_so_many_cost() -> None:
    costs = {(cost.key, cost.gpus): cost for cost in costs_of_cards(replace(cards(), steps=100), PRICES)}
    two = costs["H200-SXM", 2]
    assert two.per_hour == 7.2
    assert two.per_1000_samples == pytest.approx(7.2 / 3600 * 1000 / 16)
    assert two.run_seconds == 400
    assert two.run == pytest.approx(7.2 / 9)
    best = cheapest_cards(cards(), PRICES)
    assert best is not None
    assert (best.key, best.gpus) == ("H200-SXM", 2), "four L4s cost less per hour and take five times as long"
    best = cheapest_cards(cards(), Prices({"H200-SXM": 3.6, "L4": 0.1}))
    assert best is not None
    assert (best.key, best.gpus) == ("L4", 4)
    assert cheapest_cards(cards(), Prices()) is None


def test_the_report_says_how_many_and_whether_more_are_cheaper() -> None:
    text = render(replace(cards(), steps=1000), PRICES).markdown()
    for line in (
        "The fewest GPUs that can train this: 1 x H200-SXM",
        "The cheapest: 2 x H200-SXM",
        "H200-SXM: 4 and 8 GPUs cost no less a step than 2, at whatever price.",
        "L4: 8 GPUs cost no less a step than 4, at whatever price.",
        "Skipped: 3 GPUs, which cannot share a batch of 64 evenly.",
        "not a CUDA GPU",
        "~20,000.0",
    ):
        assert line in text
    assert "Larger numbers were not simulated" not in text
    wider = render(replace(cards(), gpus=(1, 2, 4, 8, 16)), Prices()).markdown()
    assert "at whatever price. Larger numbers were not simulated." in wider
    assert "USD" not in wider


def test_the_cheapest_first_where_that_is_asked_for() -> None:
    text = render(replace(cards(), objective="cost"), PRICES).markdown()
    rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in text.splitlines() if line[:2] == "| "]
    assert rows[2:5] == [["H200-SXM", "2"], ["L4", "4"], ["H200-SXM", "1"]]


# ---- the command -------------------------------------------------------------------------------------------

ASK = ["gpus", "h200", "l4", "--for", "bert-large-uncased", "--task", "sequence-classification"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace searches by made-up results, set an empty cache folder, and return the list of the searches
    that were requested.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    questions: list[Any] = []

    def made_up_plans(job: Job, kinds: Sequence[Gpu], **how: Any) -> CardPlans:
        questions.append(([gpu.key for gpu in kinds], how["gpus"]))
        return replace(cards(), job=job)

    monkeypatch.setattr(search, "plan_cards", made_up_plans)
    return questions


def test_the_command_asks_once_whatever_the_prices(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*ASK, "--gpus", "1..8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["cheapest"] is None
    more = ["--price", "h200=3.6", "--steps", "100", "--objective", "cost"]
    assert run([*ASK, "--gpus", "1..8", "--json", *more]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["cheapest"] == {"key": "H200-SXM", "gpus": 2}
    assert document["objective"] == "cost"
    assert asked == [(["H200-SXM", "L4"], [1, 2, 4, 8])]
    assert run([*ASK, "--gpus", "1..4"]) == 0
    assert len(asked) == 2


MISTAKES = {
    "no GPUs": (["--gpus", "0"], "it must be whole numbers from 1"),
    "no number": (["--gpus", "many"], "is not a number of GPUs"),
    "a batch that cannot be shared": (
        ["--gpus", "1..8", "--batch-size", "33"],
        "A global batch of 33 cannot be shared evenly by 2, 4, 8 GPUs. Try a batch of 32 or 34",
    ),
    "one number that cannot share it": (["--gpus", "3", "--batch-size", "32"], "Name a divisor of it"),
    "the smallest": (["--gpus", "2", "--objective", "memory"], "does not take --objective memory"),
    "a recipe": (["--gpus", "2", "--recipe", "bf16"], "recipe"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    more, told = MISTAKES[name]
    assert run([*ASK, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("snugfit: ")
    assert told in err
    assert len(err.strip().splitlines()) <= 3


def test_a_number_of_gpus_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpus", "h200", "--gpus", "8"]) == 2
    assert "--gpus needs a model" in capsys.readouterr().err
