"""`snugfit plan --verify`: the order of recipes, the slowdown of the first choice, and the command around
them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_accuracy import a_run

from forked_children import forked_children
from made_up import EVIL, footprint, job, measurement, prediction, timing
from made_up_plans import planned
from small_models import small_job
from snugfit.cli.main import run
from snugfit.features.accuracy import verified_tables as report
from snugfit.features.accuracy.plan_command import command_to_verify
from snugfit.features.accuracy.predict_runs import PlannedRecipe
from snugfit.features.accuracy.ranking import (
    RankAgreement,
    agreement_of_pairs,
    gap,
    group_by_job,
    pooled_agreement,
)
from snugfit.features.accuracy.verify import verify
from snugfit.job.gpu import find_gpu
from snugfit.planning.plan import Pace, Plan
from snugfit.prediction.rates import calibration_file
from snugfit.report.plan import short
from snugfit.report.text.terminal import as_text
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB

# ---- the order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "tau"),
    [
        ([(1, 1), (2, 2), (3, 3)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 1), (2, 3), (3, 2)], 1 / 3),
        # 7 pairs right, 1 wrong, 1 tied on each side: (7 - 1) / sqrt(9 * 9)
        ([(1, 1), (2, 3), (2, 2), (3, 2), (4, 5)], 6 / 9),
        ([(1, 1), (1, 2)], None),
        ([(1, 1)], None),
        ([], None),
    ],
)
def test_kendall_s_tau(seconds: list[tuple[float, float]], tau: float | None) -> None:
    found = agreement_of_pairs(seconds).tau
    assert found == (None if tau is None else pytest.approx(tau))


def test_only_pairs_that_differ_clearly_can_be_asked_for() -> None:
    close = [(1.0, 1.02), (2.0, 1.0), (3.0, 2.0)]
    assert agreement_of_pairs(close) == RankAgreement(concordant=2, discordant=1)
    assert agreement_of_pairs(close, min_difference=0.05) == RankAgreement(concordant=2)


def test_orders_are_told_within_jobs_only() -> None:
    other = replace(job(), batch_size=8)
    runs = [
        a_run(0, 1, 1),
        a_run(1, 5, 5, job=other),
        a_run(2, 2, 2),
        a_run(3, 6, 4, job=other),
        a_run(4, 0.1, 9, outcome="oom:torch"),
    ]
    assert [[each.number for each in group] for group in group_by_job(runs)] == [[0, 2, 4], [1, 3]]
    assert pooled_agreement(runs) == RankAgreement(concordant=1, discordant=1)


def test_the_gap_is_what_the_first_choice_loses() -> None:
    assert gap([a_run(0, 1.0, 1.1), a_run(1, 1.2, 1.0), a_run(2, 1.3, 1.4)]) == pytest.approx(0.1)
    assert gap([a_run(0, 1.0, 1.0), a_run(1, 1.2, 1.1)]) == 0
    assert gap([a_run(0, 1.0, None), a_run(1, 1.2, 1.1)]) is None, "the first choice died"
    assert gap([]) is None


# ---- the command -----------------------------------------------------------------------------------------

ASK = ["plan", "bert-large-uncased", "--task", "sequence-classification"]
SEEN = {"bf16": 0.05, "bf16 + every_layer": 0.08, "plain": 0.075}
PEER = "bf16 + adamw_fused"
PEERS_SEEN = {False: 0.09, True: 0.06}
"""Seconds of the plain Trainer, by whether it compiles."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Fake an H200 with made-up searches and measurements. The returned list collects their arguments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SNUGFIT_RATES", str(tmp_path / "rates"))
    questions: list[Any] = []

    def search(job: Any, **how: Any) -> Plan:
        questions.append(how["ranked"])
        return planned(how["ranked"], how["memory_bytes"])

    def measure(job: Any, recipe: Any, **how: Any) -> Any:
        peer, compiles = how["loop"] == "trainer", bool(how["trainer_arguments"])
        questions.append(f"{recipe}, {'compiled ' if compiles else ''}Trainer" if peer else str(recipe))
        pace = timing(4 / (PEERS_SEEN[compiles] if peer else SEEN[str(recipe)]))
        size = footprint(9 * GIB) if peer else footprint()
        return measurement(job=job, recipe=recipe, timing=pace, footprint=size)

    def predict(job: Any, recipe: Any, **how: Any) -> Any:
        return prediction(job=job, recipe=recipe, memory_bytes=how["memory_bytes"])

    monkeypatch.setattr("snugfit.features.accuracy.peers.predict", predict)
    monkeypatch.setattr("snugfit.planning.search.search.plan", search)
    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    monkeypatch.setattr("snugfit.features.accuracy.plan_command.gpu_here", lambda: "NVIDIA H200")
    return questions


