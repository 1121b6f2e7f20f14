"""The options keep and free, and the recipe that a plan starts from, preserve the user's own choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from snugfit import plan, plan_gpus, predict
from snugfit.cli.main import run
from snugfit.errors import SnugfitError, UsageError
from snugfit.job.job import Job
from snugfit.planning.keep import kept_of
from snugfit.planning.plan import Plan
from snugfit.planning.search.space import Space, space_of
from snugfit.report.plan.plan import render
from snugfit.report.text.terminal import as_text
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot

pytestmark = pytest.mark.stored_rehearsals

ADAPTED = "lora(targets=all-linear) + bf16_pure"
WIDE = {"hidden_size": 512, "intermediate_size": 1376, "vocab_size": 8192}


def llama() -> Job:
    """Return a job with most of its bytes in weights and states."""
    return small_job("llama", 2, WIDE, batch_size=1)


def offered(space: Space, slot: Slot) -> list[str]:
    return sorted(map(str, space.offers(slot)))


def space_with(keep: Any = None, free: Any = (), start: str | None = None) -> Space:
    job = llama()
    fixed = kept_of(job, keep, free, Recipe.parse(start) if start else None)
    return space_of(job, fidelity=Fidelity.ROUNDS, capability=(9, 0), fixed=fixed)


# ---- the space -------------------------------------------------------------------------------------------


def test_slots_of_the_named_techniques_are_kept() -> None:
    space = space_with(f"{ADAPTED} + adamw")
    assert offered(space, Slot.ADAPTERS) == ["lora(targets=all-linear)"]
    assert offered(space, Slot.PRECISION) == ["bf16_pure"]
    assert offered(space, Slot.OPTIMIZER) == ["adamw"], "a slot's default can be named too"
    assert len(offered(space, Slot.CHECKPOINTING)) > 1


def test_of_the_user_s_recipe_the_algorithm_is_kept() -> None:
    mine = "lora(r=12) + bf16_pure + adamw_fused + workers(7)"
    space = space_with(start=mine)
    assert offered(space, Slot.ADAPTERS) == ["lora(r=12)"]
    assert offered(space, Slot.PRECISION) == ["bf16_pure"]
    assert offered(space, Slot.OPTIMIZER) == ["adamw", "adamw_fused", "adamw_loop"]
    assert space.number(Recipe.parse(mine)) is not None, "the user's own workers too"
    for other in ("adafactor", "sgd"):
        assert offered(space_with(start=other), Slot.OPTIMIZER) == [other]
    free = space_with(free="precision, adapters", start=mine)
    assert offered(free, Slot.PRECISION) == ["as_loaded", "bf16", "bf16_master", "bf16_pure"]
    assert free.number(Recipe.parse(mine)) is not None, "a freed technique stays in the search space"
    assert offered(space_with("fp16", start=mine), Slot.PRECISION) == ["fp16"], (
        "a named technique takes precedence"
    )


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"keep": "plain"}, "names no technique"),
        ({"keep": "lora(r=0)"}, "lora"),
        ({"free": ["optimiser"]}, "'optimizer'"),
    ],
)
def test_what_names_nothing_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(SnugfitError, match=told):
        plan(llama(), gpu="h200", **asked)


def test_a_gpu_that_is_too_old_for_what_is_kept_says_so() -> None:
    with pytest.raises(UsageError, match=r"tf32 needs compute capability 8\.0"):
        plan(llama(), gpu="t4", keep="tf32")
    answer = plan_gpus(llama(), ["t4"], keep="tf32").answers[0]
    assert answer.fits is None
    assert "tf32 needs compute capability 8.0" in answer.why


# ---- the plan --------------------------------------------------------------------------------------------

FEW = {
    slot: roster.plain(slot)
    for slot in (
        Slot.ATTENTION,
        Slot.MATMUL,
        Slot.KERNELS,
        Slot.HEAD,
        Slot.ENGINE,
        Slot.ACTIVATION_OFFLOAD,
        Slot.GRADIENTS,
        Slot.ALLOCATOR,
        Slot.LOADING,
    )
}
"""Fixed slots, because the test is about other slots."""
ONE_PRECISION = {Slot.PRECISION: roster.plain(Slot.PRECISION)}


@pytest.mark.whole
def test_a_recipe_that_the_user_has_and_that_fits_is_never_left_out() -> None:
    """A plan that starts from the user's own LoRA fits if nothing else does."""
    job = llama()
    bound = predict(job, f"{ADAPTED} + every_layer + adamw_loop", gpu="h200").needed_bytes
    common: dict[str, Any] = {"gpu": "h200", "memory_bytes": bound, "workers": 1}
    few = {**FEW, Slot.CHECKPOINTING: Recipe.parse("every_layer")[Slot.CHECKPOINTING]}
    loop = {Slot.OPTIMIZER: Recipe.parse("adamw_loop")[Slot.OPTIMIZER]}
    alone = predict(job, "bf16_pure + every_layer + adamw_loop", gpu="h200")
    assert alone.needed_bytes > bound, "no recipe without adapters fits"
    own = plan(job, **common, start=f"{ADAPTED} + every_layer + adamw_loop", keep=few)
    assert own.fits
    assert {slot.slot for slot in own.kept} == {"adapters", "precision", "optimizer", *few}
    text = as_text(render(own), width=200)
    assert "precision: bf16_pure, kept from your own recipe (--free precision allows others)." in text
    assert "the algorithm kept from your own recipe (--free optimizer allows others)" in text
    assert Plan.from_json(json.loads(json.dumps(own.to_json()))) == own
    kept = plan(job, **common, keep=f"{ADAPTED} + {' + '.join(map(str, (few | loop).values()))}")
    assert kept.fits
    assert kept.best is not None
    assert "lora(targets=all-linear) + bf16_pure" in kept.best.recipe
    reasons = {reason.slot: reason for reason in kept.reasons}
    assert reasons["precision"].kept == "kept as you asked (--free precision allows others)"
    assert reasons["precision"].against == ""
    assert kept.to_json()["kept"][2]["techniques"] == ["bf16_pure"]


