"""Models and adapters built on `meta` allocate the same blocks as on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, WhisperConfig, modeling_utils
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from small_models import small_job
from snugfit.rehearsal.device.overrides import DEVICE_OF_CONTEXT, built_as_on_a_device
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Block
from snugfit.techniques.recipe import Recipe


def built(family: str, recipe: str) -> list[Block]:
    """Return the blocks that are born while a small model is built."""
    trace = rehearse(small_job(family), Recipe.parse(recipe).setup(), CudaPolicy())
    return [block for block in trace.blocks if block.phase == "build"]


def test_initialising_makes_tensors_of_its_own() -> None:
    """The constructor computes rotary frequencies, and the initialisation of weights computes them again."""
    angles = [block for block in built("llama", "plain") if block.operator == "aten::reciprocal"]
    assert len(angles) == 2


def test_adapters_of_a_half_precision_model_are_cast_there_and_back() -> None:
    pytest.importorskip("peft")
    casts = {
        recipe: sum(block.operator == "aten::_to_copy" for block in built("llama", recipe))
        for recipe in ("lora + bf16_pure", "lora + bf16", "lora")
    }
    assert casts["lora"] == casts["lora + bf16"]
    assert casts["lora + bf16_pure"] > casts["lora"]


def test_afterwards_everything_is_as_before() -> None:
    def bound() -> tuple[Any, Any]:
        return getattr(modeling_utils, DEVICE_OF_CONTEXT), PreTrainedModel.initialize_weights

    before = bound()
    with built_as_on_a_device():
        assert bound() != before
    assert bound() == before


def test_an_initialisation_that_asks_for_values_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def asks(model: Any, module: Any) -> None:
        asked.append(module)
        torch.empty(1, device="meta").item()

    monkeypatch.setattr(WhisperEncoder, "_init_weights", asks)
    config = WhisperConfig(d_model=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8)
    with built_as_on_a_device(), torch.device("meta"):
        assert WhisperEncoder(config).conv1.weight.is_meta
    assert asked
