"""A plan's text ends with the arguments of a Trainer, and with a command that exports its recipe."""

from __future__ import annotations

import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from snugfit.cli.main import run
from snugfit.features.exchange.account import Reading
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.planning.plan import Plan
from snugfit.report.plan.next_steps import next_steps
from snugfit.report.plan.plan import render
from snugfit.report.text.terminal import as_text
from snugfit.techniques.recipe import Recipe
from test_plan_command import made_up


def test_every_plan_says_what_to_do() -> None:
    plan = made_up()
    best = replace(plan.front[0], recipe="bf16 + micro_batches(4)")
    train, arguments, export = next_steps(replace(plan, best=best))
    words = shlex.split(train.partition(": ")[2])
    assert words[:5] == ["snugfit", "train", "bert-large-uncased", "--task", "sequence-classification"]
    assert Recipe.parse(words[words.index("--recipe") + 1]) == Recipe.parse(best.recipe)
    assert arguments.startswith("In a Trainer: ")
    assert "bf16=True" in arguments
    assert "per_device_train_batch_size=1, " in arguments
    assert "gradient_accumulation_steps=4" in arguments
    assert "--to hf" in export
    large = replace(plan.job, batch_size=16, sequence_length=128)
    assert "--batch-size 16 --sequence-length 128" in next(iter(next_steps(replace(plan, job=large))))
    assert train in " ".join(as_text(render(replace(plan, best=best)), width=500).split("\n"))


def test_what_the_trainer_cannot_say_is_exported_to_torch() -> None:
    plan = made_up()
    assert list(next_steps(replace(plan, best=None))) == []
    _, fitted, script = next_steps(replace(plan, best=replace(plan.front[0], recipe="adamw_loop")))
    assert "snugfit.fit(trainer, 'adamw_loop')" in fitted
    assert "--to torch" in script
    inexpressible = replace(plan.front[0], recipe="segments")
    assert len(list(next_steps(replace(plan, best=inexpressible)))) == 2


@pytest.mark.parametrize("tool", ["trl", "axolotl", "llamafactory"])
def test_the_export_is_for_the_tool_whose_file_the_user_came_with(tool: str) -> None:
    plan, came_with = made_up(), cast(Reading, SimpleNamespace(export=tool, doubts=()))
    model = Model.find("meta-llama/Llama-3.2-1B")
    language = replace(plan, job=Job(model=model, task=Task.CAUSAL_LM, batch_size=4))
    best = replace(plan.front[0], recipe="lora(targets=all-linear) + bf16")
    export = list(next_steps(replace(language, best=best), came_with))[-1]
    assert f"--to {tool}" in export
    assert f"--to {tool}" in as_text(render(replace(language, best=best), configuration=came_with), width=500)
    words = shlex.split(export.partition(": ")[2])
    assert run([*words[1 : words.index("--output")], "--json"]) == 0
    assert "--to hf" in list(next_steps(replace(plan, best=best), came_with))[-1], (
        "it trains language models only"
    )


def test_a_trainer_whose_arguments_cannot_say_the_recipe_is_fitted() -> None:
    job = Job(model=Model.find("gpt2"), task=Task.CAUSAL_LM, batch_size=8)
    best = SimpleNamespace(recipe="bf16 + chunked_loss")
    lines = list(next_steps(cast(Plan, SimpleNamespace(job=job, best=best, timing=None))))
    assert "In a Trainer: snugfit.fit(trainer, 'bf16 + chunked_loss') before trainer.train()" in lines
    assert not [line for line in lines if "snugfit export" in line], "no script has it without snugfit"


def test_arguments_of_a_trainer_are_the_whole_recipe_or_not_said() -> None:
    job = Job(model=Model.find("gpt2"), task=Task.CAUSAL_LM, batch_size=8)
    best = SimpleNamespace(recipe="bf16 + compiled")
    lines = list(next_steps(cast(Plan, SimpleNamespace(job=job, best=best, timing=None))))
    assert "In a Trainer: snugfit.fit(trainer, 'bf16 + compiled') before trainer.train()" in lines
    assert not [line for line in lines if "TrainingArguments" in line]
    assert [line for line in lines if "snugfit export" in line and "--to torch" in line]