@pytest.mark.whole
def test_reasons_are_those_of_the_nearest_miss() -> None:
    missed = plan(llama(), gpu="h200", memory_bytes=1 << 20, workers=1, keep={**FEW, **ONE_PRECISION})
    nearest = Recipe.parse(missed.nearest.recipe)
    assert all(str(nearest[reason.slot]) == reason.chosen for reason in missed.reasons)
    assert str(missed.nearest.recipe) in missed.cures[0]
    assert any("--free" in cure for cure in missed.cures)


# ---- the commands ----------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the options that each search receives; no search runs."""
    questions: list[dict[str, Any]] = []

    def search(*given: Any, **how: Any) -> Any:
        questions.append(how)
        raise UsageError("enough")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("snugfit.planning.search.search.plan", search)
    monkeypatch.setattr("snugfit.planning.fleet.search_gpus.plan_gpus", search)
    return questions


JOB = ["bert-large-uncased", "--task", "sequence-classification"]


@pytest.mark.parametrize("command", [["plan", *JOB, "--gpu", "h200"], ["gpus", "h200", "--for", *JOB]])
def test_the_commands_take_both(command: list[str], asked: list[dict[str, Any]]) -> None:
    run([*command, "--keep", "bf16", "--free", "optimizer,precision"])
    assert (asked[0]["keep"], asked[0]["free"]) == ("bf16", "optimizer,precision")


def test_gpus_that_a_recipe_fits(asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    run(["gpus", "--for", *JOB, "--recipe", "bf16 + every_layer"])
    assert Recipe(tuple(asked[0]["keep"].values())) == Recipe.parse("bf16 + every_layer")
    assert len(asked[0]["keep"]) == len(Slot)
    assert run(["gpus", "--for", *JOB, "--recipe", "bf16", "--keep", "sgd"]) == 2
    assert "--recipe sets every technique" in capsys.readouterr().err


def test_what_is_kept_is_part_of_the_question() -> None:
    from snugfit.cli.plan_cache import key_of

    keys = {key_of(llama(), keep=keep, free=free) for keep in (None, "bf16") for free in ((), "optimizer")}
    assert len(keys) == 4


@pytest.mark.whole
def test_one_recipe_on_many_gpus() -> None:
    job, recipe = small_job("llama", 2, batch_size=1), Recipe.parse("bf16 + every_layer")
    answers = plan_gpus(job, ["t4", "h200"], keep={one.slot: one for one in recipe}, workers=1)
    for answer in answers.answers:
        assert answer.choice is not None
        assert answer.choice.recipe == str(recipe)
        assert answer.choice.needed_bytes == predict(job, recipe, gpu=answer.gpu).needed_bytes
    assert "The same recipe on every GPU: bf16 + every_layer." in str(answers)
