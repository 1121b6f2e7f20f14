"""`snugfit gpus --for MODEL`: one clear error, the user's prices, stored answers, and the report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_up import EVIL, job
from snugfit.cli.main import run
from snugfit.cli.request import steps_of
from snugfit.errors import GpuError, UsageError
from snugfit.job.gpu import all_gpus, find_gpu
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.fleet.prices import Prices, cheapest, cost
from snugfit.planning.plan import Choice, Counts
from snugfit.report.plan.gpu_plans import render
from snugfit.report.text.terminal import as_text
from snugfit.units import GIB

ASK = ["gpus", "--for", "bert-large-uncased", "--task", "sequence-classification"]
PRICES = Prices({"T4": 0.36, "RTX4090": 0.9, "H200-SXM": 3.6})


def answer(key: str, seconds: float, size: int = 10 * GIB, *, once: float = 0.0, **changes: Any) -> OnGpu:
    gpu = find_gpu(key)
    choice = Choice(
        recipe="bf16", requested_bytes=size, allocated_bytes=size, reserved_bytes=size, context_bytes=0,
        step_seconds=seconds, samples_per_second=4 / seconds if seconds else 0.0,
        once_seconds=once,
    )  # fmt: skip
    whole = OnGpu(
        gpu=gpu, fits=size <= (gpu.memory_bytes or 0), choice=choice, rates="scaled", measured_rates=False
    )
    return replace(whole, **changes)


def made_up(*, name: str = "bert-large-uncased") -> GpuPlans:
    return GpuPlans(
        job=job(name),
        fidelity="rounds",
        objective="speed",
        answers=(
            answer("T4", 0.9),
            answer("RTX2060", 0.8, 7 * GIB),
            answer("RTX4090", 0.2),
            answer("H200-SXM", 0.1, measured_rates=True),
            OnGpu(gpu=find_gpu("mi300x"), fits=None, why=EVIL),
        ),
        counts=(Counts(recipes=9, tapes=8, footprints=7, passes=6, replayed=5),) * 2,
        versions={"torch": "2.13.0"},
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Return the record of searches; they return invented answers, stored in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    questions: list[Any] = []

    def plan_gpus(job: Any, gpus: Any, **how: Any) -> GpuPlans:
        questions.append(([gpu.key for gpu in gpus], how))
        return replace(made_up(), job=job, objective=how["objective"], steps=how["steps"])

    monkeypatch.setattr("snugfit.planning.fleet.search_gpus.plan_gpus", plan_gpus)
    return questions


# ---- money -----------------------------------------------------------------------------------------------


def test_a_name_of_several_gpus_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpus", "h100"]) == 0
    assert re.findall(r"H100-[A-Z]+", capsys.readouterr().out) == ["H100-PCIE", "H100-SXM", "H100-NVL"]


def test_what_a_run_costs() -> None:
    found = made_up()
    t4, _, rtx4090, h200, unknown = found.answers
    priced = cost(t4, PRICES, steps=1000)
    assert priced.per_1000_samples == pytest.approx(0.36 / 3600 * 1000 / 4 * 0.9)
    assert priced.run_seconds == pytest.approx(900)
    assert priced.run == pytest.approx(0.36 / 4)
    assert cost(rtx4090, Prices(), 10).run_seconds == pytest.approx(2.0)
    assert cost(rtx4090, Prices(), 10).run is None
    assert cost(h200, PRICES, None).run is None
    assert cost(unknown, Prices({"MI300X": 1.0}), 10).run is None
    assert cheapest(found, PRICES) == rtx4090
    assert cheapest(found, Prices({"RTX2060": 0.01})) is None, "nothing fits it"


def test_what_a_run_pays_once_costs_too() -> None:
    """In a run of ten steps, the card with the faster start costs less, although its steps are slower."""
    slow, fast = answer("T4", 0.9, once=6.0), answer("RTX4090", 0.2, once=60.0)
    prices = Prices({"T4": 1.0, "RTX4090": 1.0})
    assert cost(slow, prices, 10).run_seconds == pytest.approx(15)
    assert cost(slow, prices, 10).run == pytest.approx(15 / 3600)
    assert cost(slow, prices, 10).per_1000_samples == pytest.approx(15 / 3600 * 1000 / 40)
    for steps, best in ((None, fast), (10, slow), (1000, fast)):
        found = replace(made_up(), answers=(slow, fast), steps=steps)
        assert (found.fastest, cheapest(found, prices)) == (best, best)
    text = render(replace(made_up(), answers=(slow, fast), steps=10), prices).markdown()
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line[:2] == "| "]
    assert [row[2] for row in cells[-2:]] == ["T4", "RTX4090"]
    assert "6.0" in cells[-2]


def test_a_run_is_as_long_as_was_said_once() -> None:
    assert steps_of(None, None, 32) is None
    assert steps_of(None, 7, 32) == 7
    assert steps_of(65, None, 32) == 3
    with pytest.raises(UsageError, match="both"):
        steps_of(1, 1, 32)


def test_prices_are_found_by_any_name_of_a_gpu() -> None:
    assert Prices.of([("rtx 4090", 0.5), ("h200", 3)], "x").per_hour == {"RTX4090": 0.5, "H200-SXM": 3.0}
    assert Prices({"T4": 1.0}).with_(Prices({"T4": 2.0, "L4": 3.0})).per_hour == {"T4": 2.0, "L4": 3.0}
    with pytest.raises(UsageError, match="two prices"):
        Prices.of([("h200", 3), ("H200-SXM", 4)], "mine.yaml")
    with pytest.raises(GpuError, match="A100-SXM-80"):
        Prices.of([("a100", 3)], "mine.yaml")


@pytest.mark.parametrize("price", [0, -1, True, "2.5", None, float("nan"), float("inf"), 1e9, [1], {}])
def test_what_is_no_price_is_refused(price: object) -> None:
    with pytest.raises(UsageError, match="USD per hour"):
        Prices.of([("h200", price)], "mine.yaml")


# ---- the report ------------------------------------------------------------------------------------------


def test_the_headline_names_the_smallest_the_fastest_and_the_cheapest() -> None:
    text = as_text(render(replace(made_up(name=EVIL), steps=1000), PRICES), width=160)
    assert "\x1b" not in text
    assert "The smallest GPU that can train this: T4, a 16 GB card (T4), with" in text
    assert "The fastest: H200-SXM" in text
    assert "The cheapest: RTX4090 (0.0125 USD for 1,000 samples at 0.9 USD an hour)" in text
    assert "The run: 1,000 steps, 4,000 samples." in text
    lines = [line.split() for line in text.splitlines()]
    order = [line[1] for line in lines if line[1:] and line[1] in ("T4", "RTX2060", "RTX4090", "H200-SXM")]
    assert order == ["H200-SXM", "RTX4090", "T4", "RTX2060"], "the fastest first, GPUs that do not fit last"
    row = next(line for line in lines if line[1:2] == ["RTX2060"])
    assert "short by" in " ".join(row)
    assert "~900.0" in text
    assert "~100.0" not in text, "measured rates are not marked"
    assert "<script>" not in render(replace(made_up(name=EVIL), steps=1000), PRICES).markdown()


def test_the_cheapest_first_when_that_is_asked_for() -> None:
    text = render(replace(made_up(), objective="cost"), PRICES).markdown()
    cells = [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")]
    assert cells[2:6] == ["RTX4090", "T4", "H200-SXM", "RTX2060"]


def test_many_gpus_are_one_screen_with_a_line_for_each_architecture() -> None:
    """At most 15 lines of 100 columns name the smallest GPU of each architecture, or the cheapest."""
    cuda = [gpu for gpu in all_gpus() if gpu.compute_capability]
    many = replace(made_up(), answers=tuple(answer(gpu.key, 1.0) for gpu in cuda))
    few = [
        as_text(render(plans, prices, details=False), width=100).splitlines()
        for plans in (many, replace(many, steps=1000))
        for prices in (Prices(), PRICES)
    ]
    assert max(map(len, few)) <= 15
    assert max(map(len, [line for lines in few for line in lines])) <= 100
    assert any(line.startswith("Ampere       RTX3060 ") for line in few[0])
    assert any(line.startswith("Ada          RTX4070 ") for line in few[0])
    assert any(line.startswith("Ada          RTX4090 ") for line in few[1]), "the only one with a price"
    fitting = len(many.fitting)
    assert f"{fitting} of {len(many.answers)} GPUs can train this (--details: all" in few[0][-2]
    assert as_text(render(many, PRICES)).count("\n") > fitting
    assert as_text(render(made_up(), PRICES, details=False)) == as_text(render(made_up(), PRICES))
    none = replace(many, answers=tuple(answer(gpu.key, 1.0, 999 * GIB) for gpu in cuda))
    assert "0 of" in as_text(render(none, PRICES, details=False))


def test_without_prices_and_length_there_is_no_money() -> None:
    text = as_text(render(made_up(), Prices()), width=160)
    assert "USD" not in text
    assert "The run" not in text
    assert "cheapest" not in text
    timed = as_text(render(replace(made_up(), steps=36_000), Prices()), width=160)
    assert "9.0 h" in timed
    assert "USD" not in timed


def test_when_none_trains_it_the_nearest_miss_is_told() -> None:
    text = as_text(render(replace(made_up(), answers=(answer("RTX2060", 0.8, 7 * GIB),)), Prices()))
    assert (
        "None of these GPUs can train this. The nearest miss: RTX2060 is short by 1.22 GiB for bf16." in text
    )


def test_seconds_that_are_not_known_are_not_invented() -> None:
    blind = answer("T4", 0.0, measured_rates=None, why="its rates are not known")
    found = replace(made_up(), answers=(blind,), steps=10)
    assert (found.fastest, found.smallest) == (None, blind)
    text = as_text(render(found, PRICES), width=160)
    assert "its rates are not known" in text
    assert "0.0 " not in text


# ---- the command -----------------------------------------------------------------------------------------


def test_the_whole_table_or_the_named_ones(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK, "--json"]) == 0
    assert len(asked[0][0]) > 50
    document = json.loads(capsys.readouterr().out)
    assert GpuPlans.from_json(document).answers == made_up().answers
    assert document["run"]["cheapest"] is None
    assert run([*ASK, "h200", "rtx 4090", "--fidelity", "same", "--objective", "memory"]) == 0
    assert asked[1][0] == ["H200-SXM", "RTX4090"]
    assert (asked[1][1]["fidelity"], asked[1][1]["objective"]) == ("same", "memory")


def test_prices_of_a_file_and_of_the_command_line(
    asked: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("t4: 0.36\nrtx 4090: 9.0\n")
    (tmp_path / "mine.json").write_text('{"t4": 0.36}')
    for more in (["--prices", "mine.yaml", "--price", "4090=0.9"], ["--prices", "mine.json"]):
        assert run([*ASK, *more, "--samples", "4000", "--objective", "cost", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)["run"]
        assert document["cheapest"] == ("RTX4090" if "--price" in more else "T4")
        assert document["steps"] == 1000
        t4 = next(each for each in document["costs"] if each["key"] == "T4")
        assert t4["run"] == pytest.approx(0.09)
    assert run([*ASK, "--price", "t4=1", "--steps", "1000"]) == 0
    text = capsys.readouterr().out
    assert "No price was given for RTX4090, H200-SXM, which can train this too." in text
    assert len(asked) == 1, "neither prices nor the option for the cheapest GPU change the search"


def test_answers_are_remembered_for_these_gpus(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], [], ["h200"], ["--fresh"], ["--fidelity", "same"]):
        assert run([*ASK, *more]) == 0
    assert len(asked) == 4


def test_none_that_trains_it_is_exit_3(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(made_up(), answers=(answer("RTX2060", 0.8, 7 * GIB),))
    monkeypatch.setattr("snugfit.planning.fleet.search_gpus.plan_gpus", lambda *_, **__: alone)
    assert run([*ASK, "rtx2060"]) == 3
    assert "nearest miss" in capsys.readouterr().out


def test_without_a_job_it_lists_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpus"]) == 0
    assert "RTX4090" in capsys.readouterr().out
    assert run(["gpus", "h200", "t4", "--json"]) == 0
    assert [gpu["key"] for gpu in json.loads(capsys.readouterr().out)["gpus"]] == ["H200-SXM", "T4"]


MISTAKES = {
    "a job without a model": (["gpus", "--task", "causal-lm"], "--for MODEL"),
    "prices without a model": (["gpus", "--price", "h200=2"], "--for MODEL"),
    "no task": (["gpus", "--for", "deberta-v3-base"], "--task"),
    "no such gpu": ([*ASK, "rtx 9999"], "RTX4090"),
    "a price without a gpu": ([*ASK, "--price", "2.5"], "NAME=PRICE"),
    "a price of words": ([*ASK, "--price", "h200=cheap"], "USD per hour"),
    "a price of two gpus": ([*ASK, "--price", "a100=2"], "A100-SXM-80"),
    "no file of prices": ([*ASK, "--prices", "nowhere.yaml"], "no such file of prices"),
    "a file without prices": ([*ASK, "--prices", "empty.yaml"], "h200: 2.5"),
    "a file of something else": ([*ASK, "--prices", "list.yaml"], "h200: 2.5"),
    "a file with code": ([*ASK, "--prices", "code.yaml"], "not allowed"),
    "cost without prices": ([*ASK, "--objective", "cost"], "--price"),
    "two lengths of a run": ([*ASK, "--steps", "1", "--samples", "1"], "both"),
    "no steps": ([*ASK, "--steps", "0"], "steps"),
    "a recipe and what to keep": ([*ASK, "--set", "recipe=bf16", "--keep", "sgd"], "sets every technique"),
    "a gpu of a job file": ([*ASK, "--set", "gpu=h200"], "after `snugfit gpus`"),
    "another loop": ([*ASK, "--set", "loop=trainer"], "plain loop"),
    "unknown fidelity": ([*ASK, "--fidelity", "round"], "fidelity"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(
    name: str, asked: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "code.yaml").write_text("h200: !!python/object/apply:os.system [true]\n")
    arguments, told = MISTAKES[name]
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("snugfit: ")
    assert told in err
    assert "Traceback" not in err
    assert asked == []
