"""`snugfit lengths` and `snugfit plan --lengths`: one clear error, the documented exit code, and escaped
text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import snugfit
from made_up import EVIL
from made_up import job as made_up_job
from snugfit.cli.main import run
from snugfit.features.lengths.dataset import Lengths
from snugfit.features.lengths.length_plan import Cut, LengthPlan
from snugfit.features.lengths.padding import Way
from snugfit.features.lengths.report import ASSUMPTION, best_way, render, tables
from snugfit.features.lengths.sizes import Size
from snugfit.job.gpu import find_gpu
from snugfit.planning.plan import Choice, Counts, Plan
from snugfit.report.text.terminal import as_text
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB

pytestmark = pytest.mark.stored_rehearsals

ASK = ["lengths", "bert-large-uncased", "--task", "sequence-classification", "--gpu", "h200"]


def way(order: str, multiple: int, seconds: float, padding: float = 0.5) -> Way:
    return Way(
        order=order, multiple=multiple, length=512, needed_bytes=9 * GIB, reserved_bytes=8 * GIB,
        padding=padding, step_seconds=seconds, aligned_step_seconds=0.1, longest_step_seconds=2 * seconds,
        samples_per_second=4 / seconds, tokens_per_second=400 / seconds,
    )  # fmt: skip


def made_up(**changes: Any) -> LengthPlan:
    ways = (way("fixed", 1, 0.4), way("random", 1, 0.2), way("grouped", 1, 0.11), way("grouped", 8, 0.1))
    refused = Way(order="grouped", multiple=64, length=576, why_not=f"576 is too long {EVIL}")
    whole = LengthPlan(
        job=replace(made_up_job(), sequence_length=509, padding=0.7),
        recipe=Recipe.parse("bf16"),
        gpu=find_gpu("h100-sxm"),
        loop="plain",
        memory_bytes=40 * GIB,
        lengths=Lengths.of({100: 40, 509: 2}, source=EVIL),
        ways=(*ways, refused),
        cut=Cut(at=256, samples=0.05, tokens=0.1, ways=ways),
        sizes=(
            Size(what="vocabulary", given=30522, instead=30528, gain=0.05, more_bytes=0, step_seconds=0.3,
                 proposed=True, assumed=True),
            Size(what="batch", given=9, instead=8, gain=0.2, more_bytes=-GIB, step_seconds=0.3),
            Size(what="batch", given=9, instead=12, gain=0.3, more_bytes=GIB, step_seconds=0.3),
            Size(what="sequence length", given=509, instead=504, gain=0.02, more_bytes=-1, step_seconds=0.3),
            Size(what="width", given=67, instead=None, gain=0.02, assumed=True, where=EVIL),
        ),
        bound="tensor contractions",
        steps=300,
        rehearsed=9,
        off=0.0004,
        doubts=(EVIL,),
    )  # fmt: skip
    return replace(whole, **changes)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the record of planned requests. Plans are invented, and cached in the test's own folder."""
    questions: list[dict[str, Any]] = []

    def answer(job: Any, recipe: Any, **given: Any) -> LengthPlan:
        questions.append({"job": job, "recipe": str(recipe), **given})
        return made_up()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("snugfit.features.lengths.search.plan_lengths", answer)
    (tmp_path / "lengths.txt").write_text("100\n" * 40 + "509\n509\n")
    return questions


def test_the_question_holds_what_the_file_says(asked: list[dict[str, Any]]) -> None:
    assert run([*ASK, "--lengths", "lengths.txt", "--recipe", "bf16", "--truncate", "256"]) == 0
    (question,) = asked
    assert question["lengths"].counts == ((100, 40), (509, 2))
    assert (question["recipe"], question["cut"]) == ("bf16", 256)
    cut = question["job"]
    assert (cut.sequence_length, cut.padding) == (256, pytest.approx(1 - (40 * 100 + 2 * 256) / 42 / 256))


def test_the_longest_sample_is_the_length_of_the_job(asked: list[dict[str, Any]]) -> None:
    assert run([*ASK, "--lengths", "lengths.txt"]) == 0
    assert asked[0]["job"].sequence_length == 509
    assert 0.7 < asked[0]["job"].padding < 0.8


def test_an_answer_is_remembered_until_the_lengths_change(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    ask = [*ASK, "--lengths", "lengths.txt"]
    assert [run(ask), run(ask), len(asked)] == [0, 0, 1]
    assert [run([*ask, "--fresh"]), len(asked)] == [0, 2]
    (tmp_path / "lengths.txt").write_text("100\n" * 41 + "509\n509\n")
    assert [run(ask), len(asked)] == [0, 3]
    assert [run([*ask, "--recipe", "bf16"]), len(asked)] == [0, 4]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["--lengths", "lengths.txt", "--sequence-length", "128"],
            "--sequence-length 128: the file of --len",
        ),
        (["--lengths", "lengths.txt", "--padding", "0.5"], "--padding 0.5: the file of --lengths gives it"),
        (["--lengths", "none.txt"], "none.txt: no such file of lengths"),
        (["--lengths", "lengths.txt", "--column", "length"], "a .txt file has no columns"),
        (["--lengths", "lengths.txt", "--truncate", "-4"], "--truncate is -4; allowed are"),
        ([], "Missing option '--lengths'"),
    ],
)
def test_a_mistake_is_one_clear_error(
    more: list[str], says: str, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*ASK, *more]) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert told.out == ""
    assert not asked


def test_seconds_need_a_gpu(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK[:4], "--lengths", "lengths.txt"]) == 2
    assert "Add --gpu NAME" in capsys.readouterr().err


