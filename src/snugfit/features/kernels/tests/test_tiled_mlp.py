"""MLPs in tiles of tokens: the gradients of the whole MLP, and no wide tensor of all tokens.

On the CPU the operations are plain torch, of which the products are the same on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_fused_decoders import hold, run, small
from test_lora_kernels import ALL, adapted

from small_models import small_job
from snugfit.errors import RecipeError
from snugfit.features.kernels.fused_model import remove_fused, use_fused
from snugfit.prediction.allocator import replay
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish
from third_step import hold_third_step
from tiers import slow_but

TILE = 4  # the batch of `run` has 14 tokens: three tiles, and two tokens more


def errors(exact: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a gradient relative to its largest entry."""
    return max(
        float((got[name].double() - one).abs().max() / one.abs().max())
        for name, one in exact.items()
        if one is not None
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_tiles_have_the_gradients_of_the_whole(family: str) -> None:
    plain = small(family)
    tiled = copy.deepcopy(plain)
    use_fused(tiled, mlp_tokens=TILE)
    hold(plain, tiled, 2e-5)
    remove_fused(tiled)
    assert not any("mlp_tokens" in vars(module) for module in tiled.modules())


@pytest.mark.parametrize("targets", [ALL, ["down_proj"], ["gate_proj"]])
def test_adapters_in_64_bits_have_the_gradients_of_peft(targets: list[str]) -> None:
    plain = adapted(small("llama").double(), targets)
    whole, tiled = copy.deepcopy(plain), copy.deepcopy(plain)
    use_fused(whole)
    use_fused(tiled, mlp_tokens=TILE)
    exact, of_whole, got = (run(model)[1] for model in (plain, whole, tiled))
    assert {name for name, one in got.items() if one is not None} == {
        name for name, one in exact.items() if one is not None
    }
    # Some inputs of the model's rotation have 32 bits.
    assert errors(exact, got) < 1e-6
    assert errors(of_whole, got) < 1e-13


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_in_16_bits_tiles_are_as_exact_as_the_whole(adapters: bool, autocast: bool) -> None:
    model = small("llama") if autocast else small("llama").bfloat16()
    model = adapted(model, ALL) if adapters else model
    exact = run(copy.deepcopy(model).double())[1]
    total = []
    for tokens in (None, TILE):
        fused = copy.deepcopy(model)
        use_fused(fused, mlp_tokens=tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = run(fused)[1]
        total.append(
            sum(float((got[name] - one).norm() ** 2) for name, one in exact.items() if one is not None)
        )
    assert total[1] < 1.2 * total[0]


@pytest.mark.parametrize("keep", ["", "attention"])
@pytest.mark.parametrize("adapters", [True, False])
def test_a_checkpoint_computes_tiles_twice_and_not_three_times(
    keep: str, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from snugfit.features.kernels.decoders import tiled_mlp

    model = adapted(small("llama"), ALL) if adapters else small("llama")
    use_fused(model, mlp_tokens=TILE)
    expected = run(model)[1]
    expected = {name: None if one is None else one.clone() for name, one in expected.items()}
    model.zero_grad()
    checkpoint_layers(model, CheckpointWish(keep=keep))
    computed = []
    forward = tiled_mlp.activate
    monkeypatch.setattr(tiled_mlp, "activate", lambda *given: computed.append(1) or forward(*given))
    got = run(model)[1]
    assert all(one is None or torch.equal(got[name], one) for name, one in expected.items())
    # Each of two layers has four tiles, and only adapters read the activation in the backward pass.
    assert len(computed) == 2 * 4 * (1 + adapters)


def test_the_peak_has_one_tile_instead_of_all_tokens() -> None:
    job = small_job("llama", 2, facts={"intermediate_size": 4096}, batch_size=1, sequence_length=4096)
    peaks, flops = {}, {}
    for kernels in ("fused", "fused(mlp_tokens=512)"):
        recipe = f"lora(r=4, targets=all-linear) + bf16_pure + chunked_loss(512) + every_layer + {kernels}"
        trace = rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())
        peaks[kernels] = replay(trace).requested_peak
        flops[kernels] = sum(kernel.flops for kernel in trace.kernels)
    whole, tiled = peaks.values()
    width = 2 * job.model.config["intermediate_size"]
    # The product of gate and up, and half as much for the activation, of all tokens but a tile.
    assert whole - tiled >= 1.4 * 2 * (4096 - 512) * width
    # The recomputation of the down projection is left out.
    assert flops["fused(mlp_tokens=512)"] < flops["fused"]


@pytest.mark.parametrize(
    "recipe",
    slow_but(
        [
            "lora(r=4, targets=all-linear) + bf16_pure + every_layer",
            "bf16 + selective(attention)",
            "bf16_pure",
        ],
        2,
    ),
)
@pytest.mark.whole
def test_a_real_step_allocates_what_its_trace_says(recipe: str) -> None:
    hold_third_step(small_job("llama", 2), Recipe.parse(f"{recipe} + fused(mlp_tokens=16)").setup())


@pytest.mark.parametrize(
    ("family", "recipe", "why"),
    [
        ("gpt2", "fused(mlp_tokens=64)", "no MLP of gpt2 is computed in tiles"),
        ("mixtral", "fused(mlp_tokens=64)", "no MLP of mixtral is computed in tiles"),
        ("llama", "selective(products) + fused(mlp_tokens=64)", "keeps the products of all tiles"),
        ("llama", "fused(recomputed_mlps=1, mlp_tokens=64)", "Leave recomputed_mlps out"),
        ("llama", "lora(r=4, dropout=0.1) + fused(mlp_tokens=64)", "Try dropout=0.0"),
    ],
)
def test_unsupported_recipes_have_an_error(family: str, recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.parse(recipe).check(small_job(family, 2), installed=False)


def test_a_model_s_own_adapters_with_dropout_have_an_error() -> None:
    model: Any = adapted(small("llama"), ALL, lora_dropout=0.1)
    with pytest.raises(RecipeError, match=r"fused\(mlp_tokens=4\): adapters of an MLP drop elements"):
        use_fused(model, mlp_tokens=TILE)
