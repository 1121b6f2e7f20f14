"""Models: their sources, their refusals, and the construction of the real class from facts alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from snugfit.cli.main import run
from snugfit.errors import JobError, ModelError, RecipeError
from snugfit.job import find
from snugfit.job.architectures import HEADS, _table, heads, model_types
from snugfit.job.build import instantiate
from snugfit.job.job import Job, Phase, Task, TaskBase
from snugfit.job.model import Model

TINY = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 200,
}


def job_of(model: Model, task: Task = Task.SEQUENCE_CLASSIFICATION, **settings: Any) -> Job:
    return Job(model=model, task=task, **{"sequence_length": 16} | settings)


def tiny(**keys: Any) -> Model:
    return Model.from_config(TINY | keys, name="tiny")


def on_meta(model: Model, job: Job, *, dtype: str | None = None, attention: str = "sdpa") -> nn.Module:
    with torch.device("meta"):
        return instantiate(job, dtype=dtype, attention=attention)


def test_a_head_has_the_job_s_classes() -> None:
    model = Model.find("bert-large-uncased")
    built = on_meta(model, job_of(model, labels=3))
    assert sum(parameter.numel() for parameter in built.parameters()) == 335_141_888 + 3 * 1024 + 3
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}


# Finding


@pytest.mark.parametrize(
    "name", ["bert-large-uncased", "google-bert/bert-large-uncased", "BERT-Large-Uncased"]
)
def test_presets_are_found_with_or_without_owner_in_any_case(name: str) -> None:
    found = Model.find(name)
    assert (found.name, found.origin) == ("google-bert/bert-large-uncased", "preset")
    assert found.config["hidden_size"] == 1024


def test_another_model_is_not_suggested_for_one_that_is_not_known() -> None:
    for name in ("Qwen/Qwen3-9B", "Qwen2.5-4B-Instruct", "bert-tiny-uncased", "someone/gemma-2-2b-it"):
        with pytest.raises(ModelError, match="Presets: ") as caught:
            Model.find(name)
        assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("asked", ["./{}", "./{}/config.json", "{}", "{}/config.json"])
def test_folders_and_files_are_found(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(TINY))
    found = Model.find(asked.format("mine"))
    assert (found.origin, found.config) == ("path", TINY)


def test_a_folder_named_like_a_preset_is_refused_until_it_is_written_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert Model.find("gpt2").origin == "preset", "a folder without config.json is no model"
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ModelError, match=r"\./gpt2 for the folder"):
        Model.find("gpt2")
    assert Model.find("./gpt2").config == TINY


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert-larg-uncased", "Did you mean 'bert-large-uncased'"),
        ("bert-base", "Did you mean 'bert-base-uncased' or 'bert-base-cased'"),
        ("google-t5/t5-3", "google-t5/t5-3b"),
        ("nobody/has-this", "HF_HUB_OFFLINE forbids to ask the hub"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "diffusers, not a model of transformers"),
        ("timm/resnet50.a1_in1k", "predict --example FILE.py"),
        ("TheBloke/Nothing-GGUF", "--phase serve --engine llama.cpp"),
        ("unsloth/Llama-3.2-1B-Instruct-GGUF", "in transformers: meta-llama/Llama-3.2-1B"),
        ("a/b/c", "A model is the name of a preset"),
        ("a--b", "A model is the name of a preset"),
        ("", "A model is the name of a preset"),
        ("x\0y", "A model is the name of a preset"),
        ("./nothing-here", "no such file"),
        ("~nobody-at-all/x", "no such file"),
    ],
)
def test_unknown_names_say_what_is_allowed(name: str, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        Model.find(name)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("model_index.json", "{}", "a pipeline or a part of diffusers"),
        ("config.json", '{"_diffusers_version": "0.36"}', "a pipeline or a part of diffusers"),
        ("config.json", '{"architecture": "resnet50", "pretrained_cfg": {}}', "a model of timm"),
        ("tiny.gguf", "GGUF", "llama.cpp's format GGUF"),
        ("config.json", "{}", 'has no "model_type"'),
    ],
)
def test_a_model_of_another_library_gets_its_own_command(
    file: str, text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same folder is refused alike as a path and as a repository in the hub's cache."""
    snapshot = tmp_path / "models--someone--thing" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / file).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        find, "cached_file", lambda _, name: snapshot / name if (snapshot / name).exists() else None
    )
    for name in (str(snapshot), "someone/thing"):
        with pytest.raises(ModelError, match=expected):
            Model.find(name)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A hub that allows requests; each test sets its answer (`_fetch_config`)."""
    from huggingface_hub import constants

    def fail(name: str) -> str:
        raise AssertionError(f"unexpected request to the hub for {name}")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(find, "cached_file", lambda *_: None)
    monkeypatch.setattr(find, "_fetch_config", fail)
    return monkeypatch


def test_the_hub_is_asked_for_a_config_when_nothing_here_has_one(
    hub: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    sentences: list[str] = []
    assert Model.find("unsloth/Llama-3.2-1B", tell=sentences.append).name == "meta-llama/Llama-3.2-1B"
    hub.setattr(find, "_fetch_config", lambda name: str(file))
    assert Model.find("someone/something", tell=sentences.append).origin == "hub cache"
    assert sentences == ["config of someone/something from the hub"]
    hub.setattr(find, "cached_file", lambda *_: file)
    assert Model.find("someone/something", tell=sentences.append).config == TINY
    assert len(sentences) == 1


@pytest.mark.parametrize("forbidden", ["--offline", "HF_HUB_OFFLINE"])
def test_no_socket_opens_where_it_is_forbidden(
    forbidden: str, hub: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    from huggingface_hub import constants

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    hub.setattr(socket, "socket", refuse)
    hub.setattr(constants, "HF_HUB_OFFLINE", forbidden == "HF_HUB_OFFLINE")
    flags = ["--offline"] if forbidden == "--offline" else ["--online"]
    assert run(["predict", "someone/qwen-tune", *flags]) == 2
    words = capsys.readouterr().err
    assert f"{forbidden} forbids to ask the hub" in words
    assert "Presets: Qwen" in words
    assert run(["predict", "someone/qwen-tune", "--online", "--offline"]) == 2
    assert "contradict each other" in capsys.readouterr().err


def _hub_error(kind: str) -> Exception:
    from huggingface_hub import errors

    error: Exception = getattr(errors, kind)("404 Client Error\nlots\nmore", response=Mock(headers={}))
    return error


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("GatedRepoError", "accepted its terms"),
        ("RepositoryNotFoundError", "the hub does not have it"),
        ("RemoteEntryNotFoundError", "has no config.json"),
        ("HfHubHTTPError", "cannot be reached (404 Client Error)"),
    ],
)
def test_a_hub_that_fails_is_one_clear_error(kind: str, says: str, hub: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise _hub_error(kind)

    hub.setattr(find, "_fetch_config", fail)
    with pytest.raises(ModelError) as caught:
        Model.find("someone/gemma-tune")
    assert says in str(caught.value)
    assert "Presets: gemma" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_that_hangs_is_left_after_some_seconds(hub: pytest.MonkeyPatch) -> None:
    from threading import Event

    let_go = Event()
    hub.setattr(find, "HUB_SECONDS", 0.01)
    hub.setattr(find, "_fetch_config", lambda name: let_go.wait())
    with pytest.raises(ModelError, match="did not answer within"):
        Model.find("someone/gemma-tune")
    let_go.set()


# The value


def test_models_and_jobs_round_trip_compare_and_hash() -> None:
    job = job_of(tiny(), padding=0.25)
    again = Job.from_json(json.loads(json.dumps(job.to_json())))
    assert again == job
    assert hash(again) == hash(job)
    assert job_of(tiny(hidden_size=64)) != job


def test_a_foreign_document_is_checked_like_a_file() -> None:
    document = tiny().to_json()
    document["config"]["trust_remote_code"] = True
    with pytest.raises(ModelError, match="trust_remote_code"):
        Model.from_json(document)


@pytest.mark.whole
def test_a_job_is_made_without_torch_or_transformers() -> None:
    script = (
        "import sys; from snugfit.job.job import Job, Task; from snugfit.job.model import Model;"
        "Job(model=Model.find('gpt2'), task=Task.CAUSAL_LM, sequence_length=1024);"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "set()"


def test_the_tables_read_from_source_are_the_imported_ones() -> None:
    from transformers.models.auto import configuration_auto, modeling_auto

    assert model_types() == set(configuration_auto.CONFIG_MAPPING_NAMES)
    for auto_class, table in heads().values():
        read = _table("modeling_auto.py", table)
        for model_type, classes in getattr(modeling_auto, table).items():
            assert read[model_type] == {classes} if isinstance(classes, str) else set(classes)
        assert set(read) == set(getattr(modeling_auto, table))
        assert hasattr(modeling_auto, auto_class)
    assert set(heads()) <= {task.value for task in Task} - {"custom"}


# Refusing


@pytest.mark.parametrize(
    ("name", "task", "longest", "key"),
    [
        ("bert-base-uncased", Task.MASKED_LM, 512, "max_position_embeddings"),
        ("roberta-large", Task.MASKED_LM, 512, "max_position_embeddings"),
        ("gpt2", Task.CAUSAL_LM, 1024, "n_positions"),
    ],
)
def test_positions_that_end_limit_the_sequence(name: str, task: Task, longest: int, key: str) -> None:
    model = Model.find(name)
    job_of(model, task, sequence_length=longest)
    with pytest.raises(JobError, match=rf"{longest + 1} is more than the model's {longest} .*{key}"):
        job_of(model, task, sequence_length=longest + 1)


def test_the_target_has_a_limit_of_its_own() -> None:
    model = Model.find("whisper-medium")
    job_of(model, "speech-to-text", target_length=448, sequence_length=9999)
    with pytest.raises(JobError, match=r"target length 449 .*max_target_positions"):
        job_of(model, "speech-to-text", target_length=449)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("Llama-3.1-8B", Task.CAUSAL_LM),
        ("gemma-2-2b", Task.CAUSAL_LM),
        ("t5-3b", Task.SEQ2SEQ_LM),
        ("ModernBERT-base", Task.MASKED_LM),
    ],
)
def test_computed_positions_have_no_limit(name: str, task: Task) -> None:
    model = Model.find(name)
    job = job_of(model, task, sequence_length=200_000, target_length=4096)
    on_meta(model, job)


def test_old_files_without_rotary_keys_are_not_refused() -> None:
    """The first Llama configs have no keys for rotary positions; their class has defaults."""
    old = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
    }
    job_of(Model.from_config(old, name="old"), Task.CAUSAL_LM, sequence_length=4096)


def test_a_limit_that_only_the_class_knows_is_found_when_it_is_built() -> None:
    job = job_of(tiny(), sequence_length=513)
    with pytest.raises(JobError, match="512 positions"):
        on_meta(job.model, job)


def test_a_task_of_a_feature_that_is_not_there_is_named() -> None:
    with pytest.raises(JobError, match=r"Unknown task 'image-classification'\..* Tasks: .*causal-lm"):
        TaskBase("Task", {task: task for task in HEADS}).parse("image-classification")
    with pytest.raises(JobError, match=r"No task: .*vit.* has none that is installed here"):
        Job(model=Model.from_config({"model_type": "clap"}, name="vit"))


def test_a_task_without_a_head_names_those_there_are() -> None:
    with pytest.raises(JobError, match=r"t5-3b \(t5\) has no head for causal-lm .*seq2seq-lm"):
        job_of(Model.find("t5-3b"), Task.CAUSAL_LM)


# Building


def test_the_model_is_born_as_the_recipe_asks() -> None:
    model = tiny()
    job = job_of(model, labels=7)
    built = on_meta(model, job, dtype="bfloat16", attention="eager")
    assert type(built).__name__ == "BertForSequenceClassification"
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}
    assert built.config._attn_implementation == "eager"
    assert built.classifier.out_features == 7
    assert built.training
    assert not on_meta(model, job_of(model, phase=Phase.EVALUATE)).training


def test_real_weights_are_made_on_a_real_device() -> None:
    model = tiny()
    built = instantiate(job_of(model), dtype="float32", attention="sdpa")
    assert all(torch.isfinite(parameter).all() for parameter in built.parameters())


def test_an_architecture_without_sdpa_gets_what_transformers_gives_it() -> None:
    """In DeBERTa, positions and contents attend to each other, and no fused attention supports that."""
    model = tiny(model_type="deberta-v2")
    built = on_meta(model, job_of(model))
    assert built.config._attn_implementation == "eager"


def test_an_attention_that_cannot_be_is_refused() -> None:
    model = tiny()
    with pytest.raises(RecipeError, match="cannot use the attention 'no_such_thing'"):
        on_meta(model, job_of(model), attention="no_such_thing")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ({"hidden_act": "nothing"}, '"hidden_act" is "nothing", which transformers .* does not know'),
        ({"layer_norm_eps": "x"}, "transformers cannot"),
        ({"hidden_dropout_prob": 7}, "transformers cannot"),
    ],
)
def test_a_config_that_transformers_refuses_is_one_clear_error(key: dict[str, Any], told: str) -> None:
    model = tiny(**key)
    with pytest.raises(ModelError, match=f"tiny: {told}"):
        on_meta(model, job_of(model))


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ([], "DeiTForImageClassification"),
        (["DeiTForImageClassificationWithTeacher"], "DeiTForImageClassificationWithTeacher"),
    ],
)
def test_where_an_architecture_has_two_heads_the_config_chooses(named: list[str], expected: str) -> None:
    model = Model.from_config(
        {"model_type": "deit", "num_hidden_layers": 1, "architectures": named}, name="deit"
    )
    assert type(on_meta(model, job_of(model, "image-classification"))).__name__ == expected


def test_memory_that_runs_out_is_not_blamed_on_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_config", full)
    with pytest.raises(torch.OutOfMemoryError):
        instantiate(job_of(tiny()), dtype="float32", attention="sdpa")


# Modules from Python


class Tied(nn.Module):
    """A module with two names for one weight, a buffer, a frozen part, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("table", torch.arange(4))
        self.seen: list[str] = []
        self.head.register_forward_hook(lambda *_: None)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.embedding(ids)).float().mean()}


