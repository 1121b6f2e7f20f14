"""Exports to TRL, axolotl and LLaMA-Factory: the tools' own parsers read them, and snugfit reads the same
recipe back.

Without an installed tool, its keys are those of `data/finetuning_tools.json`, read from its source.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from in_roster import are_in_roster, needs_techniques
from small_models import FAMILIES
from small_tokenizers import NUMBERS, tokenizer
from snugfit.cli.main import run
from snugfit.errors import RecipeError, UsageError
from snugfit.features.exchange.export import FILES, export
from snugfit.features.exchange.finetuning_tools import left_in_float32
from snugfit.features.exchange.read import read_arguments
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot

KEYS = json.loads((Path(__file__).parent / "data" / "finetuning_tools.json").read_text())
LORA = "lora(r=4, targets=all-linear, dropout=0.1, alpha=12)"
EXPANDABLE = "bf16 + every_layer + micro_batches(2) + adamw_8bit + expandable"
SUPPORTED = [
    case
    for case in [
        ("trl", "bfloat16", f"{LORA} + {EXPANDABLE}"),
        ("trl", "bfloat16", "bf16_pure + sgd(momentum=0.5) + eager + workers(n=2)"),
        ("trl", "float32", "every_nth_layer(2) + bf16 + adafactor"),
        ("trl", "bfloat16", "fp32 + adamw_fused"),
        ("trl", "float32", "qlora(r=4, targets=all-linear, double=false) + bf16 + every_layer"),
        ("trl", "bfloat16", "qlora(r=4, targets=q_proj|v_proj) + bf16 + micro_batches(2)"),
        ("axolotl", "bfloat16", f"{LORA} + {EXPANDABLE}"),
        ("axolotl", "bfloat16", "lora(targets=q_proj|v_proj) + bf16 + eager"),
        ("axolotl", "float32", "every_layer + micro_batches(4) + workers(n=2) + tf32 + adafactor"),
        ("axolotl", "bfloat16", "fp32 + sgd"),
        ("axolotl", "bfloat16", "qlora(r=4, targets=all-linear, double=false) + bf16 + every_layer"),
        ("axolotl", "bfloat16", "qlora(r=4, targets=q_proj|v_proj) + bf16 + micro_batches(2)"),
        (
            "llamafactory",
            "bfloat16",
            f"{LORA} + {EXPANDABLE}",
        ),
        ("llamafactory", "bfloat16", "lora(targets=q_proj|v_proj) + bf16_pure + eager"),
        ("llamafactory", "bfloat16", "qlora(r=4, targets=all-linear, double=false) + bf16 + every_layer"),
        ("llamafactory", "bfloat16", "bf16_pure + every_layer + sgd(momentum=0.5)"),
        ("llamafactory", "bfloat16", "fp32 + adamw_fused + workers(n=2)"),
        ("llamafactory", "float32", "bf16 + tf32 + adafactor"),
        ("llamafactory", "float32", "flash + bf16"),
    ]
    if are_in_roster(case[2])
]


def job_in(folder: Path, dtype: str = "float32", family: str = "llama") -> Job:
    """Return a job on a tiny model with a checkpoint in `dtype`; `folder` contains only its config."""
    facts, task, layers = FAMILIES[family]
    folder.mkdir(exist_ok=True)
    config = {"model_type": family, **facts, **dict.fromkeys(layers, 2), "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    model = Model.find(str(folder))
    return Job(model=model, task=task, batch_size=4, sequence_length=16, learning_rate=1e-3, clip=0.5)


def exported(job: Job, recipe: str, to: str) -> str:
    files = export(job, Recipe.parse(recipe), to).files
    assert tuple(files) == FILES[to]
    return files[FILES[to][0]]


def as_run(recipe: str, dtype: str) -> Setup:
    """Return a recipe's Setup (its settings) with weights of `dtype`.

    The allocator is set by an environment variable outside of the file, and TRL has its own loss.
    """
    setup = Recipe.parse(recipe).setup()
    dtype = setup.weights_dtype or dtype
    return replace(setup, weights_dtype=dtype, expandable_segments=False, logits=None)


@pytest.mark.parametrize(("to", "dtype", "recipe"), SUPPORTED)
def test_what_is_exported_reads_back_as_the_same_recipe(
    to: str, dtype: str, recipe: str, tmp_path: Path
) -> None:
    job = job_in(tmp_path / "model", dtype)
    file = tmp_path / FILES[to][0]
    file.write_text(exported(job, recipe, to))
    reading = read_arguments(file)
    assert reading.refused == ()
    assert reading.export == to
    assert not any("adapters beside 4-bit weights" in line.says for line in reading.differs)
    settings = dict(reading.settings)
    assert ("chunked_loss" in settings["recipe"]) == (to == "trl")
    assert as_run(settings.pop("recipe"), settings.pop("dtype", dtype)) == as_run(recipe, dtype)
    assert settings == {
        "model": job.model.name, "task": "causal-lm", "batch_size": 4, "sequence_length": 16,
        "learning_rate": 1e-3, "clip": 0.5, "loop": "trainer",
    }  # fmt: skip


@pytest.mark.parametrize(("to", "dtype", "recipe"), [case for case in SUPPORTED if case[0] != "trl"])
def test_the_tool_knows_every_key(to: str, dtype: str, recipe: str, tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainingArguments

    written = yaml.safe_load(exported(job_in(tmp_path / "model", dtype), recipe, to))
    known = set(KEYS[to]["keys"])
    if to == "llamafactory":
        known |= set(Seq2SeqTrainingArguments.__dataclass_fields__)
    assert set(written) <= known
    assert type(written["learning_rate"]) is float


@pytest.mark.parametrize(("dtype", "recipe"), [case[1:] for case in SUPPORTED if case[0] == "axolotl"])
def test_axolotl_itself_takes_it(dtype: str, recipe: str, tmp_path: Path) -> None:
    schemas = pytest.importorskip("axolotl.utils.schemas.config")
    machine = {"bf16": True, "tf32": True, "n_gpu": 1, "n_node": 1, "compute_capability": "sm_90"}
    written = yaml.safe_load(exported(job_in(tmp_path / "model", dtype), recipe, "axolotl"))
    config = schemas.AxolotlConfigWCapabilities(
        **written, capabilities=machine, env_capabilities={"torch_version": "2.11.0"}
    )
    assert not any(getattr(config, f"lora_{part}_kernel") for part in ("mlp", "qkv", "o"))
    assert config.attn_needs_dtype_cast is False


@pytest.mark.parametrize(("dtype", "recipe"), [case[1:] for case in SUPPORTED if case[0] == "llamafactory"])
def test_llama_factory_itself_takes_it(
    dtype: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # its parser is read under a newer transformers
    parser = pytest.importorskip("llamafactory.hparams.parser")
    from transformers import HfArgumentParser

    written = yaml.safe_load(exported(job_in(tmp_path / "model", dtype), recipe, "llamafactory"))
    here = {"use_cpu": True, "tf32": None}
    HfArgumentParser(parser._TRAIN_ARGS).parse_dict({**written, **here}, allow_extra_keys=False)


def scope_of(text: str) -> dict[str, Any]:
    """Return the variables of an exported script by name, for a machine without a GPU."""
    scope: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text.replace("SFTConfig(\n", "SFTConfig(use_cpu=True,\n"), "sft.py", "exec"), scope)
    return scope


def trainer_of(folder: Path, dtype: str, recipe: str) -> Any:
    """Return TRL's trainer of the exported script, over a tiny model with weights."""
    datasets = pytest.importorskip("datasets")
    job = job_in(folder / "model", dtype)
    build_model(job, Recipe().setup(), torch.device("cpu")).save_pretrained(job.model.name)
    texts = [" ".join(NUMBERS[(row + place) % 10] for place in range(16)) for row in range(8)]
    data = datasets.Dataset.from_dict({"text": texts})
    return scope_of(exported(job, recipe, "trl"))["build_trainer"](
        data, processing_class=tokenizer("gpt2", pad_token="[PAD]")
    )


