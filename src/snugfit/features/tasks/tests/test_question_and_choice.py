"""Question answering and multiple choice: batches, rows of datasets, training, and the law of a real step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from small_runs import losses
from small_tokenizers import saved, tokenizer
from snugfit.data.row_sources import read_rows
from snugfit.errors import JobError, UsageError
from snugfit.features.tasks.inputs import QUESTION_INPUTS
from snugfit.features.tasks.reading import read_samples
from snugfit.features.tasks.samples import SequenceSamples
from snugfit.frontends.own import options_of, train
from snugfit.job.batch import label_items, synthetic
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.dataset import data_of
from test_batch import BART, BERT, T5, evaluated, job_of, loss_of
from test_law_rehearsed_equals_real import hold_to_reports
from tiers import crossed

QUESTIONS, CHOICES = Task("question-answering"), Task("multiple-choice")
S = 12

SHAPES: list[tuple[dict[str, Any], Task, dict[str, tuple[int, ...]]]] = [
    (BERT, QUESTIONS, {"input_ids": (3, S), "start_positions": (3,), "end_positions": (3,)}),
    (T5, QUESTIONS, {"input_ids": (3, S), "start_positions": (3,), "end_positions": (3,)}),
    (BART, QUESTIONS, {"input_ids": (3, S), "start_positions": (3,), "end_positions": (3,)}),
    (BERT, CHOICES, {"input_ids": (3, 4, S), "labels": (3,)}),
]


@pytest.mark.parametrize(("config", "task", "shapes"), SHAPES)
def test_a_batch_has_its_shapes_and_pieces_give_its_loss(
    config: dict[str, Any], task: Task, shapes: dict[str, tuple[int, ...]]
) -> None:
    job = job_of(config, task, labels=4)
    batch, model = synthetic(job, 3), evaluated(job)
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    pieces = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    weighed = sum(loss_of(model, piece) * label_items(job, piece) for piece in pieces)
    assert weighed / label_items(job, batch) == pytest.approx(loss_of(model, batch), rel=1e-5)


def test_answers_are_never_in_the_padding() -> None:
    batch = synthetic(job_of(BERT, QUESTIONS, padding=0.75), 64)
    assert batch["end_positions"].max() == 2
    assert (batch["start_positions"] <= batch["end_positions"]).all()
    padded = synthetic(job_of(BERT, CHOICES, padding=0.5), 2)
    assert padded["attention_mask"].sum(-1).tolist() == [[S // 2] * 2] * 2


def test_tokens_of_all_choices_count() -> None:
    assert job_of(BERT, CHOICES, labels=5, batch_size=3).tokens == 3 * 5 * S
    with pytest.raises(JobError, match=r"2 choices or more"):
        synthetic(job_of(BERT, CHOICES, labels=1), 1)


def test_names_of_the_hub_are_accepted() -> None:
    assert job_of(BERT, "QUESTION_ANS").task is QUESTIONS  # type: ignore[arg-type]
    with pytest.raises(JobError, match=r"Tasks: .*question-answering"):
        job_of(BERT, "question")  # type: ignore[arg-type]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("task", "recipe"), crossed([QUESTIONS, CHOICES], ["plain", "micro_batches(2) + every_layer"])
)
def test_a_real_step_allocates_what_its_trace_says(task: Task, recipe: str) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
    wide = {**BERT, **sizes}
    hold_to_reports(job_of(wide, task, batch_size=4, labels=3, padding=0.25), Recipe.parse(recipe))


# ---- rows --------------------------------------------------------------------------------------------------

SQUAD = [
    {
        "question": " one two",
        "context": "three four. five six",
        "answers": {"text": ["five six"], "answer_start": [12]},
    },
    {"question": "one", "context": "three four", "answers": {"text": [], "answer_start": []}},
]
SWAG = {"sent1": "one two", "sent2": "three", **{f"ending{n}": word for n, word in enumerate("usus")}}


def read(source: Any, task: Task, **changes: Any) -> SequenceSamples:
    job = job_of(BERT, task, **{"sequence_length": 16, "labels": 4} | changes)
    return read_samples(read_rows(source), job, tokenizer("bert"), pack=False, label_names=())


def test_answers_of_squad_become_tokens() -> None:
    """[CLS] one two [SEP] three four . five six [SEP]: the answer is tokens 7 and 8."""
    first, second = read(SQUAD, QUESTIONS)
    assert first["input_ids"] == [2, 7, 8, 3, 9, 10, 17, 11, 12, 3]
    assert (first["start_positions"], first["end_positions"]) == (7, 8)
    assert first["token_type_ids"] == [0] * 4 + [1] * 6
    assert (second["start_positions"], second["end_positions"]) == (0, 0)


def test_a_long_context_becomes_windows_of_which_one_has_the_answer() -> None:
    words = "one two three four five six seven eight nine ten"
    rows = [{"question": "u", "context": words, "answer": "nine", "answer_start": words.index("nine")}]
    samples = read(rows, QUESTIONS, sequence_length=9)
    assert len(samples) > 1
    assert all(len(sample["input_ids"]) <= 9 for sample in samples)
    found = [s["input_ids"][s["start_positions"] : s["end_positions"] + 1] for s in samples]
    assert [15] in found
    assert all(ids in ([15], [2]) for ids in found)


def test_a_wrong_answer_names_its_row() -> None:
    wrong = {**SQUAD[0], "answers": {"text": ["five"], "answer_start": [3]}}
    with pytest.raises(UsageError, match="row 2: the answer 'five' does not begin at character 3"):
        read([SQUAD[0], wrong], QUESTIONS)
    with pytest.raises(UsageError, match="longer sequence length"):
        read([{**SQUAD[0], "question": "one " * 20}], QUESTIONS)


def test_choices_of_swag_and_of_lists() -> None:
    (swag,) = read([{**SWAG, "label": 2}], CHOICES)
    assert swag["label"] == 2
    assert swag["input_ids"][1] == [2, 7, 8, 3, 9, 20, 3]
    named = {"question": "one", "choices": {"text": ["u", "s"], "label": ["A", "B"]}, "answerKey": "B"}
    (lettered,) = read([named], CHOICES, labels=2)
    assert lettered["label"] == 1
    assert len(lettered["input_ids"]) == 2
    with pytest.raises(UsageError, match=r"2 choices, but the job has 4 labels. Set labels: 2"):
        read([named], CHOICES)
    with pytest.raises(UsageError, match=r"'answerKey' is 'C', which is not a choice. Allowed are A, B"):
        read([{**named, "answerKey": "C"}], CHOICES, labels=2)


def test_a_batch_is_padded_to_its_longest_sequence() -> None:
    job = job_of(BERT, CHOICES, sequence_length=16)
    rows = [
        {"question": "one", "choices": ["two", "three four"], "label": 0},
        {"question": "one two", "choices": ["three four five", "u"], "label": "1"},
    ]
    data = data_of(
        rows, job, tokenizer("bert"), columns=None, pack=False, collate=None, options=options_of({})
    )
    batch = data.collate([data.samples[0], data.samples[1]])
    assert batch["input_ids"].shape == batch["token_type_ids"].shape == (2, 2, 8)
    assert batch["attention_mask"].sum(-1).tolist() == [[5, 6], [8, 6]]
    assert batch["labels"].tolist() == [0, 1]
    assert torch.isfinite(torch.tensor(loss_of(evaluated(job), batch)))


@pytest.mark.whole
@pytest.mark.parametrize("task", [QUESTIONS, CHOICES])
def test_a_run_from_a_file_is_resumed(task: Task, tmp_path: Path) -> None:
    """A run in two parts has the losses of one that was not stopped."""
    folder = saved(tmp_path / "model", "bert")
    (folder / "config.json").write_text(json.dumps(BERT))
    rows = SQUAD * 3 if task == QUESTIONS else [{**SWAG, "label": number % 4} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Job(model=Model.find(folder), task=task, batch_size=2, sequence_length=16, labels=4)

    def run(out: str, **more: Any) -> Any:
        return train(
            job, "micro_batches(2)", tmp_path / "rows.jsonl", evaluation=tmp_path / "rows.jsonl",
            output_dir=tmp_path / out, weights="random", device="cpu", eval_strategy="epoch",
            num_train_epochs=1, lr_scheduler_type="constant", tokenizer=folder, **more,
        )  # fmt: skip

    whole = run("whole")
    assert whole.step == 3
    assert whole.evaluated.accuracy is not None
    run("parts", max_steps=1)
    run("parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_an_answer_counts_if_both_of_its_ends_are_found() -> None:
    batch = {"start_positions": torch.tensor([1, 1, 0]), "end_positions": torch.tensor([2, 2, 2])}
    starts, ends = (functional.one_hot(torch.tensor(found), 4) for found in ([1, 0, 0], [2, 2, 3]))
    out = SimpleNamespace(start_logits=starts, end_logits=ends)
    assert QUESTION_INPUTS.correct(out, batch).tolist() == [True, False, False]
