"""`snugfit plan`: one clear error, the documented exit code, and a safe cache of answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import snugfit
from made_up import EVIL, job
from snugfit.cli import plan_cache as cache
from snugfit.cli.main import run
from snugfit.cli.plan_cache import Storable
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.planning.plan import Change, Choice, Counts, Exclusion, Plan, Reason, Start
from snugfit.prediction.profile import REHEARSED_ON
from snugfit.report.plan.plan import render
from snugfit.report.text.terminal import as_text
from snugfit.techniques import roster
from snugfit.units import GIB
from test_gpus_command import made_up as plans_for_gpus

ASK = ["plan", "bert-large-uncased", "--task", "sequence-classification", "--gpu", "h200"]


def choice(recipe: str, size: int, seconds: float, once: float = 7.0) -> Choice:
    return Choice(
        recipe=recipe, requested_bytes=size, allocated_bytes=size, reserved_bytes=size, context_bytes=GIB,
        step_seconds=seconds, samples_per_second=4 / seconds, once_seconds=once,
    )  # fmt: skip


def made_up(*, memory: int = 40 * GIB, name: str = "bert-large-uncased") -> Plan:
    front = (choice("bf16", 9 * GIB, 0.05), choice("bf16 + every_layer", 5 * GIB, 0.08))
    fitting = [each for each in front if each.needed_bytes <= memory]
    return Plan(
        job=job(name),
        gpu=find_gpu("h200"),
        memory_bytes=memory,
        fidelity="rounds",
        objective="speed",
        front=front,
        best=fitting[0] if fitting else None,
        reasons=(
            Reason(slot="precision", chosen="bf16", against="fp32", needed_bytes=12 * GIB, step_seconds=0.1),
            Reason(slot="matmul", chosen="ieee", against="tf32", why_not=EVIL),
        ),
        refused=(Exclusion(what=EVIL, why="it is another algorithm", recipes=3),),
        counts=Counts(recipes=9, tapes=8, footprints=7, passes=6, replayed=5),
        verified=True,
        versions={"torch": "2.13.0"},
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Fake and record the searches, with a cache in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    questions: list[dict[str, Any]] = []

    def search(job: Any, **how: Any) -> Plan:
        questions.append(how)
        return replace(made_up(memory=how["memory_bytes"] or 40 * GIB), steps=how["steps"])

    monkeypatch.setattr("snugfit.planning.search.search.plan", search)
    return questions


def test_a_plan_is_remembered_for_the_packages_that_its_techniques_need() -> None:
    searched = [technique for technique in roster.techniques() if technique.searched]
    needed = {Requirement(text).name for technique in searched for text in technique.needs}
    assert needed <= set(REHEARSED_ON)


def test_the_answer_comes_first_and_nothing_is_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = as_text(render(made_up(name=EVIL)))
    assert "H200: fits, 30.0 GiB free, about 50 ms a step\nbf16\n" in text
    assert "precision: bf16. With fp32: +2.00 GiB (+20.0 %)" in text
    assert "\x1b" not in text
    page = render(made_up(name=EVIL)).markdown()
    assert "<script>" not in page
    assert "| bf16 | 1 best | 10.00 |" in page


def test_nothing_fits_is_exit_3(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK, "--memory", "4GiB", "--no-ways-out"]) == 3
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "no recipe fits. The nearest needs 6.0 GiB, the limit is 4.0 GiB" in first
    assert second == "bf16 + every_layer"
    assert asked[0]["memory_bytes"] == 4 * GIB


def test_the_nearest_miss_is_the_fastest_of_the_near_ones() -> None:
    front = (
        choice("bf16", 9 * GIB, 0.05), choice("bf16 + every_layer", 5 * GIB, 0.08),
        choice("eager + bf16 + every_layer", 5 * GIB - (1 << 20), 0.16),
    )  # fmt: skip
    missed = replace(made_up(memory=4 * GIB), front=front, best=None)
    assert missed.nearest == front[1], "a MiB is not worth twice the time"
    assert missed.to_json()["nearest_miss"]["recipe"] == "bf16 + every_layer"
    assert replace(missed, objective="memory").nearest == front[2]


def test_json_is_the_plan(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK, "--json", "--fidelity", "same", "--objective", "memory"]) == 0
    assert Plan.from_json(json.loads(capsys.readouterr().out)) == made_up()
    assert (asked[0]["fidelity"], asked[0]["objective"]) == ("same", "memory")


def test_an_answer_is_remembered_and_a_damaged_one_is_not_believed(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert run(ASK) == 0
    assert len(asked) == 1, "remembered"
    assert run([*ASK, "--fresh"]) == 0
    assert run([*ASK, "--memory", "30GiB"]) == 0
    assert run([*ASK, "--all"]) == 0
    assert [question["whole_front"] for question in asked] == [False, False, False, True]
    assert len(asked) == 4, "another question is another answer"
    files = sorted(cache.folder().iterdir())
    assert len(files) == 3
    for number, damage in enumerate((b"", b"{", b"[]", b"\xff", b'{"what": "plan"}', b"null")):
        for file in files:
            file.write_bytes(damage)
        assert run(ASK) == 0
        assert len(asked) == 5 + number


def test_the_length_of_a_run(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for more, steps in (
        ([], None),
        (["--steps", "50"], 50),
        (["--samples", "200"], 50),
        (["--samples", "9"], 3),
    ):
        assert run([*ASK, *more, "--json"]) == 0
        assert asked[-1]["steps"] == steps
        assert Plan.from_json(json.loads(capsys.readouterr().out)).steps == steps
    assert len(asked) == 3, "50 steps of 4 are 200 samples: remembered"


def test_the_start_up_is_told() -> None:
    slower = Reason(slot="loading", chosen="inline", against="workers", needed_bytes=10 * GIB,
                    step_seconds=0.04, once_seconds=9.0)  # fmt: skip
    known = replace(made_up(), reasons=(slower,))
    text = as_text(render(known), width=200)
    assert "Start-up takes about 7.00 s more, which is not counted here" in text
    assert "40.0 ms a step (-20.0 %), +2.00 s start-up." in text
    counted = as_text(render(replace(known, steps=100)), width=200)
    assert "Ranked for a run of 100 steps, 400 samples: about 7.00 s of start-up" in counted
    assert "5.00 s of steps" in counted
    assert "not counted" not in counted


def test_changes_to_the_user_s_own_recipe_are_shown(asked: list[Any]) -> None:
    assert run(ASK) == 0
    assert asked[0]["start"] is None
    change = Change(slot="precision", theirs="fp32", ours="bf16", needed_bytes=7 * GIB, step_seconds=0.06)
    start = Start(recipe=EVIL, needed_bytes=9 * GIB, step_seconds=0.1, changes=(change,))
    for begun, told in (
        (start, ["as it is", "9.00", "100.0", "precision", "7.00", "60.0", "all of them"]),
        (replace(start, changes=()), ["Your recipe is the best"]),
        (replace(start, needed_bytes=None, step_seconds=None, why_not="too old"), ["cannot run", "too old"]),
    ):
        known = replace(made_up(), start=begun)
        assert Plan.from_json(json.loads(json.dumps(known.to_json()))) == known
        assert "\x1b" not in as_text(render(known))
        for text in (as_text(render(known)), render(known).markdown()):
            assert all(word in text for word in told)


def test_on_one_gpu_the_cheapest_is_the_fastest_and_that_is_said() -> None:
    assert "snugfit gpus --for" in as_text(render(replace(made_up(), objective="cost")))
    assert "snugfit gpus --for" not in as_text(render(made_up()))


def test_a_folder_that_cannot_be_written_is_no_error(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(ASK) == 0


MISTAKES = {
    "a recipe": ([*ASK, "--recipe", "bf16"], "chooses the recipe"),
    "another loop": ([*ASK, "--loop", "trainer"], "plain loop"),
    "no gpu": (ASK[:4], "--gpu"),
    "unknown fidelity": ([*ASK, "--fidelity", "round"], "fidelity"),
    "unknown objective": ([*ASK, "--objective", "sped"], "objective"),
    "no workers": ([*ASK, "--workers", "0"], "workers"),
    "no steps": ([*ASK, "--steps", "0"], "steps"),
    "no samples": ([*ASK, "--samples", "0"], "samples"),
    "two lengths of a run": ([*ASK, "--steps", "1", "--samples", "1"], "both"),
    "no batch": ([*ASK, "--batch-size", "0"], "batch size is 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(
    name: str, asked: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments, told = MISTAKES[name]
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("snugfit: ")
    assert told in err
    assert asked == []
    assert not list(tmp_path.iterdir())


def test_a_plan_in_python_is_remembered_and_tells_as_the_command_does(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(model=Model.find("bert-large-uncased"), task="sequence-classification")
    how: dict[str, Any] = {"gpu": "h200", "memory_bytes": None, "steps": None}
    first = snugfit.plan(job, **how)
    assert snugfit.plan(job, **how) == first
    assert len(asked) == 1, "remembered"
    assert snugfit.plan(job, **how, fresh=True) == first
    assert len(asked) == 2
    heard: list[str] = []
    snugfit.plan(job, **how, tell=heard.append, fresh=True)
    assert asked[-1]["tell"] == heard.append
    assert asked[-2]["tell"] != heard.append
    snugfit.plan(job, **how, clock=len)
    snugfit.plan(job, **how, clock=len)
    assert len(asked) == 5, "seconds of the user's own function are not shared"


SHOWN: tuple[tuple[Callable[[], Storable], list[str], str], ...] = (
    (made_up, ASK, "set()"),
    (plans_for_gpus, ["gpus", "--for", *ASK[1:4]], "{'numpy'}"),
)
"""A stored answer, the command that shows it, and the packages it imports. The command with the most
imports comes last."""


@pytest.mark.whole
def test_a_remembered_answer_is_shown_without_torch_or_transformers(tmp_path: Path) -> None:
    """The output has all of its last lines. Importing either package takes longer than the rest of the
    command."""
    lines = ["import json, sys", "from snugfit.cli import plan_cache", "from snugfit.cli.main import run"]
    for number, (answer, words, _) in enumerate(SHOWN):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(answer().to_json()), encoding="utf-8")
        lines.append(f"plan_cache.recall = lambda key, read: read(json.load(open({str(file)!r})))")
        lines.append(f"code = run({words!r})")
        lines.append("print('ended', code, {'torch', 'transformers', 'numpy'} & set(sys.modules))")
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "Train it: snugfit train " in done.stdout.partition("\nended ")[0]
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ended == [f"ended 0 {heavy}" for *_, heavy in SHOWN], done.stdout + done.stderr