def custom(module: nn.Module) -> Job:
    example = {"ids": torch.zeros(2, 4, dtype=torch.long)}
    return Job(model=Model.from_module(module, example), task=Task.CUSTOM)


def test_a_module_on_meta_keeps_ties_hooks_and_flags_and_copies_no_weight() -> None:
    module = Tied().eval()
    built = on_meta(custom(module).model, custom(module))
    assert built.head.weight is built.embedding.weight
    assert not built.scale.requires_grad
    assert built.scale.dtype is torch.bfloat16
    assert len(built.head._forward_hooks) == 1
    assert {tensor.device.type for tensor in [*built.parameters(), *built.buffers()]} == {"meta"}
    assert [name for name, _ in built.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert built.training
    assert not module.training
    assert module.embedding.weight.device.type == "cpu"


def test_a_module_on_a_device_is_an_equal_copy_of_its_own() -> None:
    module = Tied()
    built = instantiate(custom(module), dtype="float32", attention="sdpa")
    assert torch.equal(built.table, module.table)
    with torch.no_grad():
        built.embedding.weight.zero_()
    assert built.head.weight is built.embedding.weight
    assert module.embedding.weight.abs().sum() > 0


def test_a_module_from_python_does_not_travel() -> None:
    job = custom(Tied())
    document = json.loads(json.dumps(job.to_json()))
    assert document["model"]["name"] == "Tied"
    with pytest.raises(JobError, match=r"Tied.*Python"):
        Job.from_json(document)


def test_modules_and_tasks_must_belong_together() -> None:
    with pytest.raises(JobError, match="its task must be 'custom'"):
        job_of(custom(Tied()).model, Task.CAUSAL_LM)
    with pytest.raises(JobError, match="custom"):
        job_of(tiny(), Task.CUSTOM)
    with pytest.raises(ModelError, match="empty"):
        Model.from_module(Tied(), {})


@pytest.mark.parametrize(
    ("name", "answer"), [("gtp2", "Did you mean 'gpt2'"), ("train.py", "is a Python file, not a model")]
)
def test_a_slip_in_the_name_of_a_model_is_answered(name: str, answer: str) -> None:
    with pytest.raises(ModelError, match=answer):
        Model.find(name)


def test_a_job_without_a_task_has_the_one_of_its_architecture() -> None:
    assert Job(model=Model.find("gpt2")) == Job(model=Model.find("gpt2"), task=Task.CAUSAL_LM)
    with pytest.raises(JobError, match=r"has several\. Give one of"):
        Job(model=tiny())
