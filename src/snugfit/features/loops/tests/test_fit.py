"""`snugfit.fit` applies each technique of a recipe to a user's trainer or refuses it by name, and keeps the
batch.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fitted import classified, losses_of, model_of, quiet, spoken, trainer_of
from snugfit import fit
from snugfit.errors import RecipeError, UsageError


def test_the_same_trainer_comes_back_and_keeps_its_class(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):
        """A trainer class of the user's own."""

    trainer = trainer_of(tmp_path, model_of("bert"), classified(), kind=Mine)
    assert fit(trainer, "plain", watch=quiet) is trainer
    assert isinstance(trainer, Mine)
    assert type(trainer).__name__ == "Mine"
    kind = type(trainer)
    assert type(fit(trainer, "every_layer", watch=quiet)) is kind, "fitted again, and still one class more"


def test_micro_batches_keep_the_global_batch(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("bert"), classified(), micro=(2, 4))
    told: list[str] = []
    fit(trainer, "micro_batches(2)", watch=lambda event: told.append(event["text"]))
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    assert "per_device_train_batch_size was 2 and is now 4" in told
    fit(trainer, "plain", watch=quiet)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 1)


@pytest.mark.whole
def test_a_recipe_is_done_to_the_model_and_its_arguments(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("bert"), classified(), bf16=False)
    fit(trainer, "bf16 + eager + every_layer + workers(2) + sgd(momentum=0.5)", watch=quiet)
    args = trainer.args
    assert args.bf16
    assert trainer.accelerator.mixed_precision == "bf16"
    assert trainer.model.config._attn_implementation == "eager"
    assert args.dataloader_num_workers == 2
    layers = [each for each in trainer.model.modules() if getattr(each, "gradient_checkpointing", False)]
    assert len(layers) >= 2
    args.dataloader_num_workers = 0
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5
    fit(trainer, "plain", watch=quiet)
    assert trainer.accelerator.mixed_precision == "no"
    assert not args.bf16
    assert not any(getattr(each, "gradient_checkpointing", False) for each in trainer.model.modules())


@pytest.mark.whole
def test_adapters_and_pure_bf16(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("llama"), spoken())
    fit(trainer, "bf16_pure + lora(4, targets=q_proj)", watch=quiet)
    trainer.train()
    trained = [name for name, each in trainer.model.named_parameters() if each.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert trainer.model.get_base_model().lm_head.weight.dtype == torch.bfloat16
    assert all(math.isfinite(loss) for loss in losses_of(trainer))


@pytest.mark.whole
def test_the_users_numbers_reach_the_recipes_optimizer(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, model_of("bert"), classified(), adam_beta1=0.8, adam_epsilon=1e-6, weight_decay=0.3
    )
    fit(trainer, "adamw_loop", watch=quiet).train()
    decaying, other = trainer.optimizer.param_groups
    assert decaying["betas"] == (0.8, 0.999)
    assert decaying["eps"] == 1e-6
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.3, 0.0)
    assert decaying["foreach"] is False


@pytest.mark.whole
def test_an_optimizer_of_ones_own_stays_unless_the_recipe_names_one(tmp_path: Path) -> None:
    model = model_of("bert")
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(tmp_path, model, classified(), more={"optimizers": (own, None)})
    with pytest.raises(RecipeError, match="adamw_fused: the trainer has its own optimizer"):
        fit(trainer, "adamw_fused", watch=quiet)
    fit(trainer, "micro_batches(2)", watch=quiet).train()
    assert trainer.optimizer.optimizer is own


def test_what_cannot_be_honoured_is_refused_before_anything_changes(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("bert"), classified(), micro=(2, 2))
    kind = type(trainer)
    for recipe, words in (
        ("micro_batches(3)", "micro_batches"),
        ("fp16", "float16 gradients on the CPU"),
        ("bf16 + nonsense", "nonsense"),
    ):
        with pytest.raises(RecipeError, match=words):
            fit(trainer, recipe, watch=quiet)
    assert trainer.args.per_device_train_batch_size == 2
    assert type(trainer) is kind
    with pytest.raises(UsageError, match=r"needs an instance of transformers\.Trainer"):
        fit(model_of("bert"), "plain")
    trainer.args.auto_find_batch_size = True
    with pytest.raises(UsageError, match="auto_find_batch_size"):
        fit(trainer, "plain")


@pytest.mark.parametrize("optim", ["grokadamw", "schedule_free_adamw", "adamw_anyprecision", "lion_8bit"])
def test_an_optim_whose_package_is_missing_is_refused_before_data_is_read(
    optim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    class Data(torch.utils.data.Dataset[Any]):
        """A dataset that records each sample that is read."""

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return classified()[index]

    from transformers import trainer_optimizer

    for name in ("bitsandbytes", "schedulefree"):
        monkeypatch.setattr(trainer_optimizer, f"is_{name}_available", lambda *_: False)
    for package in ("grokadamw", "torchdistx.optimizers"):
        monkeypatch.setitem(sys.modules, package, None)
    trainer = trainer_of(tmp_path, model_of("bert"), Data(), optim=optim)
    with pytest.raises(UsageError, match=rf"optim is '{optim}'.*nstall .*choose another optim") as refused:
        fit(trainer, watch=quiet)
    assert "\n" not in str(refused.value)
    assert not read
    fit(trainer, "sgd", watch=quiet)
    assert read, "a recipe's optimizer replaces it"


def test_fitting_draws_no_random_number(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("bert"), classified(), train_sampling_strategy="random")
    before = torch.get_rng_state()
    fit(trainer, "micro_batches(2)", watch=quiet)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.whole
def test_an_evaluation_is_left_as_it_is(tmp_path: Path) -> None:
    def evaluated(recipe: str | None) -> dict[str, Any]:
        trainer = trainer_of(
            tmp_path, model_of("bert"), classified(), more={"eval_dataset": classified(8)},
            eval_strategy="steps", eval_steps=4,
        )  # fmt: skip
        if recipe:
            fit(trainer, recipe, watch=quiet)
        trainer.train()
        return next(line for line in trainer.state.log_history if "eval_loss" in line)

    assert evaluated("plain")["eval_loss"] == pytest.approx(evaluated(None)["eval_loss"], abs=1e-6)


def test_what_the_users_trainer_holds_stays_the_same_object(tmp_path: Path) -> None:
    """fit runs the user's loss once, drops all that this call collects, and replaces no object by a copy."""

    class Collects(transformers.Trainer):
        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            self.seen["losses"].append(1)  # type: ignore[attr-defined]
            return super().compute_loss(*arguments, **more)

    trainer = trainer_of(tmp_path, model_of("bert"), classified(8), kind=Collects)
    teacher, seen = model_of("bert"), defaultdict(list, {"losses": [0]})
    trainer.teachers, trainer.seen = [teacher], seen
    fit(trainer, "micro_batches(2)", watch=quiet)
    assert trainer.teachers[0] is teacher
    assert trainer.seen is seen
    assert seen == {"losses": [0]}
    assert seen["others"] == []
