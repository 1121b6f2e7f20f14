"""4-bit weights under LoRA (QLoRA): trained and resumed, from random weights and from a folder; by `fit` too.

Law 1 of the plain loop goes over the whole roster, and so over this (`test_law_rehearsed_equals_real.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from bare_process import products_of_few_rows
from clean_forks import forks_of
from fitted import killed, losses_of, quiet, spoken, trained, trainer_of
from small_models import small_job
from small_runs import CPU, assert_same_weights, resumed_as_whole, small_run
from snugfit import fit
from snugfit.errors import RecipeError
from snugfit.features.quantized.default_stream import quantize_in_order
from snugfit.features.quantized.four_bit_products import fuses
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.step.build import build_model
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from test_fit_keeping import At, die
from test_law_rehearsed_equals_real import hold_to_reports
from tiers import slow_but

LLAMA = replace(small_job("llama", 2), batch_size=4, sequence_length=16)
ROWS = [{"input_ids": [5 + (7 * row + token) % 90 for token in range(6 + row % 9)]} for row in range(42)]


def run(folder: Path, recipe: str, weights: Path | None = None) -> Any:
    made = small_run(folder, recipe, job=LLAMA, samples=ROWS, max_steps=6, save_steps=2)
    return replace(made, weights=weights)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the weights of a small Llama."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    build_model(LLAMA, Setup(), CPU).save_pretrained(folder)
    return folder


@pytest.mark.whole
@pytest.mark.parametrize(
    ("recipe", "from_folder"),
    slow_but(
        [
            ("qlora(dropout=0.1)", False),
            ("qlora(bits=8)", False),
            ("qlora(dora=true, double=false) + bf16 + every_layer", True),
        ],
        lambda case: case[1],
    ),
)
def test_a_killed_run_goes_on_bit_for_bit(
    recipe: str, from_folder: bool, stored: Path, tmp_path: Path
) -> None:
    weights = stored if from_folder else None
    resumed_as_whole(run(tmp_path, recipe, weights), 5)
    kept = sum(file.stat().st_size for file in (tmp_path / "killed" / "checkpoint-6").glob("*.safetensors"))
    assert kept < 60_000, "adapters alone are kept"


def test_the_device_is_drained_around_each_quantization() -> None:
    """Scales are quantized too: two operators for a weight."""
    from bitsandbytes import functional

    weight, calls = torch.randn(64, 128), []
    expected, state = functional.quantize_4bit(weight, compress_statistics=True)
    with quantize_in_order("CPU", lambda: calls.append(1)):
        packed, other = functional.quantize_4bit(weight, compress_statistics=True)
    assert len(calls) == 4
    assert torch.equal(packed, expected)
    assert torch.equal(other.absmax, state.absmax)
    functional.quantize_4bit(weight)
    assert len(calls) == 4


def test_weights_of_a_folder_are_quantized_as_transformers_does(stored: Path) -> None:
    """All linear layers but the head are quantized. The other weights are fp32 under autocast, and not
    without it."""
    model = build_model(LLAMA, Recipe.parse("qlora + bf16").setup(), CPU, weights=stored)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        stored,
        dtype=torch.bfloat16,
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
    )
    ours = model.get_base_model().state_dict()
    assert model.get_base_model().model.layers[0].mlp.up_proj.weight.dtype is torch.uint8
    for name, weight in theirs.state_dict().items():
        own = ours[name if name in ours else name.replace(".weight", ".base_layer.weight", 1)]
        assert torch.equal(own, weight.to(own.dtype)), name
    floats = {name: one.dtype for name, one in model.named_parameters() if one.is_floating_point()}
    assert set(floats.values()) == {torch.float32}
    pure = build_model(LLAMA, Recipe.parse("qlora + bf16_pure").setup(), CPU, weights=stored)
    assert pure.get_base_model().lm_head.weight.dtype is torch.bfloat16
    assert {one.dtype for one in pure.parameters() if one.requires_grad} == {torch.float32}


def test_a_folder_and_random_weights_take_the_same_bytes(stored: Path) -> None:
    setup = Recipe.parse("qlora + bf16").setup()
    loaded, drawn = build_model(LLAMA, setup, CPU, weights=stored), build_model(LLAMA, setup, CPU)
    sizes = [
        {
            name: (one.shape, one.dtype)
            for name, one in model.state_dict().items()
            if "bitsandbytes" not in name
        }
        for model in (loaded, drawn)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.whole
@pytest.mark.parametrize("recipe", ["qlora(bits=8, targets=all-linear)"])
def test_a_real_step_with_8_bit_weights_allocates_what_its_trace_says(recipe: str) -> None:
    hold_to_reports(LLAMA, Recipe.parse(recipe))


def test_a_weight_of_8_bits_takes_a_byte_and_its_product_a_float16_copy() -> None:
    """A step on a GPU quantizes inputs in float16, and keeps each input for the backward pass."""
    sizes = {}
    for bits in (4, 8):
        recipe = Recipe.parse(f"qlora(bits={bits}, double=false, targets=all-linear)")
        model = build_model(LLAMA, recipe.setup(), torch.device("meta"))
        quantized = [one for one in model.modules() if hasattr(one, "quant_state") or hasattr(one, "state")]
        sizes[bits] = sum(one.weight.numel() for one in quantized)
        assert {one.weight.dtype for one in quantized} == {torch.uint8 if bits == 4 else torch.int8}
    assert sizes[8] == 2 * sizes[4] > 0
    trace = rehearse(LLAMA, Recipe.parse("qlora(bits=8, targets=all-linear)").setup(), CudaPolicy())
    tokens, width = LLAMA.batch_size * LLAMA.sequence_length, LLAMA.model.config["intermediate_size"]
    assert {2 * tokens * width, 4 * tokens * width} <= {block.nbytes for block in trace.blocks}


def test_what_is_kept_beside_a_weight_moves_before_it() -> None:
    """A GPT-2 built on the host and moved to an H100 showed these bytes for its first layer.

    They are code book, scales, their offset, scales and code book, and the packed weight. The bias and two
    adapters follow.
    """
    facts = {"n_embd": 704, "n_head": 11, "n_inner": 2112}
    job = replace(small_job("gpt2", 1, facts), build_on="host")
    trace = rehearse(job, Recipe.parse("qlora(r=64, targets=all-linear)").setup(), CudaPolicy())
    built = [block.nbytes for block in trace.blocks if block.step < 0]
    first = built.index(743_424) - 5
    assert built[first : first + 9] == [64, 23_232, 4, 364, 1024, 743_424, 8448, 180_224, 540_672]


def quantized(stored: Path, seed: int) -> Any:
    """Return a model in 4 bits with adapters, as its user loads it."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        stored, dtype=torch.float32, quantization_config=config
    )
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def fitted(stored: Path, folder: Path, *, seed: int = 1, dies: bool = False) -> Any:
    trainer = trainer_of(folder, quantized(stored, seed), spoken(22), save_strategy="steps", save_steps=2)
    if dies:
        trainer.add_callback(At(3, die))
    return fit(trainer, "micro_batches(2)", watch=quiet)


