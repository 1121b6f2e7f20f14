"""The dtype in which weights are loaded: its sources, the effect of a recipe, and the messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from small_models import FAMILIES, small_job
from snugfit.cli.main import run
from snugfit.errors import JobError, RecipeError
from snugfit.job.build import instantiate
from snugfit.job.job import Job, Phase, Task
from snugfit.job.model import Model
from snugfit.planning.keep import kept_of
from snugfit.planning.search.space import space_of
from snugfit.prediction.predict import predict
from snugfit.rehearsal import few_layers
from snugfit.report.text.job import dtype_note
from snugfit.step.applier import change_live
from snugfit.step.build import build_model
from snugfit.step.wishes.handler import LiveTraining
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot

FACTS = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def tiny(folder: Path, *, weights: str | None = None, **keys: Any) -> Model:
    """Return the model of a folder, with weights in this dtype if one is given."""
    (folder / "config.json").write_text(json.dumps(FACTS | keys))
    if weights:
        from safetensors.torch import save_file

        weight = torch.zeros(2).to(getattr(torch, weights))
        save_file({"a.index": torch.zeros(2, dtype=torch.long), "b": weight}, folder / "model.safetensors")
    return Model.find(folder)


def job_of(model: Model, **changes: Any) -> Job:
    return Job(model=model, task=Task.CAUSAL_LM, **({"sequence_length": 32} | changes))


@pytest.mark.parametrize(
    ("keys", "weights", "expected"),
    [
        ({}, None, "float32"),
        ({"dtype": "bfloat16"}, None, "bfloat16"),
        ({"torch_dtype": "half"}, None, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "float16", "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, None, "bfloat16"),
        ({}, "float16", "float16"),
    ],
)
def test_a_folder_is_loaded_as_transformers_loads_it(
    tmp_path: Path, keys: dict[str, Any], weights: str | None, expected: str
) -> None:
    assert job_of(tiny(tmp_path, weights=weights, **keys)).dtype == expected


def test_a_preset_s_job_is_in_the_dtype_of_its_checkpoint_unless_another_is_asked_for() -> None:
    model = Model.find("meta-llama/Llama-3.1-8B")
    job, asked = job_of(model), job_of(model, dtype="float32")
    assert (job.dtype, asked.dtype) == ("bfloat16", "float32")
    assert dtype_note(job) == "bfloat16 weights, as the checkpoint"
    assert dtype_note(asked) == "float32 weights, not bfloat16"
    assert job_of(model, dtype="torch.float16").dtype == job_of(model, dtype=torch.float16).dtype == "float16"
    assert Job.from_json(job.to_json()) == job
    earlier = job.to_json()
    del earlier["dtype"], earlier["model"]["dtype"]
    assert Job.from_json(earlier).dtype == "float32"


def test_a_dtype_that_no_weights_are_loaded_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="float32, bfloat16, float16, and auto"):
        job_of(tiny(tmp_path), dtype="int8")
    with pytest.raises(JobError, match="'float64', as the checkpoint"):
        job_of(tiny(tmp_path, dtype="float64"))
    module = Model.from_module(nn.Linear(2, 2).bfloat16(), {"input": torch.ones(4, 2)})
    assert Job(model=module, task=Task.CUSTOM).dtype == "bfloat16"
    with pytest.raises(JobError, match="Cast the module itself"):
        Job(model=module, task=Task.CUSTOM, dtype="float32")


def test_what_is_loaded_in_bf16_takes_what_pure_bf16_takes(tmp_path: Path) -> None:
    model = tiny(tmp_path, dtype="bfloat16")

    def footprint(dtype: str, recipe: str) -> Any:
        return predict(job_of(model, dtype=dtype), recipe, gpu="rtx 4090").footprint

    assert footprint("auto", "plain") == footprint("float32", "bf16_pure")
    assert footprint("auto", "fp32") == footprint("float32", "plain")


def test_adapters_are_fp32_beside_weights_of_16_bits(tmp_path: Path) -> None:
    model = tiny(tmp_path, dtype="bfloat16")
    for dtype, recipe in (("auto", "lora"), ("float32", "lora + bf16_pure"), ("auto", "lora + bf16")):
        built = build_model(job_of(model, dtype=dtype), Recipe.parse(recipe).setup(), torch.device("meta"))
        dtypes = {(weight.requires_grad, weight.dtype) for weight in built.parameters()}
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}, recipe


def test_the_scaler_of_fp16_takes_what_trains_in_fp32_alone(tmp_path: Path) -> None:
    job = job_of(tiny(tmp_path, dtype="bfloat16"))
    with pytest.raises(RecipeError, match=r"loaded in bfloat16.*unscale FP16 gradients.*--dtype float32"):
        Recipe.parse("fp16").check(job)
    Recipe.parse("fp16 + lora").check(job)
    Recipe.parse("fp16").check(replace(job, dtype="float32"))


def test_a_plan_leaves_out_what_changes_nothing(tmp_path: Path) -> None:
    job = job_of(tiny(tmp_path, dtype="bfloat16"))
    for dtype, names, why in (
        (
            "bfloat16",
            {"as_loaded", "bf16", "bf16_master"},
            {"bf16_pure": "already", "fp32": "twice", "fp16": "never faster"},
        ),
        (
            "float32",
            {"as_loaded", "bf16", "bf16_pure", "bf16_master"},
            {"fp32": "already", "fp16": "never faster"},
        ),
    ):
        fixed = kept_of(job, {slot: Recipe()[slot] for slot in Slot if slot != "precision"})
        asked = replace(job, dtype=dtype)
        # this GPU is too old for fp8
        space = space_of(asked, fidelity=Fidelity.LEARNS, capability=(8, 0), fixed=fixed)
        assert {candidate.recipe[Slot.PRECISION].name for candidate in space.candidates} == names
        excluded = {one.what: one.why for one in space.excluded}
        assert all(text in excluded[name] for name, text in why.items())


def test_updates_that_16_bits_lose_are_said_once(tmp_path: Path) -> None:
    job = job_of(tiny(tmp_path, dtype="bfloat16"))

    def lost(job: Job, recipe: str) -> int:
        return sum("1/256" in text for text in Recipe.parse(recipe).check(job, (8, 9)))

    assert [lost(job, recipe) for recipe in ("plain", "bf16", "lora", "fp32")] == [1, 1, 0, 0]
    in_fp32 = replace(job, dtype="float32")
    assert [lost(in_fp32, recipe) for recipe in ("plain", "bf16", "bf16_pure")] == [0, 0, 1]
    assert lost(replace(job, phase=Phase.EVALUATE), "plain") == 0
    assert sum("1/256" in text for text in predict(job, gpu="rtx 4090").doubts) == 1


@pytest.mark.parametrize(
    ("recipe", "frozen"), [("plain", torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_a_live_model_keeps_its_dtype_unless_a_cast_is_named(
    tmp_path: Path, recipe: str, frozen: torch.dtype
) -> None:
    job, chosen = job_of(tiny(tmp_path, dtype="bfloat16")), Recipe.parse(recipe)
    model: Any = build_model(job, Recipe.parse("lora").setup(), torch.device("cpu"))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    live = LiveTraining(front_end="custom_loop", recipe=chosen, model=model, device=torch.device("cpu"))
    lines = change_live(live, chosen.setup(), skip={Slot.ATTENTION})
    assert {weight.dtype for weight in model.parameters() if not weight.requires_grad} == {frozen}
    after = [weight for weight in model.parameters() if weight.requires_grad]
    assert [id(weight) for weight in after] == [id(weight) for weight in trained], "an optimizer holds them"
    assert {weight.dtype for weight in after} == {torch.float32}
    assert len(lines) == (frozen is torch.float32)


def test_the_command_takes_a_dtype_and_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path, dtype="bfloat16")
    (tmp_path / "job.yaml").write_text(f"model: {tmp_path}\nsequence_length: 32\ndtype: float32\n")
    asked = ["predict", "--job", str(tmp_path / "job.yaml"), "--gpu", "v100-16gb", "-v"]
    for more, says in (
        ([], "float32 weights, not bfloat16"),
        (["--dtype", "fp16"], "float16 weights, not bfloat16"),
        (["--dtype", "auto"], "bfloat16 weights, as the checkpoint"),
    ):
        assert run([*asked, *more]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert says in shown
        assert ("which this GPU emulates slowly" in shown) == ("auto" in more)
    assert run([*asked, "--dtype", "int4"]) == 2
    assert "float32, bfloat16, float16, and auto" in capsys.readouterr().err


def test_a_plan_says_first_that_a_technique_changes_nothing(tmp_path: Path) -> None:
    job = job_of(tiny(tmp_path, dtype="bfloat16"))
    free = ("adapters", "precision", "optimizer")
    fixed = kept_of(job, {slot: Recipe()[slot] for slot in Slot if slot not in free})
    space = space_of(job, fidelity=Fidelity.ROUNDS, fixed=fixed)
    excluded = {one.what: one.why for one in space.excluded}
    assert "already" in excluded["bf16_pure"]


@pytest.mark.parametrize(
    ("family", "dtype", "kept"),
    [
        ("t5", "float16", ".wo.weight"),
        ("t5", "bfloat16", ""),
        ("glm4_moe", "bfloat16", "e_score_correction_bias"),
        ("gpt2", "float16", ""),
    ],
)
def test_what_transformers_keeps_in_fp32_is_fp32(family: str, dtype: str, kept: str, tmp_path: Path) -> None:
    """A model of random weights, which a prediction uses, has the dtypes of a loaded one."""
    routed = {
        "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 0, "head_dim": 16,
    }  # fmt: skip
    if family in FAMILIES:
        job = small_job(family, 1, sequence_length=8)
    else:
        named = {"model_type": family, "architectures": ["Glm4MoeForCausalLM"]}
        job = job_of(tiny(tmp_path, **named, **routed), sequence_length=8)
    with torch.device("cpu"):
        built = instantiate(replace(job, dtype=dtype), dtype=None, attention="eager")
    built.save_pretrained(tmp_path / "saved")
    loaded = type(built).from_pretrained(tmp_path / "saved", dtype=dtype)
    dtypes = {name: tensor.dtype for name, tensor in built.state_dict().items()}
    assert dtypes == {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    in_fp32 = {name for name, its in dtypes.items() if its == torch.float32}
    assert bool(in_fp32) == bool(kept)
    assert all(kept in name for name in in_fp32)


def test_weights_that_stay_in_fp32_are_predicted_so() -> None:
    """T5 in fp16: `wo` takes four bytes an element."""
    job = small_job("t5", 1, batch_size=1, sequence_length=8)
    half, brain = (predict(replace(job, dtype=name), "sgd", gpu="h200") for name in ("float16", "bfloat16"))
    outputs = 2 * 128 * 64  # one of the encoder, one of the decoder
    assert half.footprint.kinds["weights"] - brain.footprint.kinds["weights"] == 2 * outputs


@pytest.mark.parametrize("copied", ["embed_tokens", "lm_head"])
def test_whole_modules_that_train_beside_adapters_are_cast_with_the_model(copied: str) -> None:
    """Such a copy has no casts of its inputs and outputs; peft's own layers cast theirs."""
    config: Any = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[copied])
    base: Any = instantiate(small_job("llama", 1), dtype="float32", attention="sdpa")
    model = peft.get_peft_model(base, config)
    recipe = Recipe.parse("bf16_pure")
    change_live(
        LiveTraining(front_end="fit", recipe=recipe, model=model, device=torch.device("cpu")), recipe.setup()
    )
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(weight.grad is not None for weight in trained.values())
    assert {name.split(".")[-3]: weight.dtype for name, weight in trained.items()} == {
        "lora_A": torch.float32,
        "lora_B": torch.float32,
        "modules_to_save": torch.bfloat16,
    }


@pytest.mark.parametrize(
    ("recipe", "dtypes"),
    [
        ("plain", {"weights": "float32", "optimizer states": "float32"}),
        ("bf16_pure", {"weights": "bfloat16", "gradients": "bfloat16", "optimizer states": "bfloat16"}),
        pytest.param(
            "bf16_pure + every_layer + micro_batches(2)",
            {"weights": "bfloat16", "gradients": "bfloat16"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_reasons_at_the_peak_name_the_dtype_of_the_bytes(
    recipe: str, dtypes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace of seven layers is made from few layers."""
    monkeypatch.setattr(few_layers, "DEEP", 7)
    monkeypatch.setattr(few_layers, "FEWEST_PERIODS", 2)
    monkeypatch.setattr(few_layers, "WRITTEN_SHARE", 0)
    layers = 7 if "every_layer" in recipe else 2
    reasons = {line.kind: line.reason for line in predict(small_job("llama", layers), recipe).anatomy.kinds}
    for kind, dtype in dtypes.items():
        assert f"in {dtype}" in reasons[kind]
