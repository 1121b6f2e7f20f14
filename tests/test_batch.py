"""Synthetic batches: shapes of the guide, accepted by the real models, with labels counted as their losses
do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from snugfit.job.batch import IGNORED, REAL_VALUES, SyntheticDataset, label_items, synthetic
from snugfit.job.build import instantiate
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.batches import SAMPLES, collator, dataset
from snugfit.techniques.setup import Setup

BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "vocab_size": 300,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300}
T5 = {
    "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
    "vocab_size": 300, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 300,
}  # fmt: skip
S, T = 12, 6
CASES: list[tuple[dict[str, Any], Task, dict[str, tuple[int, ...]]]] = [
    (BERT, Task.SEQUENCE_CLASSIFICATION, {"input_ids": (3, S), "labels": (3,)}),
    (GPT2, Task.SEQUENCE_CLASSIFICATION, {"input_ids": (3, S), "labels": (3,)}),
    (BART, Task.SEQUENCE_CLASSIFICATION, {"input_ids": (3, S), "labels": (3,)}),
    (BERT, Task.TOKEN_CLASSIFICATION, {"input_ids": (3, S), "labels": (3, S)}),
    (GPT2, Task.CAUSAL_LM, {"input_ids": (3, S), "labels": (3, S)}),
    (BERT, Task.MASKED_LM, {"input_ids": (3, S), "labels": (3, S)}),
    (T5, Task.SEQ2SEQ_LM, {"input_ids": (3, S), "labels": (3, T)}),
]
IDS = [f"{config['model_type']}-{task}" for config, task, _ in CASES]


def job_of(config: dict[str, Any], task: Task, **settings: Any) -> Job:
    model = Model.from_config(config, name=config["model_type"])
    return Job(model=model, task=task, **{"sequence_length": S, "target_length": T} | settings)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(model(**batch).loss)


def evaluated(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return instantiate(job, dtype="float32", attention="sdpa").eval()


@pytest.mark.parametrize(("config", "task", "shapes"), CASES, ids=IDS)
def test_each_task_has_its_shapes_and_the_model_takes_them(
    config: dict[str, Any], task: Task, shapes: dict[str, tuple[int, ...]]
) -> None:
    job = job_of(config, task)
    batch = synthetic(job, 3)
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    for name, value in batch.items():
        assert value.dtype is torch.int64, name
        assert value.device.type == "cpu"
    assert torch.isfinite(torch.tensor(loss_of(evaluated(job), batch)))


@pytest.mark.parametrize(("config", "task"), [case[:2] for case in CASES])
def test_padding_is_the_last_part_of_each_sequence(config: dict[str, Any], task: Task) -> None:
    job = job_of(config, task, padding=0.25)
    batch = synthetic(job, 3)
    assert batch["attention_mask"].sum(1).tolist() == [S - 3] * 3
    assert (batch["attention_mask"][:, : S - 3] == 1).all()
    pad = job.transformers_config().get_text_config().pad_token_id or 0
    assert (batch["input_ids"][:, S - 3 :] == pad).all()
    if batch["labels"].dim() == 2:
        length = batch["labels"].shape[1]
        padded = round(0.25 * length)
        assert (batch["labels"] == IGNORED).sum(1).tolist() == [padded] * 3
        assert (batch["labels"][:, length - padded :] == IGNORED).all()
    assert torch.isfinite(torch.tensor(loss_of(evaluated(job), batch)))


@pytest.mark.parametrize(("config", "task", "shapes"), CASES, ids=IDS)
def test_micro_batches_weighed_by_label_items_give_the_whole_loss(
    config: dict[str, Any], task: Task, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Also if the micro-batches hold different numbers of counted labels."""
    job = job_of(config, task)
    model, batch = evaluated(job), synthetic(job, 3)
    if batch["labels"].dim() == 2:
        batch["labels"][0, 2:] = IGNORED
        batch["labels"][1, 0] = IGNORED
    pieces = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    items = [label_items(job, piece) for piece in pieces]
    assert sum(items) == label_items(job, batch)
    weighed = sum(loss_of(model, piece) * count for piece, count in zip(pieces, items, strict=True))
    assert weighed / sum(items) == pytest.approx(loss_of(model, batch), rel=1e-5)


