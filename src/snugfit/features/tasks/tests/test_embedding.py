"""Embeddings of pairs of texts: batches, the loss, rows of datasets, training, and the law of a real step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from small_runs import losses
from small_tokenizers import saved
from snugfit.errors import UsageError
from snugfit.features.tasks.contrast import SCALE
from snugfit.features.tasks.inputs import EMBEDDING_INPUTS
from snugfit.frontends.own import options_of, train
from snugfit.job.batch import label_items, synthetic
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.job.sample_mixing import mixing_of
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import ALL_REDUCE, BROADCAST, COLLECTIVES
from snugfit.step.build import build_model
from snugfit.techniques.batching.micro_batches import MicroBatches
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.training.run.dataset import data_of
from test_batch import BERT, T5, evaluated, job_of
from test_law_rehearsed_equals_real import hold_to_reports

TASK, S = Task("text-embedding"), 12


@pytest.mark.parametrize("config", [BERT, T5])
@pytest.mark.parametrize("padding", [0.0, 0.5])
def test_the_loss_ranks_the_partner_of_each_text(config: dict[str, Any], padding: float) -> None:
    """It equals the cross-entropy of cosine similarities, computed text by text."""
    job = job_of(config, TASK, padding=padding)
    batch, encoder = synthetic(job, 3), evaluated(job)
    model: Any = job.added_task.finish(job, None, evaluated(job), lambda: None)
    assert batch["input_ids"].shape == (3, 2, S)
    assert label_items(job, batch) == 3
    length = round((1 - padding) * S)
    with torch.no_grad():
        means = [
            [encoder(input_ids=ids[None, :length])[0].mean(1)[0] for ids in pair]
            for pair in batch["input_ids"]
        ]
        found = model(**batch)
    scores = torch.stack(
        [
            torch.stack([functional.cosine_similarity(first[0], other[1], dim=0) for other in means])
            for first in means
        ]
    )
    torch.testing.assert_close(found["logits"], scores * SCALE, rtol=1e-4, atol=1e-4)
    right = scores.argmax(1) == torch.arange(3)
    assert EMBEDDING_INPUTS.correct(found, batch).tolist() == right.tolist()
    assert float(found["loss"]) == pytest.approx(
        float(functional.cross_entropy(scores * SCALE, torch.arange(3))), rel=1e-4
    )


def test_a_batch_in_pieces_has_other_wrong_answers() -> None:
    job = job_of(BERT, TASK)
    assert "compared with the partners of all texts" in mixing_of(job).reason
    assert "would train differently" in MicroBatches.planning_objection(job)
    assert job.tokens == 4 * 2 * S


@pytest.mark.whole
def test_several_gpus_compare_the_pairs_of_their_own_batches() -> None:
    """The weights of BERT's pooler have no gradient, for which DDP would wait."""
    job = job_of(BERT, TASK)
    trace = rehearse(job, on_gpus(Recipe.parse("ddp").setup(), 2), CudaPolicy())
    exchanged = {kernel.operator for kernel in trace.kernels} & COLLECTIVES
    assert exchanged == {ALL_REDUCE, BROADCAST}
    model = build_model(job, Recipe().setup(), torch.device("meta"))
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {"pooler.dense.weight", "pooler.dense.bias"}


def test_names_of_the_hub_and_of_checkpoints() -> None:
    assert job_of(BERT, "sentence-similarity").task is TASK  # type: ignore[arg-type]
    assert Model.from_config({**BERT, "architectures": ["BertModel"]}, name="e5").task == TASK


@pytest.mark.whole
@pytest.mark.parametrize(("config", "recipe"), [(BERT, "every_layer"), (T5, "plain")])
def test_a_real_step_allocates_what_its_trace_says(config: dict[str, Any], recipe: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if config is T5:
        sizes = {"d_model": 128, "d_kv": 32, "num_layers": 2, "num_heads": 4}
    hold_to_reports(job_of({**config, **sizes}, TASK, batch_size=4, padding=0.25), Recipe.parse(recipe))


PAIRS = [
    {"anchor": "one two", "positive": "three"},
    {"anchor": "four", "positive": "five six seven"},
    {"anchor": "eight", "positive": "nine"},
    {"anchor": "ten one", "positive": "two"},
]


def embedding_job(folder: Path) -> Job:
    return Job(model=Model.find(folder), task=TASK, batch_size=2, sequence_length=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = saved(tmp_path_factory.mktemp("bert"), "bert")
    (at / "config.json").write_text(json.dumps(BERT))
    return at


def test_pairs_are_padded_to_one_length(folder: Path) -> None:
    data = data_of(
        PAIRS, embedding_job(folder), folder, columns=None, pack=False, collate=None, options=options_of({})
    )
    batch = data.collate([data.samples[0], data.samples[1]])
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert batch["attention_mask"].sum(-1).tolist() == [[4, 3], [3, 5]]


@pytest.mark.whole
def test_a_run_from_a_file_is_resumed_and_saves_the_encoder(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))

    def run(out: str, **more: Any) -> Any:
        return train(
            embedding_job(folder), "plain", source, evaluation=source, output_dir=tmp_path / out,
            weights="random", device="cpu", eval_strategy="epoch", num_train_epochs=1,
            lr_scheduler_type="constant", tokenizer=folder, **more,
        )  # fmt: skip

    assert run("whole").step == 2
    run("parts", max_steps=1)
    run("parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole")


@pytest.mark.parametrize(("target", "remedy"), [("hf", "Use snugfit train"), ("torch", "Use snugfit train")])
def test_an_export_of_the_loss_is_refused(target: str, remedy: str) -> None:
    from snugfit.features.exchange.export import check_target

    with pytest.raises(UsageError, match=f"its loss needs other code. {remedy}"):
        check_target(job_of(BERT, TASK), target)


def test_the_loss_is_around_the_adapters() -> None:
    job = job_of(BERT, TASK)
    recipe = Recipe.parse("lora(r=2)")
    model = build_model(job, recipe.setup(), torch.device("cpu"))
    loss = model(**synthetic(job, 3))["loss"]
    loss.backward()
    trained = [name for name, weight in model.named_parameters() if weight.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)
