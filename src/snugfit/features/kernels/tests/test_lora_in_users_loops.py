"""A user's own peft model trains with the adapter kernels in a Trainer and in a hand-written loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import snugfit
from fitted import losses_of, model_of, padded, quiet, spoken, trainer_of
from tiers import crossed

pytest.importorskip("peft", reason="peft is not installed")


def adapted(*, dora: bool) -> Any:
    """Return peft's model of a small Llama."""
    from peft import LoraConfig, get_peft_model

    model = model_of("llama")
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora)
    return get_peft_model(model, config)


def fitted(folder: Path, model: Any, recipe: str) -> list[float]:
    trainer = trainer_of(folder, model, spoken(), micro=(4, 2), max_steps=3)
    snugfit.fit(trainer, recipe, watch=quiet)
    trainer.train()
    return losses_of(trainer)


def in_own_loop(folder: Path, model: Any, recipe: str) -> list[float]:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    loader = torch.utils.data.DataLoader(spoken(), batch_size=8, collate_fn=padded)
    run = snugfit.accelerate(model, optimizer, loader, recipe, output_dir=folder, watch=quiet)
    return [float(run.step(batch)) for _ in run.epochs(1) for batch in run]


@pytest.mark.whole
@pytest.mark.parametrize(("train", "dora"), crossed([fitted, in_own_loop], [False, True]))
def test_adapter_kernels_run_in_users_loops(train: Any, dora: bool, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", adapted(dora=dora), "plain")
    model = adapted(dora=dora)
    assert train(tmp_path / "fused", model, "fused") == pytest.approx(plain, rel=1e-5)
    mlp = model.get_base_model().model.layers[0].mlp
    replaced = [module for module in mlp.modules() if "forward" in vars(module)]
    assert replaced, "the kernels replace forward passes of adapted layers"