def test_the_guide_s_ids_lie_between_100_and_30000() -> None:
    job = Job(model=Model.find("bert-large-uncased"), task=Task.SEQUENCE_CLASSIFICATION)
    batch = synthetic(job, 64)
    assert batch["input_ids"].shape == (64, 512)
    assert batch["input_ids"].min() >= 100
    assert 29_000 < batch["input_ids"].max() < 30_000
    assert set(batch["labels"].tolist()) == {0, 1}


@pytest.mark.parametrize("vocabulary", [1, 2, 100, 101, 300])
def test_small_vocabularies_hold_every_id(vocabulary: int) -> None:
    ids = synthetic(job_of(BERT | {"vocab_size": vocabulary}, Task.MASKED_LM), 8)["input_ids"]
    assert 0 <= ids.min() <= ids.max() < vocabulary


def test_labels_of_decoders_are_a_tensor_of_their_own() -> None:
    batch = synthetic(job_of(GPT2, Task.CAUSAL_LM), 2)
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


def test_one_label_is_a_regression() -> None:
    job = job_of(BERT, Task.SEQUENCE_CLASSIFICATION, labels=1)
    batch = synthetic(job, 3)
    assert batch["labels"].dtype is torch.float32
    evaluated(job)(**batch).loss.backward()


def test_batches_are_made_on_the_cpu_and_follow_the_seed() -> None:
    job = job_of(BERT, Task.MASKED_LM)
    with torch.device("meta"):
        batch = synthetic(job, 2, seed=1)
    assert batch["input_ids"].device.type == "cpu"
    assert torch.equal(batch["input_ids"], synthetic(job, 2, seed=1)["input_ids"])
    assert not torch.equal(batch["input_ids"], synthetic(job, 2, seed=2)["input_ids"])


def test_a_model_without_a_vocabulary_takes_characters() -> None:
    ids = synthetic(job_of({"model_type": "canine"}, Task.SEQUENCE_CLASSIFICATION), 2)["input_ids"]
    assert 100 <= ids.min() <= ids.max() < 30_000


@pytest.mark.parametrize(("config", "task", "shapes"), CASES, ids=IDS)
def test_the_dataset_collates_to_the_same_batches(
    config: dict[str, Any], task: Task, shapes: dict[str, tuple[int, ...]]
) -> None:
    from torch.utils.data import DataLoader

    dataset = SyntheticDataset(job_of(config, task), 7)
    batches = list(DataLoader(dataset, batch_size=3))  # type: ignore[arg-type]
    assert [len(batch["labels"]) for batch in batches] == [3, 3, 1]
    assert {name: tuple(value.shape) for name, value in batches[0].items()} == shapes
    first = batches[0]["input_ids"]
    assert not torch.equal(first[0], first[1])


def test_the_dataset_ends_and_repeats_itself() -> None:
    dataset = SyntheticDataset(job_of(BERT, Task.MASKED_LM), 4)
    assert len(list(dataset)) == len(dataset) == 4
    assert torch.equal(dataset[2]["input_ids"], dataset[2]["input_ids"])
    with pytest.raises(IndexError):
        dataset[4]


class Scorer(nn.Module):
    def forward(self, rows: torch.Tensor, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        return {"loss": (rows * weight).mean()}


def test_an_example_batch_is_repeated_row_by_row() -> None:
    example = {"rows": torch.tensor([[1.0], [2.0]]), "weight": torch.tensor(3.0), "name": "as it is"}
    job = Job(model=Model.from_module(Scorer(), example), task=Task.CUSTOM)
    batch = synthetic(job, 5)
    assert batch["rows"].flatten().tolist() == [1, 2, 1, 2, 1]
    assert batch["weight"] == 3
    assert batch["name"] == "as it is"
    assert label_items(job, batch) == 5
    assert SyntheticDataset(job, 3)[1]["rows"].tolist() == [[2.0]], "a batch of one"


def test_a_simulated_batch_repeats_its_real_samples() -> None:
    job = job_of(BERT, Task.SEQUENCE_CLASSIFICATION)
    samples = dataset(replace(job, batch_size=SAMPLES + 3), Setup(), torch.device("meta"))
    batch = collator(job, torch.device("meta"))([samples[index] for index in range(SAMPLES + 3)])
    real = getattr(batch["input_ids"], REAL_VALUES)()
    assert real.shape == batch["input_ids"].shape
    assert torch.equal(real[SAMPLES:], real[:3])
    assert not torch.equal(real[0], real[1])
