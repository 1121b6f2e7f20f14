"""Techniques in the words of other libraries: read from their files, and written for them or refused."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from test_exchange_export import STEPS, job_in, namespace, ours, samples

from deepspeed_here import with_deepspeed
from in_roster import needs_techniques
from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.exchange.account import Reading
from snugfit.features.exchange.export import export
from snugfit.features.exchange.read import read_arguments
from snugfit.features.exchange.trainer_arguments import training_arguments
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from test_dtype import job_of as dtype_job
from test_dtype import tiny

installed = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")

BOTH = ("fp8", "fp8(recipe=rowwise)")

OPTIMIZER, WEIGHTS = {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("script", "dtype", "recipe"),
    [
        ("AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype=torch.bfloat16)", "bfloat16", "bf16"),
        ("AutoModelForCausalLM.from_pretrained('gpt2', dtype='auto')", None, "bf16"),
        ("AutoModelForCausalLM.from_pretrained('gpt2')", None, "bf16"),
        ("AutoModelForCausalLM.from_config(GPT2Config())", "float32", "bf16"),
        ("AutoModelForCausalLM.from_config(AutoConfig.from_pretrained('gpt2'))", None, "bf16"),
        ("AutoModelForCausalLM.from_config(GPT2Config(), dtype=torch.float16)", "float16", "bf16"),
    ],
)
def test_a_script_s_dtype_is_the_job_s(tmp_path: Path, script: str, dtype: str | None, recipe: str) -> None:
    file = tmp_path / "train.py"
    arguments = "TrainingArguments('x', bf16=True, optim='adamw_torch')"
    file.write_text(f"import torch\nm = {script}\na = {arguments}\n")
    reading = read_arguments(file)
    assert (reading.settings.get("dtype"), reading.settings["recipe"]) == (dtype, recipe)
    assert not reading.refused
    assert not [line for line in reading.differs if "dtype" in line.key]


def test_an_export_says_the_dtype(tmp_path: Path) -> None:
    job = dtype_job(tiny(tmp_path, dtype="bfloat16"))
    texts = [export(job, Recipe.parse(recipe), "torch").files["train.py"] for recipe in ("plain", "fp32")]
    assert ["dtype=torch.bfloat16" in texts[0], "dtype=torch.float32" in texts[1]] == [True, True]


def read_zero(tmp_path: Path, section: dict[str, Any]) -> Reading:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": section, "bf16": {"enabled": True}}))
    return read_arguments(file)


@pytest.mark.parametrize(
    ("section", "recipe"),
    [
        ({"stage": 2, **OPTIMIZER}, "bf16 + zero2(bucket=500000000)"),
        ({"stage": 3, "reduce_bucket_size": "auto", **OPTIMIZER, **WEIGHTS}, "bf16 + zero3"),
        ({"stage": 3, **OPTIMIZER}, "bf16 + zero3(offload=optimizer, bucket=500000000)"),
        ({"stage": 3, "reduce_bucket_size": 2e8}, "bf16 + zero3(offload=none, bucket=200000000)"),
    ],
)
def test_a_deepspeed_file_is_read_into_the_recipe(
    tmp_path: Path, section: dict[str, Any], recipe: str
) -> None:
    reading = read_zero(tmp_path, section)
    assert reading.settings["recipe"] == recipe
    assert not reading.refused
    assert any("overlap_comm is off" in line.says for line in reading.differs)


@pytest.mark.parametrize(
    "section",
    [
        {"stage": 3, **WEIGHTS},
        {"stage": 2, "offload_optimizer": {"device": "nvme"}},
    ],
)
def test_what_of_such_a_file_is_not_predicted_is_refused(tmp_path: Path, section: dict[str, Any]) -> None:
    assert read_zero(tmp_path, section).refused


def zero_arguments(recipe: str) -> dict[str, Any]:
    return training_arguments(small_job("bert", 2, batch_size=4), Recipe.parse(recipe))


def test_the_trainer_is_told_by_its_argument() -> None:
    arguments = zero_arguments("zero3 + bf16 + micro_batches(2)")
    told = arguments["deepspeed"]
    assert arguments["bf16"] is True
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (2, 2)
    assert told["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert told["zero_optimization"]["reduce_bucket_size"] == told["gradient_clipping"] == "auto"


def test_a_loop_of_one_s_own_is_not_written_for_an_engine() -> None:
    with pytest.raises(RecipeError, match=r"zero2 cannot be exported.*--export hf"):
        export(small_job("bert", 2), Recipe.parse("zero2"), "accelerate")


@with_deepspeed
@pytest.mark.parametrize(("recipe", "device"), [("zero3", "cpu"), ("zero3(offload=nvme)", "nvme")])
def test_deepspeed_s_own_class_takes_what_is_zero_arguments(recipe: str, device: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = zero_arguments(f"{recipe} + bf16")["deepspeed"]["zero_optimization"]
    sizes = {name: 1024 for name, value in section.items() if value == "auto"}
    config = DeepSpeedZeroConfig(**{**section, **sizes})
    assert config.stage == 3
    assert config.offload_param.device == config.offload_optimizer.device == device
    folder = None if device == "cpu" else "/local_nvme"
    assert section["offload_param"].get("nvme_path") == folder


@installed
@pytest.mark.parametrize("recipe", BOTH)
@pytest.mark.parametrize("to", ["hf", "torch", "accelerate"])
def test_a_script_converts_the_same_layers_to_fp8(to: str, recipe: str, tmp_path: Path) -> None:
    needs_techniques(recipe)
    from torchao.float8.float8_linear import Float8Linear

    job = job_in(tmp_path / "model")
    files = export(job, Recipe.parse(recipe), to).files
    name, text = next((name, text) for name, text in files.items() if name.endswith(".py"))
    scope: dict[str, Any] = {}
    exec(compile(text, name, "exec"), scope)
    model = scope["build_model"](*(() if to == "hf" else (torch.device("cpu"),)))
    ours = build_model(job, Recipe.parse(recipe).setup(), torch.device("meta"))
    converted = [
        {name: module.config for name, module in one.named_modules() if isinstance(module, Float8Linear)}
        for one in (model, ours)
    ]
    assert converted[0] == converted[1] != {}
    if to == "hf":
        file = tmp_path / name
        file.write_text(text)
        assert read_arguments(file).settings["recipe"] == recipe


@installed
@pytest.mark.whole
def test_an_exported_loop_in_fp8_trains_as_ours(tmp_path: Path) -> None:
    needs_techniques("fp8")
    job = job_in(tmp_path / "model", "llama")
    script = namespace(export(job, Recipe.parse("fp8"), "torch"), "train.py")
    torch.manual_seed(0)
    _, losses = script["train"](samples(job, "fp8"), STEPS, device="cpu", shuffle=False)
    assert losses == ours(job, "fp8", "plain")


@pytest.mark.parametrize("to", ["axolotl", "llamafactory"])
def test_tools_that_cannot_say_fp8_refuse_it_by_name(to: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"fp8: .*other layers"):
        export(job_in(tmp_path / "model", "llama"), Recipe.parse("fp8"), to)


def test_accelerate_s_own_word_is_read_and_the_difference_is_said(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config: {backend: AO}\n")
    reading = read_arguments(file)
    assert reading.settings["recipe"] == "fp8"
    assert not reading.refused
    assert [line for line in reading.differs if "first and the last" in line.says]


@pytest.mark.parametrize("to", ["torch", "accelerate", "hf"])
def test_a_script_sets_the_budget(tmp_path: Path, to: str) -> None:
    job = job_in(tmp_path / "model", "llama")
    made = export(job, Recipe.parse("compiled + budget(0.5)"), to)
    scope = namespace(made, next(iter(made.files)))
    with functorch.patch(activation_memory_budget=1.0):
        scope["build_model"](*([] if to == "hf" else [torch.device("cpu")]))
        assert functorch.activation_memory_budget == 0.5


def test_a_script_of_layers_with_dropout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="dropout"):
        export(small_job("bert"), Recipe.parse("compiled + budget(0.5)"), "torch")


@pytest.mark.parametrize("compiles", ["for layer in model.modules():\n    layer.compile()", ""])
def test_a_script_s_budget_is_read(tmp_path: Path, compiles: str) -> None:
    file = tmp_path / "train.py"
    whole = "" if compiles else ", torch_compile=True"
    file.write_text(
        f"torch._functorch.config.activation_memory_budget = 0.5\n{compiles}\n"
        f"args = TrainingArguments('x'{whole})"
    )
    reading = read_arguments(file)
    assert not reading.refused
    what = "compiled" if compiles else "compiled(what=model, autocast=within)"
    assert reading.settings["recipe"] == f"{what} + budget(0.5) + adamw_fused"


@pytest.mark.parametrize("target", ["hf", "torch", "trl"])
@pytest.mark.parametrize("recipe", ["first_layers(1)", "host(all, layers=1)"])
def test_layers_that_differ_are_refused_by_name(target: str, recipe: str) -> None:
    needs_techniques(recipe)
    with pytest.raises(RecipeError, match=re.escape(recipe.partition("(")[0])):
        export(small_job("gpt2", 2), Recipe.parse(recipe), target)


def test_no_script_has_fused_kernels() -> None:
    with pytest.raises(RecipeError, match="fused cannot be exported: its kernels are snugfit's own code"):
        export(small_job("bert", 2), Recipe.parse("fused"), "torch")


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({"optim_target_modules": "all-linear"}, "galore(targets=all-linear)"),
        ({"optim_target_modules": "all_linear"}, "galore(targets=all-linear)"),
        (
            {"optim_target_modules": ["attn", "mlp"], "optim_args": "rank=64,update_proj_gap=100,scale=0.1"},
            "galore(rank=64, update_proj_gap=100, scale=0.1, targets=attn|mlp)",
        ),
        (
            {"optim_target_modules": ["attn"], "optim_args": "proj_type=reverse_std"},
            "galore(proj_type=reverse_std, targets=attn)",
        ),
    ],
)
def test_galore_s_arguments_are_read(tmp_path: Path, given: dict[str, Any], recipe: str) -> None:
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({"output_dir": "x", "optim": "galore_adamw", **given}))
    reading = read_arguments(file)
    assert not reading.refused
    assert reading.settings["recipe"] == recipe
    assert any("galore-torch" in line.says for line in reading.differs)


def test_liger_s_arguments_are_read_and_written(tmp_path: Path) -> None:
    file = tmp_path / "arguments.json"
    given = {"output_dir": "x", "use_liger_kernel": True, "liger_kernel_config": {"rope": False}}
    file.write_text(json.dumps(given))
    reading = read_arguments(file)
    recipe = Recipe.parse(str(reading.settings["recipe"]))
    assert "liger(rope=false)" in str(recipe)
    assert not reading.refused
    written = training_arguments(small_job("llama", 3), recipe)
    assert (written["use_liger_kernel"], written["liger_kernel_config"]) == (True, {"rope": False})


def test_parts_of_a_liger_that_is_off_do_nothing(tmp_path: Path) -> None:
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps({"output_dir": "x", "liger_kernel_config": {"rope": False}}))
    reading = read_arguments(file)
    assert "liger" not in str(reading.settings["recipe"])
    assert [line.key for line in reading.ignored if "liger" in line.key] == ["liger_kernel_config.rope"]


@pytest.fixture
def read_back(tmp_path: Path) -> Any:
    def recipe_of(arguments: dict[str, Any]) -> str:
        file = tmp_path / "arguments.json"
        file.write_text(json.dumps({"output_dir": "x", **arguments}))
        return str(read_arguments(file).settings["recipe"])

    return recipe_of


def test_what_transformers_and_trl_call_it_is_read(read_back: Any) -> None:
    needs_techniques("host")
    kwargs = {"offload": True, "every_n_layers": 2, "use_reentrant": False}
    offloading = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    assert "every_nth_layer + host(checkpoints)" in read_back(offloading)
    assert "host(all)" in read_back({"activation_offloading": True, "packing_strategy": "bfd"})
