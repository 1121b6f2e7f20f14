"""A checkpoint is resumed by its own run. Another run is refused with the name of the difference. `fit` and
`accelerate` compare the settings that define a run, and ignore logging, evaluation, saving and names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fitted import classified, fitted, model_of, padded, quiet, trained, trainer_of
from small_runs import assert_same_weights, rows
from snugfit import accelerate, train
from snugfit.documents import read_document, write_document
from snugfit.errors import UsageError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.training.checkpoint.facts import compare_facts, flatten
from snugfit.training.checkpoint.manifest import MANIFEST, checksum
from snugfit.training.run.run import depends_on_length
from tiers import slow_but

pytestmark = pytest.mark.whole


# ---- fit -------------------------------------------------------------------------------------------------


def trainer_to_fit(folder: Path, **changed: Any) -> Any:
    """Return a run of ten steps with a checkpoint at the fifth. `changed` holds arguments, or data, model,
    recipe, optimizers, evaluation samples or collator."""
    model = changed.pop("model", None) or model_of("bert", dropout=0.1)
    data = changed.pop("data", None) or classified(22)
    recipe = changed.pop("recipe", "micro_batches(2)")
    more = {name: changed.pop(name) for name in ("optimizers", "eval_dataset") if name in changed}
    wanted: dict[str, Any] = {
        "max_steps": 10, "save_strategy": "steps", "save_steps": 5, "seed": 5, "learning_rate": 1e-3,
        "train_sampling_strategy": "random",
    }  # fmt: skip
    collator = changed.pop("data_collator", padded)
    trainer = trainer_of(folder, model, data, more=more, **{**wanted, **changed})
    trainer.data_collator = collator
    return fitted(trainer, recipe)


class Padding:
    """A collator with a setting."""

    def __init__(self, mask: float) -> None:
        self.mask = mask

    def __call__(self, samples: list[Any]) -> Any:
        return padded(samples)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    trainer_to_fit(folder, max_steps=10, data_collator=Padding(0.1)).train()
    return folder


def other(count: int = 22) -> list[dict[str, Any]]:
    """Return different samples of the same number."""
    return [{"input_ids": row["input_ids"], "labels": row["label"]} for row in rows(count, seed=9)]


ANOTHER: list[tuple[dict[str, Any], str]] = [
    ({"learning_rate": 5e-2}, r"learning_rate was 0.001 and is now 0.05"),
    ({"seed": 6}, r"seed was 5 and is now 6"),
    ({"data_seed": 9}, r"data_seed was null and is now 9"),
    ({"data": other()}, r"the dataset has other samples"),
    ({"data": classified(20)}, r"samples was 22 and is now 20"),
    ({"lr_scheduler_type": "cosine"}, r"lr_scheduler_type was 'linear' and is now 'cosine'"),
    ({"max_steps": 12}, r"max_steps was 10 and is now 12"),
    ({"weight_decay": 0.1}, r"weight_decay was 0.0 and is now 0.1"),
    ({"max_grad_norm": 0.5}, r"max_grad_norm was 1.0 and is now 0.5"),
    ({"model": lambda: model_of("bert", dropout=0.3)},
     r"config.hidden_dropout_prob was 0.1 and is now 0.3.*dropout.Dropout.p"),
    ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor was 0.0 and is now 0.1"),
    ({"train_sampling_strategy": "sequential"}, r"_strategy was 'random' and is now 'sequential'"),
    ({"warmup_steps": 3}, r"warmup_steps was 0 and is now 3"),
    ({"per_device_train_batch_size": 8}, r"batch_size was 4 and is now 8"),
    ({"adam_beta1": 0.8}, r"adam_beta1 was 0.9 and is now 0.8"),
    ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha was null and is now 5.0"),
    ({"dataloader_drop_last": True}, r"dataloader_drop_last was false and is now true"),
    ({"recipe": "bf16 + micro_batches(2)"}, r"the recipe's precision was"),
    ({"recipe": "adafactor_torch + micro_batches(2)"}, r"optimizer.class was 'AdamW' and is"),
    ({"recipe": None, "optim": "adagrad"}, r"optim was 'adamw_torch' and is now 'adagrad'"),
    ({"data_collator": Padding(0.3)}, r"data_collator.mask was 0.1 and is now 0.3"),
]  # fmt: skip


TOGETHER = {"learning_rate", "seed", "data_seed", "lr_scheduler_type", "weight_decay", "max_grad_norm"}
TOGETHER |= {"label_smoothing_factor", "warmup_steps", "per_device_train_batch_size", "adam_beta1"}
TOGETHER |= {"neftune_noise_alpha", "dataloader_drop_last", "train_sampling_strategy"}
"""Arguments that `make test` changes together."""


def test_fit_names_all_that_was_changed(kept: Path, tmp_path: Path) -> None:
    together = [(changed, named) for changed, named in ANOTHER if changed.keys() <= TOGETHER]
    made = {name: value for changed, _ in together for name, value in changed.items()}
    assert made.keys() == TOGETHER
    trainer = trainer_to_fit(tmp_path, **{"data_collator": Padding(0.1), **made})
    with pytest.raises(UsageError) as refused:
        trainer.train(resume_from_checkpoint=str(kept / "checkpoint-5"))
    assert [named for _, named in together if not re.search(named, str(refused.value))] == []


@pytest.mark.parametrize(
    ("changed", "named"),
    slow_but(ANOTHER, lambda case: not case[0].keys() & TOGETHER),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fit_refuses_another_run_by_name(
    changed: dict[str, Any], named: str, kept: Path, tmp_path: Path
) -> None:
    made = {name: value() if isinstance(value, type(lambda: 0)) else value for name, value in changed.items()}
    trainer = trainer_to_fit(tmp_path, **{"data_collator": Padding(0.1), **made})
    with pytest.raises(UsageError, match=named) as refused:
        trainer.train(resume_from_checkpoint=str(kept / "checkpoint-5"))
    assert "Undo these changes" in str(refused.value)
    assert trainer.state.global_step in (0, 5)


def test_fit_lets_alone_what_changes_no_step(kept: Path, tmp_path: Path) -> None:
    """A warning adds that other micro-batches are no longer the same bit for bit."""
    changed: dict[str, Any] = {
        "logging_steps": 7, "save_steps": 3, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 4,
        "per_device_eval_batch_size": 2, "run_name": "other", "load_best_model_at_end": False,
        "dataloader_num_workers": 0, "recipe": "every_layer + micro_batches(4)", "report_to": "none",
        "metric_for_best_model": "loss", "eval_dataset": classified(4), "data_collator": Padding(0.1),
    }  # fmt: skip
    shutil.copytree(kept / "checkpoint-5", tmp_path / "checkpoint-5")
    trainer = trained(trainer_to_fit(tmp_path, **changed), True)
    assert trainer.state.global_step == 10
    texts = [event.get("text", "") for event in trainer.told]
    assert any("recipe was 'micro_batches(2)'" in text and "bit for bit" in text for text in texts)


def test_more_steps_go_on_where_the_schedule_does_not_depend_on_them(tmp_path: Path) -> None:
    more: dict[str, Any] = {"lr_scheduler_type": "constant", "save_steps": 1}
    trainer_to_fit(tmp_path, max_steps=2, **more).train()
    longer = trainer_to_fit(tmp_path, max_steps=3, **more)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    whole = trained(trainer_to_fit(tmp_path / "whole", max_steps=3, **more))
    assert_same_weights(longer.model, whole.model)


def test_a_checkpoint_without_settings_is_refused(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "checkpoint-5", tmp_path / "checkpoint-5")
    document = read_document(tmp_path / "checkpoint-5" / MANIFEST)
    del document["sha256"], document["about"]["facts"]
    write_document(tmp_path / "checkpoint-5" / MANIFEST, {**document, "sha256": checksum(document)})
    with pytest.raises(UsageError, match=r"no settings to compare, as a snugfit before 0\.1\.0 wrote it"):
        trainer_to_fit(tmp_path).train(resume_from_checkpoint=True)


def test_optimizers_and_schedules_of_ones_own_are_compared(tmp_path: Path) -> None:
    def made(rate: float, factor: float) -> Any:
        model = model_of("bert", dropout=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor**step)
        return trainer_to_fit(
            tmp_path, model=model, optimizers=(optimizer, schedule), max_steps=2, save_steps=1
        )

    made(0.01, 0.9).train()
    for again, named in (
        (made(0.02, 0.9), r"optimizer.lr was 0.01 and is now 0.02"),
        (made(0.01, 0.8), r"schedule.factor at step 1 was 0.9 and is now 0.8"),
    ):
        with pytest.raises(UsageError, match=named) as refused:
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert str(refused.value).count("factor at step") <= 1
    made(0.01, 0.9).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# ---- accelerate ------------------------------------------------------------------------------------------


def by_hand(
    folder: Path,
    *,
    dropout: float = 0.1,
    data: Any = None,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    lr: float = 0.1,
    recipe: str = "micro_batches(2)",
    clip: float | None = 1.0,
    schedule: Any = None,
    told: list[Any] | None = None,
    **loading: Any,
) -> Any:
    model = model_of("bert", dropout=dropout).train()
    options = {"batch_size": 4, "shuffle": True, "collate_fn": padded, **loading}
    loader: Any = DataLoader(data or classified(22), **options)
    return accelerate(
        model, optimizer(model.parameters(), lr=lr), loader, recipe, output_dir=folder, clip=clip,
        scheduler=schedule, watch=quiet if told is None else told.append,
    )  # fmt: skip


@pytest.fixture(scope="module")
def kept_by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-hand")
    with by_hand(folder) as run:
        run.step(next(iter(run)))
        run.save()
    return folder


def linear(optimizer: Any, length: int = 10) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=length)


ANOTHER_BY_HAND: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.2}, r"learning_rates was \[0.1\] and is now \[0.2\]"),
    ({"data": other()}, r"the dataset has other samples"),
    ({"data": classified(20)}, r"samples was 22 and is now 20"),
    ({"dropout": 0.3}, r"dropout.Dropout.p was"),
    ({"shuffle": False}, r"loader.sampler.class was 'RandomSampler' and is now 'SequentialSampler'"),
    ({"drop_last": True}, r"loader.batch_sampler.drop_last was false and is now true"),
    ({"batch_size": 2}, r"batch_size was 4 and is now 2"),
    ({"clip": 0.5}, r"clip was 1.0 and is now 0.5"),
    ({"optimizer": torch.optim.AdamW}, r"optimizer was 'SGD' and is now 'AdamW'"),
    ({"schedule": linear}, r"schedule.class was 'NoSchedule' and is now 'LinearLR'"),
    ({"recipe": "bf16 + micro_batches(2)"}, r"the recipe's precision was"),
]


BY_HAND_TOGETHER = {"lr", "dropout", "shuffle", "drop_last", "batch_size", "clip"}


def test_accelerate_names_all_that_was_changed(kept_by_hand: Path, tmp_path: Path) -> None:
    shutil.copytree(kept_by_hand / "checkpoint-1", tmp_path / "checkpoint-1")
    together = [(changed, named) for changed, named in ANOTHER_BY_HAND if changed.keys() <= BY_HAND_TOGETHER]
    made = {name: value for changed, _ in together for name, value in changed.items()}
    assert made.keys() == BY_HAND_TOGETHER
    with by_hand(tmp_path, **made) as run, pytest.raises(UsageError) as refused:
        run.resume()
    assert [named for _, named in together if not re.search(named, str(refused.value))] == []


@pytest.mark.parametrize(
    ("changed", "named"),
    slow_but(ANOTHER_BY_HAND, lambda case: not case[0].keys() & BY_HAND_TOGETHER),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_accelerate_refuses_another_run_by_name(
    changed: dict[str, Any], named: str, kept_by_hand: Path, tmp_path: Path
) -> None:
    shutil.copytree(kept_by_hand / "checkpoint-1", tmp_path / "checkpoint-1")
    with by_hand(tmp_path, **changed) as run, pytest.raises(UsageError, match=named):
        run.resume()


def test_accelerate_goes_on_under_finer_pieces(kept_by_hand: Path, tmp_path: Path) -> None:
    shutil.copytree(kept_by_hand / "checkpoint-1", tmp_path / "checkpoint-1")
    told: list[dict[str, Any]] = []
    with by_hand(tmp_path, recipe="every_layer + micro_batches(4)", told=told) as run:
        assert run.resume()
    assert any("bit for bit" in event.get("text", "") for event in told)


# ---- our own loop ----------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.layer = torch.nn.Dropout(dropout), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(self.dropout(x)).mean()}


def test_dropout_of_a_module_of_ones_own_makes_another_run_of_train(tmp_path: Path) -> None:
    samples = [{"x": torch.ones(2)}] * 4

    def trained(dropout: float, steps: int) -> Any:
        example = {"x": torch.ones(2, 2)}
        job = Job(model=Model.from_module(Small(dropout), example), task=Task.CUSTOM, batch_size=2)
        more: dict[str, Any] = {"max_steps": steps, "lr_scheduler_type": "constant"}
        return train(job, "plain", samples, output_dir=tmp_path, **more)

    trained(0.1, 1)
    with pytest.raises(UsageError, match=r"dropout.Dropout.p was '0.1 x 1' and is now '0.5 x 1'"):
        trained(0.5, 2)
    assert trained(0.1, 2).step == 2


@pytest.mark.parametrize(("warmup", "goes_on"), [(3, True), (0.5, False)])
def test_a_warm_up_that_is_a_share_depends_on_the_length(warmup: float, goes_on: bool) -> None:
    assert depends_on_length("constant_with_warmup", warmup) is not goes_on


# ---- facts -----------------------------------------------------------------------------------------------


def test_facts_that_one_side_lacks_are_not_compared_but_dropout_is() -> None:
    def said(before: dict[str, Any], now: dict[str, Any], torch: str = "2") -> list[str]:
        return compare_facts(
            {"facts": before, "versions": {"torch": "2"}}, {"facts": now, "versions": {"torch": torch}}
        )

    assert said({"a": 1}, {"a": 1, "b": 2}) == []
    assert said({"a": 1, "dropout.Dropout.p": "0.1 x 2"}, {"b": 2}, "3") == [
        "dropout.Dropout.p was '0.1 x 2' and is now null"
    ]
    scaled = {"a": 1, "config.rope_scaling.factor": 2.0}
    assert said({"a": 1}, scaled) == ["config.rope_scaling.factor was null and is now 2.0"]
    assert said({"a": 1}, scaled, "3") == []


def test_settings_are_flat_and_what_json_cannot_hold_is_left_out() -> None:
    settings = {"rope": {"theta": 1e4, "_x": 1}, "kinds": {"b", "a"}, "inf": float("inf"), "tensor": object()}
    assert flatten("config", settings) == {
        "config.rope.theta": 1e4, "config.kinds": ["a", "b"], "config.inf": "inf",
    }  # fmt: skip
