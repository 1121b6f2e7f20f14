"""Weights of gpt-oss's experts in MXFP4 under QLoRA: transformers' numbers, and the gradients of unpacked
weights.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from small_models import small_job
from small_runs import CPU, resumed_as_whole, small_run
from snugfit.errors import ModelError, RecipeError
from snugfit.features.kernels.decoders.experts.mxfp4 import Mxfp4Weight, unpack
from snugfit.features.quantized.mxfp4 import random_blocks
from snugfit.job.build import instantiate
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

TARGETS = "targets=q_proj, parameters=experts.gate_up_proj|experts.down_proj"
QLORA = f"qlora(r=8, {TARGETS}, experts=mxfp4) + fused + bf16_pure"

STORED = {"quantization_config": {"quant_method": "mxfp4"}}


def job(**facts: Any) -> Job:
    config = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 96, "hidden_size": 64,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "max_position_embeddings": 64, "layer_types": ["sliding_attention", "full_attention"], **facts,
    }  # fmt: skip
    model = Model.from_config(config, name="small-gpt-oss")
    return Job(model=model, task=Task.CAUSAL_LM, dtype="bfloat16", batch_size=2, sequence_length=16)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients by name."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    tokens = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    trained = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach(), **trained}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unpacked_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 5, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(255, (3, 5, 4), generator=draw, dtype=torch.uint8)
    scales.view(-1)[:4] = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(unpack(blocks, scales, dtype).transpose(1, 2), expected)
    assert torch.equal(Mxfp4Weight(scales, dtype)(blocks), expected)


def test_gradients_are_those_of_the_unpacked_weights() -> None:
    torch.manual_seed(0)
    packed: Any = build_model(job(), Recipe.parse(QLORA).setup(), CPU).train()
    whole = copy.deepcopy(packed)
    count = 0
    for module in list(whole.modules()):
        for name in list(getattr(module, "parametrizations", {})):
            value = getattr(module, name).clone()
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
            assert 0.01 < value.float().std() < 0.04
            count += 1
    assert count == 4
    got, expected = gradients(packed), gradients(whole)
    assert got.keys() == expected.keys()
    assert sum("experts" in name for name in got) == 8
    # A stored weight has other strides than an unpacked one, so the CPU sums in another order.
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=0.02, atol=2e-4, msg=name)


def test_packed_experts_have_seventeen_bytes_for_32_numbers() -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 16}
    plain, packed = (
        dict(predict(job(**wide), recipe, gpu="h200").footprint.kinds)["weights"]
        for recipe in (QLORA.replace(", experts=mxfp4", ""), QLORA)
    )
    numbers = 2 * 16 * 3 * 256 * 512
    assert plain - packed == numbers * 2 - numbers * 17 // 32


def test_a_step_is_recorded() -> None:
    trace = rehearse(job(**STORED), Recipe.parse(f"{QLORA} + captured").setup(), CudaPolicy())
    assert not any("cannot be recorded" in doubt for doubt in trace.doubts)
    assert not any("quantized" in doubt for doubt in trace.doubts)


def write_files(folder: Path) -> dict[str, torch.Tensor]:
    """Write random weights as gpt-oss's files have them, and return the tensors."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    whole = instantiate(job(), dtype="bfloat16", attention="eager")
    stored = {}
    for name, value in whole.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed = random_blocks(value, CPU, 0.02)
            packed[1].random_(115, 125)
            stored |= dict(zip((f"{name}_blocks", f"{name}_scales"), packed, strict=True))
        else:
            stored[name] = value.contiguous()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**job().model.config, **STORED}), encoding="utf-8")
    return stored


def loaded(folder: Path, recipe: str, **facts: Any) -> Any:
    """Return the adapted model with the weights of a folder, whose config has these further keys."""
    return build_model(job(**facts), Recipe.parse(recipe).setup(), CPU, weights=folder)


@pytest.mark.whole
def test_files_of_gpt_oss_are_read_as_they_are(tmp_path: Path) -> None:
    from bitsandbytes.nn import Linear4bit

    stored = write_files(tmp_path / "weights")
    model = loaded(tmp_path / "weights", QLORA, **STORED)
    for number, layer in enumerate(model.get_base_model().model.layers):
        experts = next(
            module for module in layer.modules() if type(module).__name__.endswith("GptOssExperts")
        )
        for name, packed in experts.parametrizations.items():
            at = f"model.layers.{number}.mlp.experts.{name}"
            assert torch.equal(packed.original, stored[f"{at}_blocks"])
            assert torch.equal(packed[0].scales, stored[f"{at}_scales"])
            assert torch.equal(getattr(experts, f"{name}_bias"), stored[f"{at}_bias"])
        assert isinstance(layer.self_attn.k_proj, Linear4bit)
    assert all(bool(value.isfinite().all()) for value in gradients(model.train()).values())


@pytest.mark.whole
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    rows = [{"input_ids": [5 + (7 * row + token) % 90 for token in range(16)]} for row in range(12)]
    resumed_as_whole(small_run(tmp_path, QLORA, job=job(), samples=rows, max_steps=4, save_steps=2), 4)


@pytest.mark.parametrize(
    ("recipe", "facts", "why"),
    [
        (QLORA, {}, "experts=mxfp4 needs weights in that format"),
        ("lora + bf16_pure", STORED, "its weights are quantized"),
    ],
)
def test_weights_in_another_format_are_refused(
    recipe: str, facts: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=why):
        loaded(tmp_path, recipe, **facts)


@pytest.mark.parametrize(
    ("recipe", "family", "why"),
    [
        (QLORA, "mixtral", "experts=mxfp4 is the format of gpt_oss"),
        (QLORA.replace("+ fused ", ""), "gpt_oss", "Add 'fused'"),
    ],
)
def test_unsupported_combinations_are_refused(recipe: str, family: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(
            job() if family == "gpt_oss" else replace(small_job(family, 2), dtype="bfloat16"), installed=False
        )
