"""Live trainers for tests of `snugfit.fit`: small models on the CPU, with data of their own."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

import snugfit
from small_models import small_job
from small_runs import Killed, assert_same_weights, rows
from snugfit.job.batch import IGNORED
from snugfit.job.build import instantiate

Batch = dict[str, torch.Tensor]


def model_of(family: str, *, layers: int = 2, dropout: float = 0.0, seed: int = 0) -> Any:
    """Return a model of so many layers with random weights."""
    torch.manual_seed(seed)
    job = small_job(family, layers, dropping(family, dropout))
    return instantiate(job, dtype="float32", attention="sdpa")


def dropping(family: str, dropout: float = 0.0) -> dict[str, float]:
    """Return a family's config keys for dropout, at this rate."""
    names = {
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    }
    return dict.fromkeys(names.get(family, ()), dropout)


def classified(count: int = 24) -> list[dict[str, Any]]:
    """Return samples of uneven length in two classes."""
    return [{"input_ids": row["input_ids"], "labels": row["label"]} for row in rows(count)]


def spoken(count: int = 24) -> list[dict[str, Any]]:
    """Return samples of uneven length with a label per token, some of them masked unevenly."""
    made = []
    for index, row in enumerate(rows(count)):
        ids = row["input_ids"]
        labels = [IGNORED if place < index % 4 else token for place, token in enumerate(ids)]
        made.append({"input_ids": ids, "labels": labels})
    return made


def padded(samples: list[dict[str, Any]]) -> Batch:
    """Return samples as one batch, padded to its longest."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def filled(values: list[int], with_: int) -> list[int]:
        return [*values, *[with_] * (longest - len(values))]

    labels = [sample["labels"] for sample in samples]
    per_token = isinstance(labels[0], list)
    return {
        "input_ids": torch.tensor([filled(sample["input_ids"], 0) for sample in samples]),
        "attention_mask": torch.tensor([filled([1] * len(sample["input_ids"]), 0) for sample in samples]),
        "labels": torch.tensor([filled(each, IGNORED) for each in labels] if per_token else labels),
    }


def trainer_of(
    folder: Path,
    model: Any,
    data: Any,
    *,
    kind: type[Any] = transformers.Trainer,
    micro: tuple[int, int] = (4, 1),
    more: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Return a trainer over `data` in its given order that logs every step; `more` are arguments of its
    class."""
    wanted: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": micro[0],
        "gradient_accumulation_steps": micro[1], "learning_rate": 1e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "train_sampling_strategy": "sequential", "remove_unused_columns": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**wanted, **arguments})
    made = kind(model=model, args=args, train_dataset=data, data_collator=padded, **(more or {}))
    made.remove_callback(transformers.PrinterCallback)
    return made


def fitted(trainer: Any, recipe: Any) -> Any:
    """Return the trainer under a recipe; its events are collected in `trainer.told`."""
    trainer.told = []
    return snugfit.fit(trainer, recipe, watch=trainer.told.append)


def trained(trainer: Any, resume: Any = None) -> Any:
    """Return the trainer after training; `resume` starts from its last checkpoint or a named one. The prior
    state of the process's generators makes no difference."""
    if resume:
        for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
            set_seed(99)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def killed(trainer: Any, resume: Any = None) -> None:
    """Train until an error kills the run."""
    with pytest.raises(Killed):
        trainer.train(resume_from_checkpoint=resume)


def assert_same_run(one: Any, other: Any) -> None:
    """Assert that two trainers have logged the same losses and have the same weights."""
    assert losses_of(one) == losses_of(other)
    assert_same_weights(one.model, other.model)


def losses_of(trainer: Any) -> list[float]:
    """Return the logged loss of each step."""
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def log_of(trainer: Any) -> list[dict[str, Any]]:
    """Return the log without entries that depend on the clock."""
    timed = ("runtime", "per_second", "train_loss", "total_flos")
    return [
        {name: value for name, value in line.items() if not any(part in name for part in timed)}
        for line in trainer.state.log_history
    ]


def copy_of(model: Any) -> Any:
    return copy.deepcopy(model)


def quiet(event: dict[str, Any]) -> None:
    """Ignore the given event."""
