"""A Trainer subclass of another library: TRL's SFTTrainer, which computes its own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import snugfit
from fitted import copy_of, losses_of, model_of, quiet, trained
from small_tokenizers import NUMBERS, tokenizer
from snugfit import fit
from tiers import slow_but

pytestmark = pytest.mark.whole

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

TEXTS = [
    " ".join(NUMBERS[(number * 7 + place) % 10] for place in range(4 + number % 9)) for number in range(24)
]


def tuner(folder: Path, model: Any, *, micro: tuple[int, int] = (4, 1), **arguments: Any) -> Any:
    wanted: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": micro[0],
        "gradient_accumulation_steps": micro[1], "learning_rate": 1e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "max_length": 16, "gradient_checkpointing": False, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**{**wanted, **arguments}),
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer("gpt2", pad_token="[PAD]"),
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama")


@pytest.mark.parametrize(
    "recipe", slow_but(["every_layer + micro_batches(4)", "plain", "micro_batches(2)"], 1)
)
def test_a_recipe_changes_no_loss(recipe: str, model: Any, tmp_path: Path) -> None:
    whole = trained(tuner(tmp_path / "whole", copy_of(model)))
    fitted = trained(fit(tuner(tmp_path / "fitted", copy_of(model)), recipe, watch=quiet))
    assert losses_of(fitted) == pytest.approx(losses_of(whole), rel=1e-4)
    assert type(fitted).__name__ == "SFTTrainer"


@pytest.mark.slow
def test_it_is_resumed(tmp_path: Path) -> None:
    wanted = {"micro": (2, 2), "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    model = model_of("llama")
    whole = trained(fit(tuner(tmp_path / "whole", copy_of(model), **wanted), watch=quiet))
    fit(tuner(tmp_path / "run", copy_of(model), max_steps=3, **wanted), watch=quiet).train()
    again = trained(fit(tuner(tmp_path / "run", copy_of(model), **wanted), watch=quiet), True)
    assert losses_of(again) == losses_of(whole)


def test_the_callback_logs_beside_its_own_metrics(model: Any, tmp_path: Path) -> None:
    trainer = tuner(tmp_path, copy_of(model), max_steps=3)
    trainer.add_callback(snugfit.SnugfitCallback(trainer, gpu="h200"))
    assert losses_of(trained(trainer)) == losses_of(trained(tuner(tmp_path, copy_of(model), max_steps=3)))
    last = trainer.state.log_history[-1]
    assert last["snugfit_predicted_reserved_bytes"] > 0
    assert last["snugfit_measured_step_seconds"] > 0