def test_the_best_are_measured_and_shown_beside(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK, "--verify", "3"]) == 0
    peers = [f"{PEER}, Trainer", f"{PEER}, compiled Trainer"]
    assert asked == [3, "bf16", "bf16 + every_layer", "plain", *peers]
    text = " ".join(capsys.readouterr().out.split())
    assert "GPU memory 7.6 GiB of" in text.partition("Kendall")[0], "the plan comes first"
    assert "Kendall's tau 0.33 over 3 pairs of recipes" in text
    assert "of the 3 that were measured more than 5 % apart, 2 are in the predicted order" in text
    assert "The first choice is the fastest measured one." in text
    assert not calibration_file(find_gpu("h200")).exists(), "measured runs change no rates"
    assert f"1.20 times as fast as the best of the plain Trainer (Trainer, {PEER}, torch_compile)" in text
    assert "and takes 2.00 GiB less" in text


def test_peers_are_left_out_where_nobody_wants_them(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*ASK, "--verify", "1", "--no-peers"]) == 0
    assert asked == [1, "bf16"]
    assert "plain Trainer" not in capsys.readouterr().out


def test_json_is_one_document(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK, "--gpu", "h200", "--verify", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["what"], document["tau"], document["gap"]) == ("verification", 1.0, 0.0)
    assert [each["recipe"] for each in document["runs"]] == ["bf16", "bf16 + every_layer"]
    assert document["runs"][1]["errors"]["step_seconds"] == pytest.approx(-0.125)
    assert document["faster_than_peer"] == pytest.approx(0.06 / 0.05)
    peers = document["peers"]["runs"]
    assert [peer["arguments"] for peer in peers] == [{}, {"torch_compile": True}]
    assert [peer["run"]["predicted"] is None for peer in peers] == [False, True]
    assert Plan.from_json(document["plan"]) == planned(2)


def test_a_run_that_dies_is_told_with_exit_5(
    asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(job: Any, recipe: Any, **how: Any) -> Any:
        if str(recipe) != "bf16":
            return measurement(job=job, recipe=recipe)
        return measurement(
            job=job,
            recipe=recipe,
            outcome="oom:torch",
            footprint=None,
            timing=None,
            message="CUDA out of memory",
        )

    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    assert run([*ASK, "--verify", "2"]) == 5
    out, err = capsys.readouterr()
    assert "bf16: the run ended with oom:torch" in out
    assert "CUDA out of memory" in out
    assert "1 of 2 runs have larger errors than allowed" in err


def test_nothing_is_measured_where_nothing_fits(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK, "--verify", "2", "--memory", "1GiB", "--no-ways-out", "--json"]) == 3
    assert asked == [2]
    assert json.loads(capsys.readouterr().out)["what"] == "plan"


@pytest.mark.parametrize(
    ("here", "more", "told"),
    [
        (None, [], "but there is none"),
        (None, ["--gpu", "h200"], "but there is none"),
        ("NVIDIA H200", ["--gpu", "v100-16gb"], "a NVIDIA H200, but the plan is for"),
        ("NVIDIA H200", ["--verify", "0"], "--verify"),
    ],
)
def test_what_cannot_be_verified_is_said_before_the_search(
    here: str | None, more: list[str], told: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("snugfit.features.accuracy.plan_command.gpu_here", lambda: here)
    assert run([*ASK, "--verify", "2", *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert asked == []


def test_foreign_words_are_data(asked: list[Any]) -> None:
    found = verify(job(EVIL), EVIL, [], versions={})
    died = a_run(0, 1.0, None, message=EVIL)
    text = as_text(report.render(replace(found, runs=(died,))))
    assert "\x1b" not in text
    page = report.render(replace(found, runs=(died,), device=EVIL)).markdown()
    assert "<script>" not in page


@pytest.mark.whole
def test_real_runs_on_the_cpu() -> None:
    """Two recipes of a small model each run in a separate process, and have all measurements that a CPU
    offers.
    """
    small = small_job("gpt2", 2, batch_size=4, sequence_length=32)
    recipes = [
        PlannedRecipe(recipe=Recipe.parse(text), footprint=footprint(GIB), step_seconds=seconds)
        for text, seconds in (("sgd", 0.01), ("micro_batches(4)", 0.04))
    ]
    with forked_children():
        found = verify(small, "NVIDIA H200", recipes, versions={})
    assert [each.outcome for each in found.runs] == ["ok", "ok"]
    assert found.order.pairs == 1
    assert found.gap is not None
    assert found.outside, "a CPU reports no bytes of a GPU"


@pytest.mark.parametrize(
    ("pace", "offered"),
    [
        (Pace(bound="host", measured_rates=True, peak_seconds=0.0), True),
        (Pace(bound="host", measured_rates=True, peak_seconds=0.0, assumed_host=False), False),
        (Pace(bound="tensor contractions", measured_rates=True, peak_seconds=0.0), False),
        (Pace(bound="tensor contractions", measured_rates=False, peak_seconds=0.0), True),
        (None, False),
    ],
)
def test_a_plan_whose_seconds_are_assumed_offers_to_measure(pace: Pace | None, offered: bool) -> None:
    plan = replace(planned(1, 40 * GIB), timing=pace)
    command = command_to_verify(plan).get("Measure the best recipes on such a GPU", "")
    assert command.endswith("--verify 3") is offered
    assert ("--verify 3" in as_text(short.render(plan), width=200)) is offered
