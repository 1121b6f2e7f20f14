"""What is compiled, through every front-end: the user's Trainer, a hand-written loop, a changed recipe.

torch traces here and runs what it traced uncompiled, so losses are those of the layers as written, bit for
bit; that the layers were traced shows that they would be compiled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fitted import classified, copy_of, fitted, losses_of, model_of, quiet, trainer_of
from snugfit import accelerate
from snugfit.errors import UsageError
from snugfit.frontends.trainer.job import job_of
from snugfit.frontends.trainer.setup import apply
from snugfit.step.compiling import run_as_written
from snugfit.techniques.recipe import Recipe
from test_accelerate import go, loader_of

pytestmark = pytest.mark.whole


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, so what compiles need not be there."""
    from snugfit.techniques import roster

    for kind in roster.techniques():
        if kind.name in ("compiled", "budget"):
            monkeypatch.setattr(kind, "needs", ())


@pytest.mark.parametrize(
    "recipe", ["compiled", "compiled + every_layer", "compiled + budget(0.5)", "compiled(what=model)"]
)
def test_a_trainer_trains_with_them(recipe: str, tmp_path: Path, traced_only: list[str]) -> None:
    model = model_of("bert")
    plain = trainer_of(tmp_path / "plain", copy_of(model), classified(12))
    fitted(plain, "plain").train()
    assert not traced_only
    trainer = trainer_of(tmp_path / "compiled", copy_of(model), classified(12))
    fitted(trainer, recipe).train()
    assert traced_only
    assert losses_of(trainer) == losses_of(plain)


def test_a_loop_of_ones_own_trains_with_them(traced_only: list[str]) -> None:
    model = model_of("bert")
    seen = []
    for recipe in ("plain", "compiled", "compiled + budget(0.5)", "compiled(what=model)"):
        copy = copy_of(model).train()
        optimizer = torch.optim.AdamW(copy.parameters(), lr=1e-3)
        run = accelerate(copy, optimizer, loader_of(classified(12), shuffle=False), recipe, watch=quiet)
        seen.append(go(run, epochs=1))
    assert traced_only
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_another_recipe_finds_the_layers_as_they_were_written(tmp_path: Path, traced_only: list[str]) -> None:
    """What is recomputed stands around what is compiled; both are taken away."""
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
    with pytest.raises(UsageError, match=r"torch_compile.*compiled\(what=model\)"):
        fitted(trainer, "plain")
