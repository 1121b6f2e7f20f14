"""Training on preferences: rows of pairs, batches, losses, runs that end and are resumed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_preferences import data, pairs, preference_job, preference_run

from small_runs import assert_same_weights, killed_in, losses
from small_tokenizers import tokenizer
from snugfit.errors import JobError, RecipeError, UsageError
from snugfit.features.preferences.losses import (
    LogProbs,
    distillation_loss,
    dpo_loss,
    kto_loss,
    log_probs,
    orpo_loss,
    reward_loss,
    simpo_loss,
)
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.train import train
from tiers import slow_but

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def batch(rows: Any, job: Job | None = None) -> dict[str, torch.Tensor]:
    read = data(rows, job or preference_job("llama", "reward"))
    return read.collate([read.samples[index] for index in range(len(read.samples))])


def test_a_batch_has_both_answers_after_the_prompt() -> None:
    made = batch([{"prompt": "one ", "chosen": "two three", "rejected": "four"}])
    # Tokens from 7 are the numbers, and 6 ends a text.
    assert made["input_ids"].tolist() == [[[7, 8, 9, 6], [7, 10, 6, 2]]]
    assert made["attention_mask"].tolist() == [[[1, 1, 1, 1], [1, 1, 1, 0]]]


def test_labels_are_the_tokens_of_answers() -> None:
    made = batch(
        [{"prompt": "one ", "chosen": "two three", "rejected": "four"}], preference_job("llama", "dpo")
    )
    assert made["labels"].tolist() == [[[-100, 8, 9, 6], [-100, 10, 6, -100]]]


def test_a_second_sequence_of_kto_has_the_next_answer() -> None:
    rows = [
        {"prompt": "one ", "completion": "two", "label": True},
        {"prompt": "three ", "completion": "four", "label": 0},
    ]
    made = batch(rows, preference_job("llama", "kto"))
    assert made["input_ids"].tolist() == [[[7, 8, 6], [7, 10, 6]], [[9, 10, 6], [9, 8, 6]]]
    assert made["desirable"].tolist() == [True, False]


def test_the_common_beginning_is_the_prompt() -> None:
    read = data([{"chosen": "one two three", "rejected": "one two four"}], preference_job("llama", "reward"))
    assert read.samples[0] == {"sequences": [[7, 8, 9, 6], [7, 8, 10, 6]], "prompts": [2, 2]}


def test_messages_are_read_with_the_chat_template() -> None:
    words = tokenizer("gpt2")
    words.chat_template = TEMPLATE
    asked = {"role": "user", "content": "one"}
    rows = [
        {"chosen": [asked, {"role": "assistant", "content": "two"}],
         "rejected": [asked, {"role": "assistant", "content": "five"}]},
        {"prompt": [asked], "chosen": [{"role": "assistant", "content": "two"}],
         "rejected": [{"role": "assistant", "content": "five"}]},
    ]  # fmt: skip
    job = preference_job("llama", "reward")
    for row in rows:
        read = data([row], job, tokenizer=words)
        assert read.samples[0] == {"sequences": [[7, 8], [7, 11]], "prompts": [1, 1]}


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([{"prompt": "one", "answer": "two"}], "which column is the chosen and which the rejected"),
        ([{"prompt": "one " * 20, "chosen": "", "rejected": ""}], "no row has two answers within 16 tokens"),
        ([{"prompt": "one", "chosen": "two", "rejected": 3}], "row 1"),
    ],
)
def test_rows_without_answers_are_one_error(rows: Any, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        data(rows, preference_job("bert", "reward"))


def test_long_answers_are_cut_and_lost_ones_are_left_out() -> None:
    rows = [*pairs(1), {"prompt": "one " * 20, "chosen": "two", "rejected": "three"},
            {"prompt": "one ", "chosen": "two " * 30, "rejected": "three"}]  # fmt: skip
    read = data(rows, preference_job("llama", "reward"))
    assert (len(read.samples), read.samples.left_out, read.samples.cut) == (2, 1, 1)


def test_the_reward_loss_is_that_of_bradley_and_terry() -> None:
    rewards = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
    chances = torch.exp(rewards[:, 0]) / torch.exp(rewards).sum(1)
    torch.testing.assert_close(reward_loss(rewards), -torch.log(chances).mean())


def some_log_probs() -> LogProbs:
    return LogProbs(torch.tensor([[-2.0, -6.0], [-4.0, -3.0]]), torch.tensor([[2, 3], [4, 2]]))


def test_log_probabilities_are_those_of_the_answers_tokens() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[-100, 3, 1, -100], [-100, -100, 0, 4]])
    chances = logits.softmax(-1).log()
    sums, tokens = log_probs(logits, labels)
    expected = torch.stack([chances[0, 0, 3] + chances[0, 1, 1], chances[1, 1, 0] + chances[1, 2, 4]])
    torch.testing.assert_close(sums, expected)
    assert tokens.tolist() == [2, 2]


REFERENCE = torch.tensor([[-3.0, -5.0], [-4.5, -2.0]])
"""Log-probabilities of the reference: the log-ratios are [[1, -1], [0.5, -1]]."""


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("sigmoid", (math.log(1 + math.exp(-0.2)) + math.log(1 + math.exp(-0.15))) / 2),
        ("hinge", (0.8 + 0.85) / 2),
        ("ipo", ((1 / 2 + 1 / 3 - 5) ** 2 + (0.5 / 4 + 1 / 2 - 5) ** 2) / 2),
    ],
)
def test_losses_of_dpo_are_those_of_their_articles(loss_type: str, expected: float) -> None:
    loss, rewards = dpo_loss(some_log_probs(), REFERENCE, {"loss_type": loss_type, "beta": 0.1})
    assert float(loss) == pytest.approx(expected)
    torch.testing.assert_close(rewards, 0.1 * torch.tensor([[1.0, -1.0], [0.5, -1.0]]))


def test_losses_without_a_reference_are_those_of_their_articles() -> None:
    means = [(-1.0, -2.0), (-1.0, -1.5)]

    def odds(mean: float) -> float:
        return math.exp(mean) / (1 - math.exp(mean))

    orpo = [-chosen + 0.1 * math.log(1 + odds(rejected) / odds(chosen)) for chosen, rejected in means]
    assert float(orpo_loss(some_log_probs(), {"beta": 0.1})[0]) == pytest.approx(sum(orpo) / 2)
    simpo = [math.log(1 + math.exp(0.5 - 2 * (chosen - rejected))) for chosen, rejected in means]
    loss, _ = simpo_loss(some_log_probs(), {"beta": 2.0, "gamma": 0.5})
    assert float(loss) == pytest.approx(sum(simpo) / 2)


def test_the_loss_of_kto_is_that_of_its_article() -> None:
    ratios, divergence = torch.tensor([1.0, -2.0]), torch.tensor([3.0, -1.0])
    loss, _ = kto_loss(ratios, divergence, torch.tensor([True, False]), {"beta": 0.5})
    expected = 1 - (1 / (1 + math.exp(0.0)) + 1 / (1 + math.exp(-1.5))) / 2
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize("beta", [0, 0.25, 1])
def test_the_loss_of_a_student_is_that_of_its_article(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 5, generator=generator).log_softmax(-1) for _ in range(2))
    labels = torch.tensor([[-100, 3, 1], [-100, -100, 4]])
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()

    def divergence(chances: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return (chances.exp() * (chances - others)).sum(-1)

    expected = beta * divergence(teacher, mixture) + (1 - beta) * divergence(student, mixture)
    if beta in (0, 1):
        expected = divergence(*((teacher, student) if beta == 0 else (student, teacher)))
    # Any constant may be added to the logits of a position.
    loss = distillation_loss(student + 2, teacher - 1, labels, beta)
    torch.testing.assert_close(loss, expected[labels != -100].mean())


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0, 0.25, 1])
def test_the_loss_of_a_student_is_that_of_trl(beta: float) -> None:
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(2, 3, 5, generator=generator) for _ in range(2)]
    labels = torch.tensor([[-100, 3, 1], [-100, -100, 4]])
    expected = GKDTrainer.generalized_jsd_loss(*logits, labels, beta)
    torch.testing.assert_close(distillation_loss(*logits, labels, beta), expected)


def test_a_job_with_a_teacher_is_read_back() -> None:
    settings = {"teacher": "gpt2-large", "lmbda": 1, "completion_length": 100}
    job = Job(model=Model.find("gpt2"), task="gkd", phase_settings=settings)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    name = "openai-community/gpt2-large"
    assert job.added_task.arguments(job) == [
        "--teacher", name, "--lmbda", "1", "--completion-length", "100",
    ]  # fmt: skip
    with pytest.raises(JobError, match=r"gpt2 has 50,257 tokens, and the teacher .*bert-base-uncased 30,522"):
        replace(job, phase_settings={"teacher": "bert-base-uncased"})
    with pytest.raises(UsageError, match="snugfit train does not support the task distill"):
        data(pairs(), job)


SETTINGS = {
    "dpo-loss": ("dpo", {"loss_type": "sigmoit"}, "Did you mean 'sigmoid'.*hinge, ipo"),
    "beta": ("kto", {"beta": 0}, "beta is 0; allowed are numbers above 0"),
    "other": ("orpo", {"gamma": 1.0}, "orpo has no setting 'gamma'.*Settings: beta"),
    "none": ("reward", {"beta": 0.1}, "reward has no setting 'beta'"),
    "teacher": ("distill", {}, "distill needs a teacher .*--teacher NAME"),
    "share": ("distill", {"lmbda": 1.5}, "lmbda is 1.5; allowed .* from 0 to 1"),
    "length": ("dpo", {"completion_length": 16}, "completion length is 16; .* sequence length 16"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_unusable_settings_are_one_error(case: str) -> None:
    task, settings, error = SETTINGS[case]
    with pytest.raises(JobError, match=error):
        preference_job("llama", task, phase_settings=settings)


def test_the_reference_follows_the_recipe() -> None:
    for recipe, reference in (("plain", "adapter"), ("lora", "copy")):
        job = preference_job("llama", "dpo", phase_settings={"reference": reference})
        with pytest.raises(RecipeError, match="reference"):
            Recipe.parse(recipe).check(job)


def test_micro_batches_of_kto_have_a_warning() -> None:
    warnings = Recipe.parse("micro_batches(2)").check(preference_job("llama", "kto"))
    assert "its divergence is a mean over a micro-batch" in " ".join(warnings)


def test_a_job_of_an_encoder_and_a_decoder_is_refused() -> None:
    with pytest.raises(JobError, match="encoder and a decoder, which the task reward does not support"):
        Job(model=Model.find("facebook/bart-base"), task="reward")


@pytest.mark.parametrize("recipe", ["compiled", "liger", "ddp"])
def test_techniques_that_were_not_tried_are_refused(recipe: str) -> None:
    with pytest.raises(RecipeError, match="the task reward does not support"):
        Recipe.parse(recipe).check(preference_job("llama", "reward"), installed=False)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "task", "recipe"),
    slow_but(
        [
            ("bert", "reward", "lora"),
            ("llama", "dpo", "micro_batches(2)"),
            ("llama", "kto", "every_layer"),
            ("gpt2", "orpo", "plain"),
            ("llama", "reward", "micro_batches(2)"),
            ("gpt2", "dpo", "lora"),
            ("llama", "simpo", "plain"),
        ],
        4,
    ),
)
def test_a_killed_run_ends_as_a_whole_one(family: str, task: str, recipe: str, tmp_path: Path) -> None:
    """A resumed run has the reference with which the whole run began."""
    job = preference_job(family, task, learning_rate=1e-2)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = train(preference_run(tmp_path / "whole", job, recipe, **options))
    assert whole.evaluated is not None
    assert whole.evaluated.loss < losses(tmp_path / "whole")[1][0]
    assert (whole.evaluated.accuracy is None) == (task == "kto")
    assert task == "kto" or whole.evaluated.accuracy > 0.5
    killed_in(preference_run(tmp_path / "killed", job, recipe, **options), 3)
    resumed = train(preference_run(tmp_path / "killed", job, recipe, **options))
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
    assert_same_weights(whole.model, resumed.model)


def test_an_export_of_another_loss_is_refused() -> None:
    exports = pytest.importorskip("snugfit.features.exchange.export")
    with pytest.raises(UsageError, match="task dpo has a loss of its own, which no export writes"):
        exports.export(preference_job("llama", "dpo"), Recipe(), "torch")


@pytest.mark.whole
def test_micro_batches_of_pairs_give_the_same_gradients(tmp_path: Path) -> None:
    first = {}
    for recipe in ("plain", "micro_batches(2)"):
        folder = tmp_path / recipe
        train(preference_run(folder, preference_job("llama", "reward"), recipe, max_steps=1))
        first[recipe] = losses(folder)[1]
    assert first["plain"] == pytest.approx(first["micro_batches(2)"])