@pytest.mark.parametrize("task", [[], ["--task", "image-classification"]])
def test_pictures_have_none(
    task: list[str], asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is the same for a task that the user names and for one that follows from the architecture."""
    ask = ["lengths", "vit-large-patch16-224", *task, "--gpu", "h200"]
    assert run([*ask, "--lengths", "lengths.txt"]) == 2
    assert "the task image-classification has no sequences" in capsys.readouterr().err


def test_positions_end(
    asked: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the model's 512 positions; with `--truncate 512` the command succeeds."""
    (tmp_path / "long.txt").write_text("100\n700\n")
    assert run([*ASK, "--lengths", "long.txt"]) == 2
    told = capsys.readouterr().err
    assert "sequence length 700 is more than the model's 512 positions" in told
    assert run([*ASK, "--lengths", "long.txt", "--truncate", "512"]) == 0


def test_the_exit_code_says_whether_the_longest_fits(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = made_up(memory_bytes=8 * GIB)
    monkeypatch.setattr("snugfit.features.lengths.search.plan_lengths", lambda *_, **__: small)
    assert run([*ASK, "--lengths", "lengths.txt"]) == 3
    assert "The longest batch does not fit: it is short by 1.00 GiB" in capsys.readouterr().out


def test_json_is_one_document(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASK, "--lengths", "lengths.txt", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert LengthPlan.from_json(document) == made_up()
    assert document["best"]["multiple"] == 8


def test_a_plan_is_made_for_the_longest_and_tells_the_rest(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []

    def search(job: Any, **given: Any) -> Plan:
        jobs.append(job)
        best = Choice(
            recipe="bf16 + tf32", requested_bytes=GIB, allocated_bytes=GIB, reserved_bytes=GIB,
            context_bytes=GIB, step_seconds=0.1, samples_per_second=40.0,
        )  # fmt: skip
        return Plan(
            job=job, gpu=given["gpu"], memory_bytes=GIB, fidelity="rounds", objective="speed", front=(best,),
            best=best, counts=Counts(recipes=1, tapes=1, footprints=1, passes=1, replayed=1),
        )  # fmt: skip

    monkeypatch.setattr("snugfit.planning.search.search.plan", search)
    ask = ["plan", *ASK[1:], "--lengths", "lengths.txt"]
    assert run(ask) == 0
    assert [job.sequence_length for job in jobs] == [509]
    assert asked[0]["recipe"] == "bf16 + tf32"
    out = capsys.readouterr().out
    assert out.index("throughput") < out.index("Pad each batch")
    assert run([*ask, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["what"], document["lengths"]["what"]) == ("plan", "lengths")


# ---- reports --------------------------------------------------------------------------------------------


def test_the_report_says_how_to_pad_and_marks_it() -> None:
    text = " ".join(as_text(render(made_up())).split())
    assert "42 samples of 100 to 509 tokens, half of them up to 100" in text
    assert 'train_sampling_strategy="group_by_length"' in text
    assert "pad_to_multiple_of=8" in text
    assert "4.00 times as fast as padding everything to 512" in text
    assert "grouped 8 512 9.00 50.0 % 100.0 200.0 40.0 4,000 best" in text
    assert "grouped 64 576 not possible" in text
    assert "A different job: sequences cut at 256 tokens (5.0 % of the samples are cut, 10.0 %" in text


def test_the_report_tells_what_rests_on_an_assumption() -> None:
    assumed = " ".join(as_text(render(made_up())).split())
    assert "vocabulary 30,522 30,528 5.0 % *" in assumed
    assert "Rounding lengths up gains only what unaligned rows are assumed to cost." in assumed
    assert ASSUMPTION in assumed
    certain = made_up(sizes=(), ways=(way("random", 1, 0.2),))
    assert ASSUMPTION not in " ".join(as_text(render(certain)).split())


def test_other_endings_have_their_words() -> None:
    host = as_text(render(made_up(bound="host", sizes=())))
    assert "The host is the bottleneck" in host
    assert "longest sequence is too long for the model: 509 tokens" in as_text(render(made_up(ways=())))


def test_foreign_words_are_data() -> None:
    plan = made_up()
    shown = as_text(render(plan), width=400)
    assert "\x1b" not in shown
    assert "[a/path]" in shown
    page = render(plan).markdown()
    assert "<script>" not in page


def test_the_table_of_the_docs_is_the_command_s_own() -> None:
    """docs/plan.md shows a part of the output of `snugfit lengths --json` under results/."""
    root = Path(__file__).parents[5]
    written = json.loads((root / "results/lengths-2026-11-20/gpt2-large.json").read_text())
    page = (root / "docs/plan.md").read_text()
    plan = LengthPlan.from_json(written)
    assert plan.lengths == replace(
        Lengths.read(root / "results/lengths-2026-11-20/lengths.json"), source=plan.lengths.source
    )
    assert best_way(plan) in page
    shown = [
        line for line in page.splitlines() if line.startswith(("| one length", "| at random", "| grouped"))
    ]
    assert len(shown) == 3
    assert set(shown) <= set(next(iter(tables(plan))).markdown().splitlines())


def test_a_plan_of_lengths_prints_its_report_where_no_other_result_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from snugfit.report import show

    monkeypatch.setattr(LengthPlan, "__str__", object.__str__)
    monkeypatch.delitem(vars(snugfit), "plan_lengths", raising=False)
    assert callable(snugfit.plan_lengths)
    assert str(made_up()) == show.text(made_up())
    assert made_up()._repr_html_().startswith("<")  # type: ignore[attr-defined]


def test_data_is_answered_with_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "gpt2", "--data", "4"]) == 2
    assert "Give the longest sample: --sequence-length N. Try" in capsys.readouterr().err
