"""TRL's own trainers on preferences under a recipe, by `snugfit.fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_preferences import pairs

from fitted import copy_of, losses_of, model_of, quiet, trained
from small_tokenizers import tokenizer
from snugfit import fit
from tiers import slow_but

pytestmark = pytest.mark.whole

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")


def trainer(kind: str, folder: Path) -> Any:
    """Return TRL's trainer of this kind, for three steps of four pairs."""
    torch.manual_seed(0)
    model = model_of("llama")
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "bf16": False, "max_length": 16, "gradient_checkpointing": False,
    }  # fmt: skip
    given: dict[str, Any] = {"args": getattr(trl, f"{kind}Config")(**arguments)}
    if kind == "DPO":
        given |= {"model": model, "ref_model": copy_of(model)}
    else:
        from transformers import LlamaForSequenceClassification

        config = type(model.config)(**{**model.config.to_dict(), "num_labels": 1})
        given["model"] = LlamaForSequenceClassification(config)
    return getattr(trl, f"{kind}Trainer")(
        train_dataset=datasets.Dataset.from_list(pairs(12)),
        processing_class=tokenizer("gpt2", pad_token="[PAD]"),
        **given,
    )


@pytest.mark.parametrize("kind", slow_but(["DPO", "Reward"], 1))
def test_a_recipe_changes_no_loss_of_trl(kind: str, tmp_path: Path) -> None:
    whole = trained(trainer(kind, tmp_path / "whole"))
    fitted = trained(fit(trainer(kind, tmp_path / "fitted"), "every_layer + micro_batches(2)", watch=quiet))
    assert losses_of(fitted) == pytest.approx(losses_of(whole), rel=1e-4)