@pytest.mark.whole
def test_a_users_quantized_model_is_trained_and_resumed(stored: Path, tmp_path: Path) -> None:
    whole = trained(fitted(stored, tmp_path / "whole"))
    killed(fitted(stored, tmp_path / "cut", dies=True))
    resumed = trained(fitted(stored, tmp_path / "cut", seed=2), True)
    assert losses_of(whole) == losses_of(resumed)
    assert_same_weights(whole.model, resumed.model)


def test_fit_refuses_a_model_in_full_precision(stored: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(stored)
    with pytest.raises(RecipeError, match="load_in_4bit=True"):
        fit(trainer_of(tmp_path, model, spoken(22)), "qlora", watch=quiet)


def test_few_rows_are_multiplied_without_a_whole_weight() -> None:
    """The choice is that of bitsandbytes 0.50's own table, for an H200 and an RTX 4090."""
    h200, rtx_4090 = (132, 9, 0), (128, 8, 9)
    for gpu in (h200, rtx_4090):
        assert fuses(*gpu, torch.bfloat16, 1, 4096, 4096)
        assert not fuses(*gpu, torch.bfloat16, 2048, 4096, 4096)


@pytest.mark.whole
def test_products_of_few_rows_are_simulated_in_a_process_that_never_ran_one() -> None:
    """torch's dispatcher caches an operator's object at its first call, without a reference.

    That object was once a function of ours, and worker processes of a plan ended by a segmentation fault.
    """
    forks = forks_of(__name__)
    assert forks.ended(forks.start(products_of_few_rows)) == 0