@pytest.mark.whole
@pytest.mark.parametrize(("dtype", "recipe"), [case[1:] for case in SUPPORTED if case[0] == "trl"])
def test_trl_itself_takes_it(
    dtype: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(tmp_path, dtype, recipe)
    setup = as_run(recipe, dtype)
    frozen = next(weight for name, weight in trainer.model.named_parameters() if "embed_tokens" in name)
    assert frozen.dtype == getattr(torch, str(setup.weights_dtype))
    assert frozen.requires_grad == (setup.adapt is None)
    if "qlora" in recipe:
        assert {w.dtype for w in trainer.model.parameters() if w.requires_grad} == {torch.float32}
        double = trainer.model.config.quantization_config.bnb_4bit_use_double_quant
        assert double is ("double=false" not in recipe)
    assert trainer.args.bf16 == (setup.autocast == "bfloat16")
    assert trainer.args.activation_checkpointing == ("layer" in recipe)
    assert (trainer.args.max_length, trainer.args.packing, trainer.args.max_grad_norm) == (16, False, 0.5)
    assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 4


@pytest.mark.whole
def test_trl_trains_what_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(tmp_path, "float32", "lora(targets=all-linear) + every_layer + micro_batches(2)")
    trainer.args.num_train_epochs = 1
    result = trainer.train()
    assert result.global_step == 2
    assert 0 < result.training_loss < 10


@pytest.mark.parametrize(
    ("to", "dtype", "recipe", "words"),
    [
        ("trl", "float32", "segments", ["trl", "segments"]),
        ("axolotl", "float32", "adafactor_torch", ["axolotl", "adafactor_torch"]),
        ("axolotl", "float32", "every_nth_layer(2)", ["every_nth_layer", "every_layer"]),
        ("llamafactory", "float32", "every_nth_layer(2)", ["every_nth_layer", "every_layer"]),
        ("axolotl", "bfloat16", "lora + bf16_pure", ["bf16_pure", "float32"]),
        ("axolotl", "float32", "lora + bf16", ["bf16", "bfloat16", "--dtype"]),
        ("axolotl", "bfloat16", "bf16", ["embeddings", "32 bits"]),
        ("llamafactory", "float32", "bf16_pure", ["bf16_pure", "pure_bf16"]),
        ("llamafactory", "bfloat16", "lora + fp32", ["fp32", "checkpoint"]),
        ("llamafactory", "float32", "bf16 + flex", ["flex", "flash_attn"]),
        ("trl", "float32", "bf16 + padding_free", ["padding_free"]),
    ],
)
def test_what_a_tool_cannot_do_is_refused_by_name(
    to: str, dtype: str, recipe: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as raised:
        exported(job_in(tmp_path / "model", dtype), recipe, to)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("family", "left"),
    [
        ("llama", []),
        ("qwen2", ["model.layers.0.self_attn.q_proj.bias"]),
        ("gpt2", ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"]),
    ],
)
def test_axolotl_gets_4_bits_where_nothing_is_left_in_32(
    family: str, left: list[str], tmp_path: Path
) -> None:
    """Left in float32 are biases, and embeddings and normalisations that axolotl does not find by name."""
    needs_techniques("qlora")
    job = job_in(tmp_path / "model", "bfloat16", family)
    assert left_in_float32(job)[: max(1, len(left))] == left
    if not left:
        written = yaml.safe_load(exported(job, "qlora(double=false) + bf16", "axolotl"))
        assert (written["adapter"], written["load_in_4bit"], written["bf16"]) == ("qlora", True, True)
        assert written["bnb_config_kwargs"] == {"bnb_4bit_use_double_quant": False}
        return
    with pytest.raises(RecipeError, match=rf"{left[0]}.* in 32 bits(.|\n)*export to hf, accelerate or torch"):
        exported(job, "qlora + bf16", "axolotl")


@pytest.mark.parametrize("to", ["trl", "axolotl", "llamafactory"])
def test_other_tasks_are_refused_by_name(to: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sequence-classification"):
        exported(job_in(tmp_path / "model", family="bert"), "plain", to)


def test_a_prediction_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_in(tmp_path / "model", "bfloat16")
    ask = ["predict", str(tmp_path / "model"), "--task", "causal-lm", "--sequence-length", "16"]
    ask += ["--recipe", "lora + bf16", "--export"]
    for to in ("trl", "axolotl", "llamafactory"):
        assert run([*ask, to, str(tmp_path / to)]) == 0
        err = capsys.readouterr().err
        assert f"Written: {tmp_path / to / FILES[to][0]}" in err
        assert "Note: " in err
    file = tmp_path / "trl" / "sft.py"
    first = file.read_text()
    assert run([*ask[:-1], "--clip", "1", "--export", "trl", str(tmp_path / "trl")]) == 0
    assert file.read_text() != first, "what was exported before is replaced"


def test_an_export_that_would_harm_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_in(tmp_path / "model", "bfloat16")
    ask = ["predict", str(tmp_path / "model"), "--task", "causal-lm", "--sequence-length", "16"]
    folder = tmp_path / "out"
    (tmp_path / "file").write_text("")

    def told(*words: str) -> str:
        assert run([*ask, *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert "Did you mean 'axolotl'?" in told("--export", "axoltl", str(folder))
    assert "is a file" in told("--export", "trl", str(tmp_path / "file" / "out"))
    assert "--compare" in told("--export", "trl", str(folder), "--compare", "bf16")
    folder.mkdir()
    (folder / "sft.py").write_text("mine")
    assert "not an export for trl" in told("--export", "trl", str(folder))
    assert (folder / "sft.py").read_text() == "mine"
    assert run([*ask, "--export", "torch", str(folder)]) == 0
    capsys.readouterr()
    assert "not an export for accelerate" in told("--export", "accelerate", str(folder))
    assert sorted(file.name for file in folder.iterdir()) == ["sft.py", "train.py"]
    capsys.readouterr()
    assert run([*ask, "--memory", "1MiB", "--no-ways-out", "--export", "axolotl", str(folder)]) == 3
    assert "Nothing was exported" in capsys.readouterr().err
    assert run([*ask, "--recipe", "segments", "--export", "axolotl", str(folder)]) == 2
    assert not (folder / "axolotl.yaml").exists()


@pytest.mark.parametrize(
    ("adapter", "sharding", "recipe"),
    [
        ({"adapter": "lora"}, {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, "fsdp"),
        ({"adapter": "qlora", "load_in_4bit": True}, {}, "ddp"),
    ],
)
def test_adapters_of_axolotl_on_several_gpus_are_valid_recipes(
    adapter: dict[str, Any], sharding: dict[str, Any], recipe: str, tmp_path: Path
) -> None:
    """A file without FSDP trains by DDP in several processes."""
    needs_techniques("qlora + ddp")
    job = job_in(tmp_path / "model", "bfloat16")
    config = {
        "base_model": job.model.name, "lora_r": 4, "lora_target_modules": ["q_proj"], "sequence_len": 16,
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "bf16": True, "optimizer": "adamw_torch",
        "learning_rate": 1e-3, **adapter, **sharding,
    }  # fmt: skip
    (file := tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(config))
    reading = read_arguments(file, gpus=2)
    assert reading.refused == ()
    read = Recipe.parse(reading.settings["recipe"])
    assert [read[Slot.ADAPTERS].name, str(read[Slot.SHARDING])] == [adapter["adapter"], recipe]
    read.check(job, installed=False)
