"""A folder of weights is complete except for a new head, or the error names its missing weights."""

from __future__ import annotations

import json
import logging
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clean_forks import forks_of
from fitted import model_of
from small_models import small_job
from small_runs import events, small_run
from snugfit import train as train_on
from snugfit.errors import ModelError
from snugfit.frontends import own
from snugfit.job.build import instantiate
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.job.weights import LoadedWeights, find_weights
from snugfit.training.run.train import train


def folder_without(folder: Path, family: str, *parts: str, **added: torch.Tensor) -> Path:
    """Save a model of two layers without the tensors whose names contain one of these parts."""
    model_of(family).save_pretrained(folder)
    file = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if not any(p in name for p in parts)}
    save_file({**kept, **added}, file, metadata={"format": "pt"})
    return folder


def loaded_from(folder: Path, family: str, **changes: Any) -> LoadedWeights:
    heard: list[LoadedWeights] = []
    job = small_job(family, 2, **changes)
    instantiate(job, dtype="float32", attention="sdpa", weights=folder, on_loaded=heard.append)
    return heard[0]


@pytest.mark.parametrize(
    ("family", "parts", "new"),
    [
        ("bert", ("classifier",), ["classifier.bias", "classifier.weight"]),
        ("bert", ("classifier", "pooler"), ["bert.pooler.dense.bias", "classifier.weight"]),
        ("llama", ("lm_head",), ["lm_head.weight"]),
        ("vit", ("classifier",), ["classifier.weight"]),
        ("modernbert", ("head.", "decoder.bias"), ["decoder.bias", "head.dense.weight"]),
        ("gpt2", ("nothing",), []),
    ],
)
def test_a_new_head_is_named(family: str, parts: tuple[str, ...], new: list[str], tmp_path: Path) -> None:
    loaded = loaded_from(folder_without(tmp_path, family, *parts), family)
    assert set(new) <= set(loaded.new)
    assert bool(loaded.new) == bool(new)


@pytest.mark.parametrize(
    ("family", "parts", "lost"),
    [
        ("bert", ("layer.1.",), "layer.1"),
        ("bert", ("encoder", "pooler", "classifier"), "bert.encoder"),
        ("bert", ("word_embeddings",), "word_embeddings"),
        ("bert", ("classifier.bias",), "classifier.bias"),
        ("llama", ("model.norm",), "model.norm.weight"),
        ("t5", ("decoder.block.1.",), "decoder.block.1"),
        ("mixtral", ("experts.2.",), "experts"),
        ("mixtral", ("experts.2.w1",), "parts are missing"),
    ],
)
def test_weights_that_are_no_heads_are_refused_by_name(
    family: str, parts: tuple[str, ...], lost: str, tmp_path: Path
) -> None:
    """transformers initializes them at random and reports that only in a table of its log."""
    with pytest.raises(ModelError, match=f"(?s){lost}"):
        loaded_from(folder_without(tmp_path, family, *parts), family)


def test_an_index_of_one_tensor_is_refused(tmp_path: Path) -> None:
    folder, shard = folder_without(tmp_path, "bert"), "model-00001-of-00001.safetensors"
    name = "bert.pooler.dense.weight"
    save_file({name: torch.zeros(64, 64)}, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {name: shard}})
    )
    with pytest.raises(ModelError, match=r"is missing weights .* bert\.embeddings"):
        loaded_from(folder, "bert")


def test_weights_of_another_shape_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    report = "transformers.utils.loading_report.LoadStateDictInfo.create_loading_report"
    monkeypatch.setattr(report, lambda *_: "| classifier | MISMATCH |")
    logger = logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(logger, "handle", lambda record: logged.append(record.getMessage()))
    folder = folder_without(tmp_path, "bert")
    with pytest.raises(ModelError, match=r"classifier\.\w+ has the shape .* labels"):
        loaded_from(folder, "bert", labels=5)
    assert not logged


def test_what_the_model_has_no_place_for_is_named(tmp_path: Path) -> None:
    layer = {f"bert.encoder.layer.2.{number}": torch.zeros(2) for number in range(5)}
    loaded = loaded_from(folder_without(tmp_path, "bert", **layer), "bert")
    assert len(loaded.unused) == 5
    assert f"bert.encoder.layer.2.2 and 2 more of {tmp_path}. If" in next(loaded.lines(tmp_path))


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    """transformers loads the adapter into the model and freezes all other weights."""
    folder = folder_without(tmp_path, "bert")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with pytest.raises(ModelError, match=r"adapter_config\.json next to"):
        find_weights(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="only an adapter"):
        find_weights(folder)


@pytest.mark.whole
def test_a_new_head_stands_in_the_journal_once(tmp_path: Path) -> None:
    folder = folder_without(tmp_path / "weights", "bert", "classifier")
    run = replace(small_run(tmp_path / "run", max_steps=2, save_steps=1), weights=folder)
    train(run)
    train(run)
    notes = [event["text"] for event in events(tmp_path / "run", "note")]
    assert [note for note in notes if "newly initialised" in note] == [
        f"{folder} has no classifier.bias, classifier.weight, so they are newly initialised and must be "
        "trained."
    ]


@pytest.mark.whole
def test_an_adapter_beside_the_weights_is_never_trained_silently(tmp_path: Path) -> None:
    folder = folder_without(tmp_path / "weights", "bert")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with pytest.raises(ModelError, match="beside"):
        train_on(
            small_job("bert", 2), "plain", [{"input_ids": [1, 2], "labels": 1}], output_dir=tmp_path / "run",
            weights=folder, device="cpu", collate=lambda samples: {},
        )  # fmt: skip


def runs(program: str) -> int:
    """Run a program as `python -c` does."""
    exec(program, {"__name__": "__main__"})
    return 0


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_pickled_weights_are_refused_with_the_line_that_converts_them(tmp_path: Path) -> None:
    """The test runs the message's command unchanged; the folder then has weights that snugfit loads."""
    model = model_of("bert")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    job = Job(model=Model.find(tmp_path), task="sequence-classification", sequence_length=16)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"pickle.*save_pretrained.*--from-scratch") as caught:
        own.weights_of(job, None)
    _, program = str(caught.value).split("python -c ")
    forks = forks_of("many_ranks")
    assert forks.ended(forks.start(runs, shlex.split(program)[0])) == 0
    assert own.weights_of(job, None) == tmp_path


def test_training_begins_at_random_only_where_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(model=Model.find("bert-base-uncased"), task="masked-lm")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"bert-base-uncased.*hf download.*weights='random' from Python"):
        own.weights_of(job, None)
    assert own.weights_of(job, "random") is None
    assert own.weights_of(small_job("bert"), None) is None, "a config from Python has random weights"
    model_of("bert").save_pretrained(tmp_path)
    monkeypatch.setattr("snugfit.job.weights.cached_file", lambda name, file: tmp_path / file)
    assert own.weights_of(job, None) == tmp_path, "from the hub's local cache"
