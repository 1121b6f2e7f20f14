"""Answers stored on disk equal computed ones, serve the same question only, and stay in a small folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from snugfit.cli import plan_cache as cache
from snugfit.cli.main import run
from snugfit.errors import NothingFits, UsageError
from snugfit.feature_folders import feature_files
from snugfit.prediction import predict as room
from snugfit.prediction.predict import predict
from snugfit.results.prediction import Prediction
from tiers import slow_but

pytestmark = pytest.mark.stored_rehearsals

RECIPES: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "bf16", {}),
    ("gpt2", "bf16 + micro_batches(2) + every_layer", {"gpu": "h200"}),
    ("llama", "bf16 + adamw_fused", {"gpu": "rtx 4090", "headroom": "1GiB", "memory_bytes": 8 << 30}),
    ("llama", "fsdp", {"gpu": "h200", "gpus": 2}),
    ("gpt2", "plain", {"loop": "accelerate", "gpu": "a100-80gb"}),
]
TINY = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 100}  # fmt: skip


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command about a small model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return ["predict", "config.json", "--task", "sequence-classification", "--gpu", "h200"]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of recipes whose predictions are computed."""
    original, recipes = room.predict, list[str]()

    def count(job: Any, recipe: Any = "plain", **how: Any) -> Prediction:
        recipes.append(str(recipe))
        return original(job, recipe, **how)

    monkeypatch.setattr(room, "predict", count)
    monkeypatch.setattr("snugfit.planning.largest.predict", count)
    monkeypatch.setattr("snugfit.planning.search.auto.predict_recipe", count)
    return recipes


@pytest.mark.parametrize(("model", "recipe", "how"), RECIPES)
def test_a_prediction_survives_json(model: str, recipe: str, how: dict[str, Any]) -> None:
    prediction = predict(small_job(model, 2, batch_size=4), recipe, **how)
    document = prediction.to_json()
    again = Prediction.from_json(json.loads(json.dumps(document)))
    assert again == prediction
    assert json.dumps(again.to_json()) == json.dumps(document)


@pytest.mark.parametrize("document", [{}, {"what": "plan", "schema": 1}, {"what": "prediction", "schema": 0}])
def test_another_document_is_no_prediction(document: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not a document 'prediction'"):
        Prediction.from_json(document)


@pytest.mark.parametrize(
    "more",
    slow_but(
        [
            ["--recipe", "bf16", "--operators"],
            ["--compare", "bf16", "--json"],
            ["--recipe", "bf16 + auto"],
            ["--memory", "700MiB", "--no-ways-out"],
            ["--largest", "batch", "--memory", "1GiB"],
            ["--recipe", "bf16"],
            ["--json"],
            ["--compare", "bf16", "--compare", "every_layer"],
        ],
        4,
    ),
)
def test_a_repeated_question_is_answered_alike_and_not_computed(
    more: list[str], words: list[str], computed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([*words, *more])
    first, told = capsys.readouterr()
    assert computed
    assert "snugfit: predicting " in told or "snugfit: searching" in told
    count = len(computed)
    assert run([*words, *more]) == code
    again, told = capsys.readouterr()
    assert again == first
    assert "snugfit: " not in told
    assert len(computed) == count
    assert code == (NothingFits.exit_code if "700MiB" in more else 0)
    for spelling in ("--no-cache", "--fresh"):
        assert run([*words, *more, spelling]) == code
        assert capsys.readouterr().out == first
    assert len(computed) == 3 * count


def test_the_trace_of_a_stored_answer_is_that_of_a_computed_one(
    words: list[str], computed: list[str], tmp_path: Path
) -> None:
    contents = []
    for _ in range(2):
        assert run([*words, "--trace", "a.json"]) == 0
        contents.append((tmp_path / "a.json").read_bytes())
        (tmp_path / "a.json").unlink()
    assert len(computed) == 1
    assert contents[0] == contents[1]


def test_any_other_question_is_computed(
    words: list[str], computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[list[str]] = [
        [],
        ["--recipe", "bf16"],
        ["--batch-size", "8"],
        ["--gpu", "a100-80gb"],
        ["--memory", "8GiB"],
        ["--headroom", "1GiB"],
        ["--loop", "accelerate"],
        *(["--software", file.name.removesuffix(".json")] for file in feature_files("software")),
        ["--gpus", "2", "--recipe", "ddp"],
    ]
    compute, answers = room.predict, list[Prediction]()

    def first_answer(job: Any, recipe: Any = "plain", **how: Any) -> Prediction:
        if answers:
            computed.append(str(recipe))
        else:
            answers.append(compute(job, recipe, **how))
        return answers[0]

    monkeypatch.setattr(room, "predict", first_answer)
    for more in [*others, *others]:
        assert run([*words, *more]) == 0
    assert len(computed) == len(others)
    monkeypatch.setattr(cache, "installed_versions", lambda: {"torch": "9"})
    assert run(words) == 0
    monkeypatch.setattr(cache, "_source", lambda: "changed")
    assert run(words) == 0
    assert len(computed) == len(others) + 2


def test_a_damaged_file_counts_as_none(words: list[str], computed: list[str]) -> None:
    assert run(words) == 0
    (file,) = cache.folder().iterdir()
    assert cache.recall(file.stem, Prediction.from_json) is not None
    for damage in (b"", b"{", b"[]", b"\xff", b'{"what": "plan"}', b"null", b'{"schema": 1}'):
        file.write_bytes(damage)
        assert cache.recall(file.stem, Prediction.from_json) is None, damage
    assert run(words) == 0
    assert len(computed) == 2
    assert run(words) == 0
    assert len(computed) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    words: list[str], computed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert run(words) == 0
    assert len(computed) == 2


class Answer:
    """An answer of a thousand bytes."""

    def to_json(self) -> dict[str, Any]:
        return {"text": "x" * 1000}


def test_answers_unused_for_longest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LARGEST_FOLDER", 5000)
    for number in range(4):
        cache.store_result(f"{number}", Answer())
        os.utime(cache.folder() / f"{number}.json", (number, number))
    assert cache.recall("0", lambda document: Answer()) is not None
    cache.store_result("4", Answer())
    assert sorted(path.stem for path in cache.folder().iterdir()) == ["0", "2", "3", "4"]


@pytest.mark.whole
def test_a_stored_answer_is_shown_without_torch_or_transformers(words: list[str]) -> None:
    """The command runs in its own process: its stderr is empty, and its stdout equals the first one's."""
    assert run([*words, "--json"]) == 0
    script = (
        "import sys; from snugfit.cli.main import run;"
        f"code = run({[*words, '--recipe', 'plain']!r});"
        "print(code, {'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("0 set()\n"), done.stdout
    assert done.stderr == ""
