"""Every command and every piece of Python in README and docs is valid as written."""

from __future__ import annotations

import ast
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prose import sentences

import snugfit
from in_roster import needs_techniques
from made_up import measurement, prediction
from made_up_plans import planned
from small_models import small_job
from snugfit.cli.main import run
from snugfit.feature_folders import feature_packages
from snugfit.job.gpu import find_gpu
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from source_trees import FILES, tree_of
from test_gpus_command import made_up as plans_for_gpus
from test_words import texts_of
from tiers import slow_but

ROOT = Path(__file__).parents[1]
H200 = find_gpu("h200")
USER_PAGES = sorted((ROOT / "docs").glob("*.md"))
ERROR_PAGES = sorted((ROOT / "docs" / "errors").glob("*.md"))
"""Pages about messages of other packages. A reader finds one of them by a search, and reads no other."""
PAGES = [ROOT / "README.md", *USER_PAGES, *ERROR_PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def pieces(language: str) -> list[str]:
    """Return the fenced pieces of one language on every page."""
    found = [piece for page in PAGES for piece in FENCE.findall(page.read_text())]
    return [text for kind, text in found if kind == language]


def commands() -> list[str]:
    """Return the lines that call snugfit, each with its continuation."""
    texts = [*pieces(""), *pieces("console")]
    lines = [line.removeprefix("$ ") for text in texts for line in text.replace("\\\n", " ").splitlines()]
    calls = {line for line in lines if line.startswith("snugfit ")}
    return sorted(" ".join(line.partition("snugfit ")[2].split()) for line in calls)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parse and check the requests, and invent the results. The package caches its lazy attributes, so the
    real ones are loaded first."""
    assert all(hasattr(snugfit, name) for name in snugfit.__all__)

    def predict(job: Any, recipe: Any, **_: Any) -> Any:
        return replace(prediction(), job=job, recipe=recipe)

    def measure(job: Any, recipe: Any, **_: Any) -> Any:
        return replace(measurement(), job=job, recipe=recipe)

    monkeypatch.setattr("snugfit.prediction.predict.predict", predict)

    def rehearse_again(_: Any) -> Any:
        return rehearse(small_job("bert", 1), Recipe().setup(), CudaPolicy())

    replaced = {
        "traces": ("export_trace.rehearse_again", rehearse_again),
        "distributed": ("launch.launch", lambda *_: 0),
    }
    for feature, (target, replacement) in replaced.items():
        if feature in feature_packages():
            monkeypatch.setattr(f"snugfit.features.{feature}.{target}", replacement)
    monkeypatch.setattr("snugfit.planning.largest.largest", lambda *a, **k: (1, predict(*a, **k)))
    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    monkeypatch.setattr("snugfit.frontends.own.refuse_more_than_here", lambda *_: None)
    monkeypatch.setenv("SNUGFIT_RATES", str(tmp_path / "rates"))
    monkeypatch.setattr(
        "snugfit.planning.search.search.plan", lambda job, **how: planned(how.get("ranked", 0))
    )
    monkeypatch.setattr("snugfit.planning.fleet.search_gpus.plan_gpus", lambda *_, **__: plans_for_gpus())
    trained = SimpleNamespace(outcome="finished", exit_code=0, step=1, folder=tmp_path)
    monkeypatch.setattr("snugfit.frontends.own.train", lambda *_, **__: trained)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("snugfit.cli.measure.gpu_here", lambda *_: "NVIDIA H200")
    for text in (*pieces("yaml"), *(text for text in pieces("python") if text.startswith("# "))):
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


OF_FEATURES = re.compile(r"(guide|check|export|why-oom|lengths)\b|.* --(arguments|export|\w*_\w*) ")
OF_ACCURACY = re.compile(r"accuracy\b|.* --verify ")
OF_CALIBRATION = re.compile(r"calibrate\b")
"""Commands that the tests of features run."""
OF_GPU_GROUPS = re.compile(r"(plan|gpus)\b.* --gpus ")
"""Plans for several GPUs, which the tests of their feature run."""
ELSEWHERE = (OF_FEATURES, OF_ACCURACY, OF_CALIBRATION, OF_GPU_GROUPS)


@pytest.mark.parametrize(
    "command",
    slow_but(
        [one for one in commands() if not any(kind.match(one) for kind in ELSEWHERE)],
        lambda one: "+ auto" not in one,
    ),
)
def test_a_command_of_the_docs_is_understood(
    command: str, answered: None, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--gpus" in command:
        needs_techniques("fsdp")
    if any(option in command for option in ("--html", "--open", "--plot")):
        pytest.importorskip("snugfit.features.page", reason="the feature page is not there")
    assert run(shlex.split(command)) == 0, capsys.readouterr().err


def test_the_docs_have_commands_and_python() -> None:
    assert {"predict", "measure", "guide"} <= {command.split()[0] for command in commands()}
    assert pieces("python")


@pytest.mark.parametrize("text", pieces("python"))
def test_python_of_the_docs_uses_what_there_is(text: str) -> None:
    tree = ast.parse(text)
    if "snugfit.watch" in text:
        pytest.importorskip("snugfit.features.watch", reason="the feature watch is not there")
    asked = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _of_ours(node)}
    assert asked <= set(snugfit.__all__)


DOORS = ("snugfit.train(", "snugfit.fit(", "snugfit.accelerate(")


def trained() -> list[str]:
    """Return the pieces of Python that train."""
    return [text for text in pieces("python") if any(door in text for door in DOORS)]


def test_each_door_has_an_example() -> None:
    for door in DOORS:
        assert any(door in text and "digits" in text for text in pieces("python"))


@pytest.mark.whole
@pytest.mark.parametrize("text", trained())
def test_training_of_the_docs_runs_as_printed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer steps, and fewer pictures of digits."""
    task = pytest.importorskip("snugfit.features.digits", reason="the feature digits is not there")
    few = tuple(part[:128] for part in task.digits())
    monkeypatch.setattr(task, "digits", lambda: few)
    monkeypatch.chdir(tmp_path)
    exec(compile(re.sub(r"max_steps=\d+", "max_steps=4", text), "docs", "exec"), {})
    assert re.match(r"finished|[0-9]+$", capsys.readouterr().out.splitlines()[-1])


def _of_ours(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "snugfit"


MISTAKES = re.compile(r"^\$ (snugfit [^\n]+)\n(.*)", re.DOTALL)


@pytest.mark.parametrize(
    ("command", "message"), [found for text in pieces("text") for found in MISTAKES.findall(text)]
)
def test_a_shown_error_is_the_command_s_own(
    command: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run(shlex.split(command)[1:]) == 2
    printed, shown = " ".join(capsys.readouterr().err.split()), " ".join(message.split())
    begins, cut, _ = shown.partition(" ...")
    assert begins in printed if cut else printed.endswith(shown)


def test_phrases_of_messages_are_in_the_source() -> None:
    phrases = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    texts = [text for path in FILES for _, text in texts_of(tree_of(path))]
    assert len(phrases) > 10
    if os.environ.get("SNUGFIT_WITHOUT"):
        pytest.skip("the page has messages of a deleted feature too")
    assert [phrase for phrase in phrases if not any(phrase in text for text in texts)] == []


MOST_WORDS = 15_000
"""Words of all pages for users together, without the bars of tables."""

MOST_ERROR_WORDS = 180
"""Words of a page about a message, with the message."""

LONGEST_PARAGRAPH = 100
"""Words of a paragraph or of an entry of a list."""

SENTENCE_WORDS = 18
"""Mean number of words of a sentence."""


def paragraphs(page: Path) -> list[str]:
    """Return the paragraphs of a page and the entries of its lists, without tables and code."""
    text = FENCE.sub("", page.read_text())
    blocks = re.split(r"\n\s*\n|\n(?=- |[0-9]+\. )", text)
    return [block for block in blocks if not block.lstrip().startswith(("|", "#"))]


def words(page: Path) -> int:
    """Return the number of words of a page."""
    return sum(re.search(r"\w", word) is not None for word in page.read_text().split())


def test_docs_are_short() -> None:
    assert sum(map(words, USER_PAGES)) <= MOST_WORDS
    assert [page.name for page in ERROR_PAGES if words(page) > MOST_ERROR_WORDS] == []


@pytest.mark.parametrize("page", [*USER_PAGES, *ERROR_PAGES], ids=lambda page: page.name)
def test_paragraphs_are_short(page: Path) -> None:
    assert [text[:60] for text in paragraphs(page) if len(text.split()) > LONGEST_PARAGRAPH] == []


def test_sentences_are_short() -> None:
    lengths = [
        len(sentence.split())
        for page in [*USER_PAGES, *ERROR_PAGES]
        for text in paragraphs(page)
        for sentence in sentences(text)
    ]
    assert sum(lengths) / len(lengths) <= SENTENCE_WORDS


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "dev").glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
