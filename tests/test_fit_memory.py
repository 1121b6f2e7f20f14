"""An out-of-memory error in a fitted trainer's step: the step runs again in finer micro-batches of the same
batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fitted import classified, copy_of, losses_of, model_of, spoken, trainer_of
from snugfit import fit
from snugfit.errors import OutOfMemory
from snugfit.features.loops.trainer import fit_run
from snugfit.frontends.next_recipe import suits_live_model
from snugfit.techniques.recipe import Recipe
from snugfit.training import step_logger
from snugfit.training.checkpoint.manifest import verify
from tiers import crossed, slow_but


def limited(model: Any, rows: int, *, backward: bool = False) -> Any:
    """Return a model that runs out of memory above this number of samples, in the forward or the backward
    pass."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def look(module: Any, given: Any, keywords: Any) -> None:
        if torch.is_grad_enabled() and len(keywords["input_ids"]) > rows and not backward:
            full()

    def look_later(module: Any, given: Any, keywords: Any, out: Any) -> None:
        if torch.is_grad_enabled() and len(keywords["input_ids"]) > rows and backward:
            out["loss"].register_hook(full)

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.register_forward_hook(look_later, with_kwargs=True)
    return model


def run_of(folder: Path, model: Any, data: Any, recipe: str, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    trainer = trainer_of(folder, model, data, micro=(8, 1), **more)
    return fit(trainer, recipe, watch=told.append), told


@pytest.mark.whole
@pytest.mark.parametrize(("family", "backward"), crossed(["bert", "llama"], [False, True]))
def test_the_step_is_taken_again_in_finer_pieces(family: str, backward: bool, tmp_path: Path) -> None:
    model, data = model_of(family), classified(22) if family == "bert" else spoken(22)
    whole, _ = run_of(tmp_path / "whole", copy_of(model), data, "plain")
    whole.train()
    cut, told = run_of(
        tmp_path / "cut", limited(copy_of(model), 2, backward=backward), data, "micro_batches(2)"
    )
    cut.train()
    assert losses_of(cut) == pytest.approx(losses_of(whole), rel=2e-5)
    replanned = [event for event in told if event["event"] == "replanned"]
    assert [event["recipe"] for event in replanned] == ["micro_batches(4)"]
    assert "stays 8" in replanned[0]["text"]
    assert cut.state.global_step == 4


@pytest.mark.whole
def test_late_in_a_step_what_was_done_of_it_is_dropped(tmp_path: Path) -> None:
    """The third of four micro-batches is the first one that runs out of memory."""
    data = [{**each, "input_ids": each["input_ids"][:4]} for each in classified(8)]
    data[5] = {**data[5], "input_ids": [*data[5]["input_ids"], 7, 8, 9]}
    model = model_of("bert")
    whole, _ = run_of(tmp_path / "whole", copy_of(model), data, "plain", max_steps=2)
    whole.train()

    def look(module: Any, given: Any, keywords: Any) -> None:
        if torch.is_grad_enabled() and keywords["input_ids"].numel() > 10:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_pre_hook(look, with_kwargs=True)
    cut, told = run_of(tmp_path / "cut", model, data, "micro_batches(4)", max_steps=2)
    cut.train()
    assert [event["step"] for event in told if event["event"] == "replanned"] == [1]
    assert losses_of(cut) == pytest.approx(losses_of(whole), rel=2e-5)


@pytest.mark.whole
def test_what_is_cut_stays_cut_after_a_resume(tmp_path: Path) -> None:
    model, data = model_of("bert", dropout=0.2), classified(22)
    more = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    first, _ = run_of(tmp_path, limited(copy_of(model), 2), data, "plain", **more)
    first.train()
    about = verify(tmp_path / "checkpoint-2", 2).about
    assert (about["asked"], about["recipe"]) == ("plain", "micro_batches(4)")
    again, told = run_of(tmp_path, limited(copy_of(model), 2), data, "plain", **more)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not [event for event in told if event["event"] == "replanned"]
    assert losses_of(again) == losses_of(first)


def follows(monkeypatch: pytest.MonkeyPatch, *recipes: str) -> list[str]:
    """Replace the planner by these recipes, as on a GPU, and return the list of causes that it receives."""
    left, causes = [Recipe.parse(each) for each in recipes], []

    def next_recipe(device: Any, **_: Any) -> Any:
        def following(job: Any, recipe: Recipe, cause: str) -> Recipe | None:
            causes.append(cause)
            return left.pop(0) if left else None

        return following

    monkeypatch.setattr(fit_run, "next_recipe", next_recipe)
    return causes


def recomputes(model: Any) -> bool:
    return any(getattr(each, "gradient_checkpointing", False) for each in model.modules())


@pytest.mark.whole
@pytest.mark.parametrize("following", slow_but(["segments + micro_batches(4)", "every_layer"], 1))
def test_layers_of_the_live_model_are_recomputed(
    following: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in step 3, with dropout. The result equals a run fitted with this recipe from the
    start."""
    model, data = model_of("bert", dropout=0.2), classified(24)
    more = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}
    whole, _ = run_of(tmp_path / "whole", copy_of(model), data, "plain", **more)
    whole.train()
    follows(monkeypatch, following)
    cut, told = run_of(tmp_path / "cut", copy_of(model), data, "plain", **more)
    broken = [3]

    def look(module: Any, given: Any, keywords: Any) -> None:
        if cut.state.global_step + 1 in broken:
            broken.clear()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    cut.model.register_forward_pre_hook(look, with_kwargs=True)
    cut.train()
    (replanned,) = [event for event in told if event["event"] == "replanned"]
    assert (replanned["step"], replanned["recipe"]) == (3, str(Recipe.parse(following)))
    assert cut.snugfit.max_rows == 8 // Recipe.parse(following).setup().micro_batches
    if following == "every_layer":
        assert recomputes(cut.model)
        assert losses_of(cut) == losses_of(whole), "dropout draws the same"
    assert verify(tmp_path / "cut" / "checkpoint-3", 3).about["recipe"] == replanned["recipe"]
    again, _ = run_of(tmp_path / "cut", copy_of(model), data, "plain", **more)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    assert recomputes(again.model) == recomputes(cut.model)
    assert losses_of(again) == losses_of(cut)


@pytest.mark.whole
def test_short_memory_leads_to_the_next_recipe_at_a_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(range(99))
    monkeypatch.setattr(step_logger, "retries_of", lambda device: next(counts))
    causes = follows(monkeypatch, "every_layer")
    model, data = model_of("bert"), classified(24)
    trainer, told = run_of(tmp_path, model, data, "plain", max_steps=12)
    trainer.train()
    assert causes == ["allocation retries"] * 2, "after 3 and 6 steps, and then no more"
    (replanned,) = [event for event in told if event["event"] == "replanned"]
    assert (replanned["step"], replanned["recipe"]) == (4, "every_layer")
    assert recomputes(trainer.model)
    assert len([event for event in told if "no other recipe to try" in event.get("text", "")]) == 1
    assert [event["step"] for event in told if event["event"] == "step"] == list(range(1, 13))


@pytest.mark.parametrize(
    ("following", "suits"),
    [
        ("every_layer + micro_batches(2)", True), ("micro_batches(4)", True), ("every_layer", False),
        ("bf16 + micro_batches(4)", False), ("micro_batches(4) + adamw_8bit", False),
        ("eager + micro_batches(4)", False), ("micro_batches(4) + tf32", False),
    ],
)  # fmt: skip
def test_what_a_live_model_can_go_on_under(following: str, suits: bool) -> None:
    assert suits_live_model(Recipe.parse(following), Recipe.parse("micro_batches(2)")) is suits


def test_single_samples_are_the_end(tmp_path: Path) -> None:
    trainer, _ = run_of(tmp_path, limited(model_of("bert"), 0), classified(22), "plain")
    with pytest.raises(OutOfMemory, match="There is no other recipe to try"):
        trainer.train()


def test_an_update_that_breaks_names_what_needs_less(tmp_path: Path) -> None:
    trainer, _ = run_of(tmp_path, model_of("bert"), classified(22), "plain")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    made = trainer.create_optimizer()
    made.register_step_pre_hook(full)
    with pytest.raises(OutOfMemory, match=r"cannot be repeated. Resume .* 'micro_batches\(2\)'"):
        trainer.train()
