"""Compilation settings of other libraries: they are written, read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_exchange_export import STEPS, job_in, namespace, ours, samples

from in_roster import needs_techniques
from snugfit.errors import RecipeError, UsageError
from snugfit.features.exchange.export import export
from snugfit.features.exchange.read import read_arguments
from snugfit.step.checkpointing import layer_stacks
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

needs_techniques("compiled", allow_module_level=True)

WHOLE = "compiled(what=model)"
WITHIN = "compiled(what=model, autocast=within)"
"""Compiled recipe in the form that the Trainer and accelerate compile a model."""


@pytest.mark.parametrize("to", ["torch", "accelerate", "hf"])
def test_a_script_compiles_the_layers_and_nothing_around_them(tmp_path: Path, to: str) -> None:
    job = job_in(tmp_path / "model", "llama")
    made = export(job, Recipe.parse("compiled + every_layer"), to)
    scope = namespace(made, next(iter(made.files)))
    model = scope["build_model"](*([] if to == "hf" else [torch.device("cpu")]))
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert compiled == [layer for stack in layer_stacks(model) for layer in stack]
    assert model.config.use_cache is False


@pytest.mark.whole
@pytest.mark.parametrize(
    "recipe",
    slow_but(
        ["compiled", "compiled + every_layer", "lora(r=4) + compiled", WHOLE],
        lambda recipe: recipe == "compiled + every_layer",
    ),
)
def test_an_exported_loop_trains_as_ours(tmp_path: Path, recipe: str, traced_only: list[str]) -> None:
    job = job_in(tmp_path / "model", "llama")
    script = namespace(export(job, Recipe.parse(recipe), "torch"), "train.py")
    torch.manual_seed(0)
    _, losses = script["train"](samples(job, recipe), STEPS, device="cpu", shuffle=False)
    assert traced_only, "nothing was compiled"
    torch._dynamo.reset()
    if "lora" not in recipe:  # LoRA's adapters are drawn elsewhere
        assert losses == ours(job, recipe, "plain")


@pytest.mark.parametrize("to", ["axolotl", "llamafactory"])
def test_tools_that_compile_whole_models_are_not_told_of_layers(tmp_path: Path, to: str) -> None:
    job = job_in(tmp_path / "model", "llama")
    with pytest.raises(RecipeError, match=r"compiled: .*whole model"):
        export(job, Recipe.parse("compiled"), to)


READ = [
    ("a.json", '{"output_dir": "x", "torch_compile": true}', "torch_compile"),
    ("a.json", '{"output_dir": "x", "torch_compile_backend": "inductor"}', "torch_compile_backend"),
    ("a.json", '{"output_dir": "x", "torch_compile_mode": "default"}', "torch_compile_mode"),
    ("a.yaml", "distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR}",
     "dynamo_config.dynamo_backend"),
    ("a.yml", "base_model: gpt2\ntorch_compile: auto", "torch_compile"),
    ("a.py", "args = TrainingArguments('x')\nmodel = torch.compile(model)", "torch_compile"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "key"), READ)
def test_a_model_that_was_compiled_whole_is_read_as_one(
    tmp_path: Path, name: str, content: str, key: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    reading = read_arguments(file)
    assert not reading.refused
    assert WITHIN in reading.settings["recipe"]
    assert [line for line in reading.took if line.key == key and WITHIN in line.says]
    assert not [line for line in reading.differs if line.key == key]


@pytest.mark.parametrize("recipe", [WITHIN, f"{WITHIN} + budget(0.5)"])
def test_the_trainer_is_told_to_compile_the_model_in_its_arguments(tmp_path: Path, recipe: str) -> None:
    made = export(job_in(tmp_path / "model", "llama"), Recipe.parse(recipe), "hf")
    assert json.loads(made.files["training_arguments.json"])["torch_compile"] is True
    assert ".compile()" not in made.files["training_arguments.py"]
    assert ("activation_memory_budget" in made.files["training_arguments.py"]) is ("budget" in recipe)


def test_accelerate_s_regions_are_layers_and_what_stands_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "distributed_type: 'NO'\n"
        "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_regional_compilation: true}"
    )
    reading = read_arguments(file)
    assert not reading.refused
    assert reading.settings["recipe"].startswith("compiled")
    assert "what=model" not in reading.settings["recipe"]
    assert any("beside the layers" in line.says for line in reading.differs)


OTHERS = ["mode=reduce-overhead", "mode=max-autotune", "mode=max-autotune-no-cudagraphs",
          "backend=cudagraphs", "backend=aot_eager", "backend=eager"]  # fmt: skip


@pytest.mark.parametrize("setting", OTHERS)
def test_modes_and_backends_are_read_where_they_are_written(tmp_path: Path, setting: str) -> None:
    """The Trainer's arguments set them for a whole model, a script's calls of `compile` for layers."""
    job = job_in(tmp_path / "model", "llama")
    name, _, value = setting.partition("=")
    within = f"compiled(what=model, {setting}, autocast=within)"
    made = export(job, Recipe.parse(within), "hf")
    (tmp_path / "a.json").write_text(made.files["training_arguments.json"])
    assert json.loads(made.files["training_arguments.json"])[f"torch_compile_{name}"] == value
    for file in (tmp_path / "a.json", script_in(tmp_path, made.files["training_arguments.py"])):
        reading = read_arguments(file)
        assert not reading.refused
        assert within in reading.settings["recipe"]
    made = export(job, Recipe.parse(f"compiled(what=model, {setting})"), "hf")
    assert (
        f'model.forward = torch.compile(model.forward, {name}="{value}")'
        in made.files["training_arguments.py"]
    )
    assert json.loads(made.files["training_arguments.json"])["torch_compile"] is False
    reading = read_arguments(script_in(tmp_path, made.files["training_arguments.py"]))
    assert not reading.refused
    assert f"compiled(what=model, {setting})" in reading.settings["recipe"]
    made = export(job, Recipe.parse(f"compiled({setting})"), "hf")
    assert f'layer.compile({name}="{value}")' in made.files["training_arguments.py"]
    reading = read_arguments(script_in(tmp_path, made.files["training_arguments.py"]))
    assert not reading.refused
    assert f"compiled({setting})" in reading.settings["recipe"]


def script_in(folder: Path, text: str) -> Path:
    """Return a file with this script."""
    file = folder / "a.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize("setting", OTHERS)
def test_a_launch_file_of_accelerate_says_the_same(tmp_path: Path, setting: str) -> None:
    name, _, value = setting.partition("=")
    said = {"dynamo_backend": "INDUCTOR", f"dynamo_{name}": value.upper() if name == "backend" else value}
    for regional, recipe in (
        (False, f"compiled(what=model, {setting}, autocast=within)"),
        (True, f"compiled({setting})"),
    ):
        file = tmp_path / "a.yaml"
        config = {**said, **({"dynamo_use_regional_compilation": True} if regional else {})}
        file.write_text(f"distributed_type: 'NO'\ndynamo_config: {json.dumps(config)}")
        reading = read_arguments(file)
        assert not reading.refused
        assert recipe in reading.settings["recipe"]


def test_the_trap_of_a_mode_that_switches_compiling_on_is_one_recipe(tmp_path: Path) -> None:
    """A compile mode and its backend are read together as one technique."""
    file = tmp_path / "a.json"
    file.write_text(
        '{"output_dir": "x", "torch_compile_mode": "max-autotune", "torch_compile_backend": "inductor"}'
    )
    recipe = read_arguments(file).settings["recipe"]
    assert "compiled(what=model, mode=max-autotune, autocast=within)" in recipe


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"output_dir": "x", "torch_compile_backend": "nvfuser"}', "no longer has.*inductor"),
        ('{"output_dir": "x", "torch_compile_backend": "ofi"}', "no longer has.*inductor"),
        ('{"output_dir": "x", "torch_compile_backend": "tvm"}', "known are inductor"),
        ('{"output_dir": "x", "torch_compile_mode": "lite"}', "known are default"),
        (
            '{"output_dir": "x", "torch_compile_mode": "reduce-overhead", "torch_compile_backend": "eager"}',
            "only inductor has modes",
        ),
    ],
)
def test_what_is_not_rehearsed_of_it_is_refused(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=told):
        read_arguments(file).refuse()


@pytest.mark.parametrize(
    "words", ["mode=reduce-overhead, backend=eager", "mode=max-autotune, backend=aot_eager"]
)
def test_a_mode_without_inductor_is_one_clear_error(words: str) -> None:
    with pytest.raises(RecipeError, match="has no modes; leave one of them out"):
        Recipe.parse(f"compiled({words})")
