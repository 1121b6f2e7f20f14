"""`auto` in a recipe resolves to the least recomputing that fits on a GPU, with a message. Checkpoints and
results hold the resolved recipe."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import snugfit
from small_models import small_job
from snugfit.cli.main import run
from snugfit.errors import RecipeError, UsageError
from snugfit.job.job import Job
from snugfit.planning.search.auto import predict, resolve
from snugfit.prediction.predict import predict as predict_recipe
from snugfit.techniques.recipe import Recipe, without_auto
from snugfit.techniques.technique import Slot
from tiers import slow_but

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

LAYERS = 3
REST = "lora(r=4) + bf16"


@pytest.fixture(scope="module")
def this() -> Job:
    """Return a job of one sample, which cannot be cut; activations take most of its bytes."""
    return small_job("llama", LAYERS, batch_size=1, sequence_length=8192)


@functools.cache
def needed(this: Job, recipe: str) -> int:
    """Return the bytes of a recipe, cached for several tests."""
    footprint = predict_recipe(this, recipe, gpu="h200").footprint
    return (footprint.reserved_bytes or 0) + footprint.context_bytes


def at(this: Job, memory: int, **how: Any) -> Recipe:
    return resolve(this, REST, gpu="h200", memory_bytes=memory, **how).recipe


# ---- resolving ---------------------------------------------------------------------------------------------


def test_nothing_is_recomputed_where_all_fits(this: Job) -> None:
    recipe, why = resolve(this, REST, gpu="h200")
    assert recipe == Recipe.parse(REST)
    assert why.startswith("auto: keep_all, because all activations fit")


@pytest.mark.parametrize("share", slow_but([0.6, 0.2], 1))
def test_it_is_the_fewest_layers_that_fit(this: Job, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.planning.search.auto.link_of", lambda gpu: None)
    most, least = needed(this, REST), needed(this, f"{REST} + every_layer")
    memory = int(most - share * (most - least))
    recipe, why = resolve(this, REST, gpu="h200", memory_bytes=memory)
    k = recipe.setup().checkpoint.first  # type: ignore[union-attr]
    assert recipe == Recipe.parse(f"{REST} + first_layers({k})")
    assert f"auto: first_layers({k}), because it does not fit with fewer recomputed layers" in why
    fewer = f"{REST} + first_layers({k - 1})" if k > 1 else REST  # type: ignore[operator]
    assert needed(this, str(recipe)) <= memory < needed(this, fewer)


def test_a_headroom_is_left(this: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugfit.planning.search.auto.link_of", lambda gpu: None)
    most, least = needed(this, REST), needed(this, f"{REST} + every_layer")
    half = (most - least) // 2
    assert at(this, most) == Recipe.parse(REST)
    recipe = at(this, most, headroom=half)
    assert needed(this, str(recipe)) <= most - half
    assert recipe[Slot.CHECKPOINTING].name == "first_layers"


# ---- from Python -------------------------------------------------------------------------------------------


def test_a_prediction_has_the_concrete_recipe(this: Job, logged: list[str]) -> None:
    memory = needed(this, f"{REST} + every_layer")
    answer = snugfit.predict(this, f"{REST} + auto", gpu="h200", memory_bytes=memory)
    assert answer.fits
    assert "auto" not in str(answer.recipe)
    assert "auto" not in json.dumps(answer.to_json()["recipe"])
    assert any(line.startswith("auto: ") for line in logged)
    assert predict(this, REST, gpu="h200").recipe == Recipe.parse(REST)


def test_without_a_gpu_it_is_refused_with_the_way_out(this: Job) -> None:
    with pytest.raises(UsageError, match=r"Name one with --gpu, or write .*'every_layer'"):
        predict(this, "bf16 + auto")


def test_a_recipe_is_never_auto() -> None:
    with pytest.raises(RecipeError, match="starts a search") as refused:
        Recipe.parse("bf16 + auto")
    assert "       ^^^^" in str(refused.value)
    assert without_auto("bf16 + every_layer") is None
    assert without_auto("auto") == "plain"
    assert without_auto("bf16 + auto + micro_batches(4)") == "bf16 + micro_batches(4)"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("auto + every_layer", "chooses the checkpointing. Leave 'every_layer' out"),
        ("auto + bf16 + auto", "named only once"),
        ("auto(3)", "no settings"),
    ],
)
def test_what_it_chooses_cannot_stand_beside_it(text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        without_auto(text)


# ---- on the command line -----------------------------------------------------------------------------------


ASKED = ["bert-base-uncased", "--task", "sequence-classification", "--recipe"]


def test_a_command_says_what_it_stands_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(small_job("bert", 2).model.config)))
    asked = ["predict", str(tmp_path), *ASKED[1:], "bf16 + auto", "--sequence-length", "16"]
    assert run([*asked, "--gpu", "h200", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "auto: keep_all, because all activations fit" in err
    assert json.loads(out)["recipe"] == "bf16"
    assert run(asked) == 2
    assert "Name one with --gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("predict", "--gpu", "h200", "--largest", "batch"), "takes none with 'auto'"),
        (("predict", "--gpu", "h200", "--compare", "auto"), "starts a search"),
        (("plan", "--gpu", "h200"), "starts a search"),
        (("measure", "--device", "cpu"), "Name one with --gpu"),
        (("train", "--device", "cpu", "--output-dir", "out"), "Name one with --gpu"),
    ],
)
def test_where_it_cannot_be_it_is_refused(
    command: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = command
    recipe = "bf16" if "--compare" in command else "bf16 + auto"
    assert run([name, *ASKED, recipe, *more]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
