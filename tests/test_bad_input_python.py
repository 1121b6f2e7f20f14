"""Common mistakes of new users in Python: a name in place of a model, text in place of a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import snugfit
from snugfit.comparison.compare import compare
from snugfit.errors import GpuError, JobError, ModelError, RecipeError, UsageError, did_you_mean
from snugfit.frontends.own import train
from snugfit.job.config import check_facts
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.planning.fleet.search_gpus import plan_gpus
from snugfit.planning.search.search import plan
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

FACTS = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 64, "vocab_size": 96,
}  # fmt: skip


def job(**settings: Any) -> Job:
    model = Model.from_config(check_facts(FACTS, where="tiny"), name="tiny")
    return Job(**{"model": model, "task": "masked-lm", "sequence_length": 8} | settings)


@pytest.mark.parametrize(("model", "told"), [
    ("bert-base-uncased", r"Model\.find\('bert-base-uncased'\)"),
    (Path("/a/folder"), r"Model\.find\('/a/folder'\)"),
    (nn.Linear(2, 2), r"Linear.*Model\.from_module"),
    (None, r"NoneType.*Model\.find\(name\)"),
])  # fmt: skip
def test_what_is_no_model_is_told_how_to_make_one(model: Any, told: str) -> None:
    with pytest.raises(JobError, match=told):
        Job(model=model, task="masked-lm")


@pytest.mark.parametrize(("field", "value"), [
    ("task", None), ("task", 3), ("phase", None), ("padding", "0.5"), ("padding", None), ("padding", True),
    ("clip", "1"), ("clip", True), ("learning_rate", "1e-5"), ("learning_rate", float("nan")),
    ("learning_rate", float("inf")), ("learning_rate", -1.0), ("decay_groups", "yes"), ("batch_size", 4.0),
    ("batch_size", "4"), ("sequence_length", None), ("labels", False), ("build_on", None),
])  # fmt: skip
def test_a_field_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    with pytest.raises(JobError) as told:
        job(**{field: value})
    assert field.replace("_", " ") in str(told.value).replace("_", " ")
    assert repr(value) in str(told.value)


@pytest.mark.parametrize(("document", "told"), [
    ({}, "no model and no task"),
    ({"model": {}}, "no task"),
    (job().to_json() | {"bogus": 1}, "Unknown keys: bogus"),
    (job().to_json() | {"task": "x"}, "Unknown task 'x'"),
    (job().to_json() | {"phase": "x"}, "Unknown phase 'x'"),
])  # fmt: skip
def test_a_document_that_is_no_job_is_refused(document: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        Job.from_json(document)


def test_a_document_of_an_older_version_gets_the_defaults() -> None:
    document = job().to_json()
    del document["build_on"]
    assert Job.from_json(document) == job()


@pytest.mark.parametrize("name", [None, 3, ["bert"]])
def test_a_model_s_name_is_text_or_a_path(name: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="give text or a path"):
        Model.find(name)
    with pytest.raises(ModelError, match=r"no config\.json"):
        Model.find(tmp_path)


@pytest.mark.parametrize(("module", "example", "told"), [
    ("net", {"x": torch.ones(2)}, "instance of nn.Module, not 'net'"),
    (nn.Linear, {"x": torch.ones(2)}, "not the class Linear"),
    (nn.Linear(2, 2), torch.ones(2, 2), "must map"),
    (nn.Linear(2, 2), [torch.ones(2, 2)], "must map"),
    (nn.Linear(2, 2), {}, "empty"),
    (nn.Linear(2, 2), {"input": numpy.ones((2, 2))}, "'input' is of type ndarray; give a tensor"),
    (nn.Linear(2, 2), {"input": [1, 2]}, "'input' is of type list; give a tensor"),
])  # fmt: skip
def test_a_module_and_its_example_are_what_they_must_be(module: Any, example: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        Model.from_module(module, example)


def test_recipes_and_gpus_are_named_by_text() -> None:
    with pytest.raises(RecipeError, match="A recipe must be text"):
        Recipe.parse(["bf16"])  # type: ignore[arg-type]
    with pytest.raises(GpuError, match="must be text, such as"):
        find_gpu(24)  # type: ignore[arg-type]
    assert did_you_mean(None, ["plain"]) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "told"), [
    ({"job": "bert"}, r"job is 'bert'.*snugfit\.Job, such as Job\(model=Model\.find\('bert'\)"),
    ({"job": job().model}, r"job is Model.*snugfit\.Job"),
    ({"recipe": None}, "A recipe must be text"),
    ({"gpu": 24}, "must be text, such as"),
    ({"memory_bytes": "24GiB"}, "memory_bytes is '24GiB'; it must be a whole number of bytes above 0"),
    ({"memory_bytes": -1}, "memory_bytes is -1"),
    ({"memory_bytes": 0}, "memory_bytes is 0"),
    ({"memory_bytes": 24.0}, r"memory_bytes is 24\.0"),
    ({"memory_bytes": True}, "memory_bytes is True"),
])  # fmt: skip
def test_each_argument_of_predict_is_checked(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        predict(**{"job": job(), **asked})


@pytest.mark.parametrize("techniques", ["bf16", ["bf16"], 3])
def test_a_recipe_of_text_is_told_how_it_is_parsed(techniques: Any) -> None:
    with pytest.raises(RecipeError, match=r"Recipe\.parse\("):
        Recipe(techniques)


@pytest.mark.parametrize("recipes", [None, "plain", 3, Recipe()])
def test_compare_says_what_it_takes(recipes: Any) -> None:
    with pytest.raises(UsageError, match=r"a list of recipes such as \['plain', 'bf16'\], not Job and "):
        compare(job(), recipes)


@pytest.mark.parametrize(("asked", "told"), [
    ({"weights": 3}, "weights is 3; it must be a folder"),
    ({"tokenizer": 3}, "tokenizer is 3; it must be"),
    ({"watch": 3}, "watch is 3; it must be a function"),
    ({"dataset": None}, "A dataset must be a path"),
    ({"device": 0}, "device is 0; it must be cpu"),
])  # fmt: skip
def test_each_argument_of_train_is_checked(asked: dict[str, Any], told: str, tmp_path: Path) -> None:
    given = {"dataset": [{"input_ids": [1, 2], "labels": [1, 2]}], "weights": "random", **asked}
    with pytest.raises(UsageError, match=told):
        train(job(), "plain", output_dir=tmp_path, **given)


@pytest.mark.parametrize(("asked", "told"), [
    ({"job": "bert"}, "job is 'bert'"),
    ({"job": None}, "job is NoneType"),
    ({"gpu": 24}, "must be text, such as"),
    ({"gpu": ["h200"]}, "must be text, such as"),
    ({"memory_bytes": "24GiB"}, "memory_bytes is '24GiB'"),
    ({"workers": 0}, "workers is 0; it must be a whole number of processes from 1"),
    ({"workers": "two"}, "workers is 'two'"),
    ({"fidelity": None}, "Unknown fidelity None"),
    ({"objective": "fast"}, "Unknown objective 'fast'"),
    ({"free": 3}, "free is 3; it must be slots such as"),
    ({"gpu": None}, r"which need a GPU. Give gpu='h200' or another; memory_bytes can"),
])  # fmt: skip
def test_each_argument_of_plan_is_checked(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        plan(**{"job": job(), "gpu": "h200", **asked})


@pytest.mark.parametrize(("name", "told"), [
    ("memorybytes", "plan takes no memorybytes. Did you mean 'memory_bytes'"),
    ("batch_size", "plan takes no batch_size. It takes gpu, memory_bytes"),
    ("tell", "tell is 4; it must be a function"),
    ("clock", "clock is 4; it must be a function"),
])  # fmt: skip
def test_an_argument_that_plan_has_not_or_cannot_call_is_refused(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        snugfit.plan(job(), gpu="h200", **{name: 4})


@pytest.mark.parametrize(("gpus", "more", "told"), [
    ("h200", {}, r"gpus is 'h200'; it must be a list such as \['h200'"),
    ([], {}, r"gpus is \[\]"),
    (24, {}, "gpus is 24"),
    ([24], {}, "must be text, such as"),
    (["h200"], {"job": "bert"}, "job is 'bert'"),
    (["h200"], {"workers": -1}, "workers is -1"),
    (["h200"], {"tell": "me"}, "tell is 'me'; it must be a function"),
])  # fmt: skip
def test_each_argument_of_plan_gpus_is_checked(gpus: Any, more: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        plan_gpus(**{"job": job(), "gpus": gpus, **more})


def test_a_gpu_is_found_by_itself() -> None:
    assert find_gpu(find_gpu("h200")) is find_gpu("h200")


@pytest.mark.parametrize("document", [[], None, "bert", 3])
def test_a_document_of_another_kind_is_refused(document: Any) -> None:
    with pytest.raises(ModelError, match="not a model document"):
        Model.from_json(document)
    with pytest.raises(JobError, match="not a job document"):
        Job.from_json(document)


def test_a_document_without_its_parts_is_refused() -> None:
    with pytest.raises(ModelError, match="no config and no name and no origin"):
        Model.from_json({})
    with pytest.raises(ModelError, match="no config"):
        Model.from_json({"name": "x", "origin": "preset"})


def test_a_trainer_class_is_a_trainer_in_the_trainer_s_loop() -> None:
    import transformers

    setup, policy = Recipe().setup(), CudaPolicy()
    with pytest.raises(UsageError, match=r"subclass of transformers\.Trainer"):
        rehearse(job(), setup, policy, loop="trainer", trainer_class=nn.Linear)
    with pytest.raises(UsageError, match="works only with the loop 'trainer', not with 'plain'"):
        rehearse(job(), setup, policy, trainer_class=transformers.Trainer)
