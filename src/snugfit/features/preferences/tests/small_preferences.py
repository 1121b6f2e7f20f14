"""Small jobs of tasks on preferences, rows of pairs, and runs on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from small_models import small_job
from small_runs import CPU
from small_tokenizers import NUMBERS
from small_tokenizers import tokenizer as words
from snugfit.frontends.own import options_of
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.dataset import data_of
from snugfit.training.run.run import Data, Run


def preference_job(family: str, task: str, layers: int = 2, **changes: Any) -> Job:
    """Return a job of two pairs on a small model of this family."""
    return replace(small_job(family, layers), task=task, **{"batch_size": 2, **changes})


def pairs(count: int = 20) -> list[dict[str, Any]]:
    """Return rows of a prompt with a chosen and a rejected answer of different lengths."""
    return [
        {"prompt": f"{NUMBERS[number % 10]} ", "chosen": "two " * (1 + number % 3), "rejected": "five six"}
        for number in range(count)
    ]


def data(rows: Any, job: Job, tokenizer: Any = None, **options: Any) -> Data:
    """Return rows as samples of the job with their collate function."""
    given = {"columns": None, "pack": False, "collate": None, **options}
    return data_of(rows, job, tokenizer or words("gpt2"), options=options_of({}), **given)


def preference_run(folder: Path, job: Job, recipe: str = "plain", **options: Any) -> Run:
    """Return a run of six steps on the CPU with an evaluation at its end."""
    wanted = options_of({"max_steps": 6, "eval_strategy": "epoch", **options})
    read = data(answers() if job.task == "kto" else pairs(), job)
    return Run(
        job=job, recipe=Recipe.parse(recipe), options=wanted, data=read, evaluation=read, folder=folder,
        weights=None, device=CPU,
    )  # fmt: skip


def answers(count: int = 20) -> list[dict[str, Any]]:
    """Return rows of a prompt with one answer and its label."""
    return [
        {
            "prompt": f"{NUMBERS[number % 10]} ",
            "completion": "two " * (1 + number % 3),
            "label": number % 2 == 0,
        }
        for number in range(count)
    ]
