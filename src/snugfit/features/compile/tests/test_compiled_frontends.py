"""Compiled layers and models in every front-end: the user's Trainer, a hand-written loop, a changed recipe.

torch traces here and runs the traced graph uncompiled. So losses equal those of the eager layers, bit for
bit. The trace of the layers shows that they would be compiled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fitted import (
    assert_same_run,
    classified,
    copy_of,
    fitted,
    losses_of,
    model_of,
    quiet,
    trained,
    trainer_of,
)
from small_models import small_job
from snugfit import accelerate
from snugfit.errors import UsageError
from snugfit.features.compile.compiling import run_as_written
from snugfit.features.loops.trainer.job import job_of
from snugfit.features.loops.trainer.setup import apply
from snugfit.step.build import build_model
from snugfit.step.plain_loop import PlainStep
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from test_accelerate import go, loader_of
from tiers import slow_but

pytestmark = pytest.mark.whole


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the requirement of a compiler, because no test here compiles."""
    from snugfit.techniques import roster

    for kind in roster.techniques():
        if kind.name in ("compiled", "budget"):
            monkeypatch.setattr(kind, "needs", ())


WITH_THE_TRAINER = [
    "compiled + every_layer", "compiled(what=model)", "compiled", "compiled + budget(0.5)",
    "compiled(mode=max-autotune-no-cudagraphs)", "compiled(what=model, mode=reduce-overhead)",
]  # fmt: skip


@pytest.mark.parametrize("recipe", slow_but(WITH_THE_TRAINER, 1))
def test_a_trainer_trains_with_them(recipe: str, tmp_path: Path, traced_only: list[str]) -> None:
    """A compiled model and a budget are tested in other loops below."""
    model = model_of("bert")
    plain = trainer_of(tmp_path / "plain", copy_of(model), classified(12))
    fitted(plain, "plain").train()
    assert not traced_only
    trainer = trainer_of(tmp_path / "compiled", copy_of(model), classified(12))
    fitted(trainer, recipe).train()
    assert traced_only
    assert losses_of(trainer) == losses_of(plain)


@pytest.mark.parametrize("recipe", slow_but(["compiled + budget(0.5)", "compiled(what=model)"], 1))
def test_a_loop_of_ones_own_trains_with_them(recipe: str, traced_only: list[str]) -> None:
    model = model_of("bert")
    seen = []
    for each in ("plain", recipe):
        copy = copy_of(model).train()
        optimizer = torch.optim.AdamW(copy.parameters(), lr=1e-3)
        run = accelerate(copy, optimizer, loader_of(classified(12), shuffle=False), each, watch=quiet)
        seen.append(go(run, epochs=1))
    assert traced_only
    assert seen[0] == seen[1]


def test_another_recipe_finds_the_layers_as_they_were_written(tmp_path: Path, traced_only: list[str]) -> None:
    """Checkpointing wraps the compiled layers; both wrappers are removed."""
    trainer = trainer_of(tmp_path, model_of("bert"), classified(8))
    layer = trainer.model.bert.encoder.layer[0]
    job = job_of(trainer)
    apply(trainer, job, Recipe.parse("compiled + every_layer"))
    assert "forward" in vars(layer)
    apply(trainer, job, Recipe.parse("plain"))
    assert "forward" not in vars(layer)
    run_as_written(trainer.model)


def test_a_trainer_that_compiles_the_whole_model_is_told_of_the_recipe(tmp_path: Path) -> None:
    trainer: Any = trainer_of(tmp_path, model_of("bert"), classified(8))
    trainer.args.torch_compile = True
    with pytest.raises(UsageError, match=r"torch_compile.*compiled\(what=model"):
        fitted(trainer, "plain")


BACKENDS = [
    "compiled(backend=eager)",
    "compiled(backend=aot_eager)",
    "compiled(what=model, backend=aot_eager)",
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BACKENDS)
def test_backends_that_compile_nothing_train_in_the_trainer_and_go_on(recipe: str, tmp_path: Path) -> None:
    """With torch's debugging backends, a run resumed from a checkpoint ends with the same weights bit for
    bit.
    """

    def run_of(folder: str) -> Any:
        keeps = {"save_strategy": "steps", "save_steps": 2}
        return fitted(trainer_of(tmp_path / folder, copy_of(model), classified(16), **keeps), recipe)

    model = model_of("bert")
    plain = trainer_of(tmp_path / "plain", copy_of(model), classified(16))
    fitted(plain, "plain").train()
    whole = trained(run_of("whole"))
    assert losses_of(whole) == pytest.approx(losses_of(plain), rel=1e-5)
    again = trained(run_of("whole"), str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_run(again, whole)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BACKENDS)
def test_backends_that_compile_nothing_train_in_other_loops(recipe: str) -> None:
    model, seen = model_of("bert"), []
    for one in ("plain", recipe):
        copy = copy_of(model).train()
        optimizer = torch.optim.AdamW(copy.parameters(), lr=1e-3)
        run = accelerate(copy, optimizer, loader_of(classified(12), shuffle=False), one, watch=quiet)
        seen.append([loss for loss, _ in go(run, epochs=1).values()])
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    job, losses = small_job("bert", 2), []
    for one in ("plain", recipe):
        torch.manual_seed(0)
        step = PlainStep(job, Recipe.parse(one).setup(), torch.device("cpu"), keep_losses=True)
        losses.append(step.run(3, Observer()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_loss_is_copied_out_of_a_graph_that_the_next_step_writes_over(traced_only: list[str]) -> None:
    """The next step reuses the graph's memory. Without recording there is no copy."""
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": torch.zeros(1, dtype=torch.int64)}
    for recipe, copies in (
        ("compiled(what=model, mode=reduce-overhead)", True),
        ("compiled(what=model)", False),
    ):
        model = build_model(small_job("bert", 2), Recipe.parse(recipe).setup(), torch.device("cpu")).train()
        loss = model(**batch).loss
        assert ("Clone" in type(loss.grad_fn).__name__) is copies
    assert traced_only
