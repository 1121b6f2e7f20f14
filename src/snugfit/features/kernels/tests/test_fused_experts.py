"""Experts as grouped products: outputs and gradients of transformers' and peft's own modules, from sizes that
do not depend on the routing.

On the CPU the operations are plain torch; `experts_in_triton.py` compares the kernels with it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bare_process import script_in_triton
from small_models import small_job
from snugfit.features.kernels.decoders.experts import modules
from snugfit.features.kernels.decoders.experts.modules import fuse_experts
from snugfit.features.kernels.fused_model import use_fused
from snugfit.prediction.predict import predict
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from third_step import hold_third_step
from tiers import crossed

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    "num_experts_per_tok": 3,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8
}  # fmt: skip
FEW = {"n_routed_experts": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {**FEW, **LATENT, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**FEW, "head_dim": 8},
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = "lora(r=8, targets=q_proj, parameters=experts.gate_up_proj|experts.down_proj)"


def small(family: str) -> Any:
    """Return a small model of this family in 64 bits, in training, with experts of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.double().train()


def adapted(model: Any, parameters: list[str], **more: Any) -> Any:
    """Return the model with adapters by peft on its experts, whose B are other than zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=9, target_modules=["o_proj"], target_parameters=parameters, init_lora_weights=False,
        **more,
    )  # fmt: skip
    return get_peft_model(model, config)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients by name."""
    model.zero_grad()
    tokens = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach(), **found}


def hold(plain: Any, fused: Any) -> None:
    """Check that loss and gradients are equal in 64 bits, and that our experts computed them."""
    expected, got = gradients(plain), gradients(fused)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        bound = 1e-12 * float(value.abs().max())
        torch.testing.assert_close(got[name], value, rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize(
    ("family", "parameters"), crossed([*FAMILIES], [None, EXPERTS, EXPERTS[:1], EXPERTS[::-1]])
)
def test_experts_and_routers_have_the_gradients_of_transformers(
    family: str, parameters: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small(family) if parameters is None else adapted(small(family), parameters)
    fused = copy.deepcopy(plain)
    assert len(fuse_experts(fused)) == 1
    calls = []
    own = modules.expert_mlp
    monkeypatch.setattr(modules, "expert_mlp", lambda *given, **more: calls.append(1) or own(*given, **more))
    hold(plain, fused)
    assert len(calls) == (1 if "first_k_dense_replace" in FAMILIES[family] else 2)
    if parameters is None:
        assert any("gate.weight" in name or "router.weight" in name for name in gradients(fused))


def test_gate_and_up_are_computed_again() -> None:
    plain = small("qwen3_moe").float()
    kept, again = copy.deepcopy(plain), copy.deepcopy(plain)
    use_fused(kept)
    use_fused(again, recomputed_mlps=2)
    one, other = gradients(kept), gradients(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("change", ["merge_adapter", "disable_adapter_layers"])
def test_unsupported_adapters_run_peft_s_code(change: str) -> None:
    plain = adapted(small("mixtral"), EXPERTS)
    fused = copy.deepcopy(plain)
    fuse_experts(fused)
    for model in (plain, fused):
        getattr(model.base_model, change)()
    tokens = torch.arange(3, 14)[None]
    torch.testing.assert_close(fused(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_evaluation_runs_the_model_s_own_code() -> None:
    plain = small("gpt_oss").eval()
    fused = copy.deepcopy(plain)
    fuse_experts(fused)
    tokens = torch.arange(3, 14)[None]
    assert torch.equal(fused(input_ids=tokens).logits, plain(input_ids=tokens).logits)


@pytest.mark.whole
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernels_do_what_the_references_do(device: str, tmp_path: Path) -> None:
    """The kernels run in Triton's interpreter, and on a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SNUGFIT_TEST_GPU=1")
    told = script_in_triton(Path(__file__).with_name("experts_in_triton.py"), device, tmp_path / "told")
    assert "compared" in told


# ---- rehearsed -------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("recipe", ["fused", f"{LORA} + fused", f"{LORA} + fused + selective(products)"])
def test_a_real_step_allocates_what_its_trace_says(recipe: str) -> None:
    hold_third_step(small_job("mixtral", 2), Recipe.parse(recipe).setup())


def test_a_step_of_experts_is_recorded() -> None:
    """No size depends on the routing, and no wait for the device remains."""
    job = replace(small_job("mixtral", 2, batch_size=4), dtype="bfloat16")
    setup = Recipe.parse(f"{LORA} + bf16_master + fused + captured").setup()
    trace = rehearse(job, setup, CudaPolicy())
    assert not any("cannot be recorded" in doubt for doubt in trace.doubts)
    played = [kernel.operator for kernel in trace.kernels if kernel.played]
    assert played.count("triton::gate_experts_backward") == 2


def test_adapters_of_experts_take_no_whole_weight() -> None:
    """peft computes the whole update of each expert, and saves the sum for the backward pass."""
    facts = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 16}
    job = replace(small_job("mixtral", 2, facts=facts), dtype="bfloat16")
    peft, ours = (
        predict(job, f"{LORA} + bf16_pure{more}", gpu="h200").footprint.requested_bytes
        for more in ("", " + fused")
    )
    update = 3 * 16 * 256 * 512 * 2
    assert peft - ours > 2 * update
