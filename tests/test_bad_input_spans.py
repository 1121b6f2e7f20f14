"""Layers that cannot be recomputed in spans are refused by name, and never joined wrongly.

The first layers of a span pass only their input on. A model that expects a tuple of them would unpack a
tensor. A model that changes the hidden state between two layers would silently compute something else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from snugfit.errors import RecipeError, SnugfitError
from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.step.checkpointing import checkpoint_layers
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import CheckpointWish

SPAN = CheckpointWish(layers_per_span=0, spans=1)
SMALL = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip


class Layers(nn.Module):
    """Four layers with one of several calling conventions."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.manner = manner
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for index, layer in enumerate(self.layers):
            if self.manner == "skips" and index == 2:
                continue
            if self.manner == "by keyword":
                hidden = layer(input=hidden)
            elif self.manner == "first of a tuple":
                hidden = layer(hidden)[0]
            elif self.manner == "unpacks":
                hidden, _ = layer(hidden)
            else:
                hidden = layer(hidden)
            if self.manner == "adds":
                hidden = hidden + 1
            if self.manner == "raises" and index == 1:
                raise KeyError("missing")
        if self.manner == "raises after":
            raise KeyError("missing")
        return hidden.sum()


@pytest.mark.parametrize("manner", ["skips", "by keyword", "first of a tuple", "unpacks", "adds", "raises"])
@pytest.mark.parametrize("rows", [2, 3])
def test_what_cannot_be_joined_is_refused(manner: str, rows: int) -> None:
    """With two rows a tensor unpacks like a pair, so the shape alone does not show the error."""
    model = Layers(manner)
    checkpoint_layers(model, SPAN)
    with pytest.raises(RecipeError, match=r"Linear passes on more.*each layer on its own"):
        model(torch.ones(rows, 4))


def test_an_error_of_the_model_s_own_stays_its_own() -> None:
    model = Layers("raises after")
    checkpoint_layers(model, SPAN)
    with pytest.raises(KeyError, match="missing"):
        model(torch.ones(2, 4))


def test_layers_that_can_be_joined_give_the_same_gradients_again_and_again() -> None:
    torch.manual_seed(0)
    model = Layers("plainly")
    x = torch.randn(3, 4)
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    checkpoint_layers(model, SPAN)
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with torch.no_grad():
        assert model(x).shape == ()


def trace_of(model_type: str, facts: dict[str, Any], recipe: str, *, batch: int = 3) -> Trace:
    model = Model.from_config(check_facts({"model_type": model_type, **facts}, where="tiny"), name="tiny")
    job = Job(model=model, task=Task.SEQ2SEQ_LM, batch_size=batch, sequence_length=16, target_length=8)
    return rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())


@pytest.mark.parametrize(("model_type", "more"), [
    ("fsmt", {"src_vocab_size": 96, "tgt_vocab_size": 96, "langs": ["en", "de"]}),
    ("mvp", {}),
    ("pegasus_x", {}),
])  # fmt: skip
@pytest.mark.parametrize("batch", [2, 3])
def test_real_models_whose_layers_give_tuples_are_refused(
    model_type: str, more: dict[str, Any], batch: int
) -> None:
    with pytest.raises(RecipeError, match="passes on more than its hidden states"):
        trace_of(model_type, SMALL | more, "segments(1)", batch=batch)


def test_real_models_whose_layers_give_a_tensor_are_joined() -> None:
    """The layers' first norm runs in the forward pass, and again in the backward pass."""

    def phases(recipe: str) -> set[str]:
        blocks = trace_of("bart", SMALL, recipe).blocks
        return {block.phase for block in blocks if block.operator == "aten::native_layer_norm"}

    assert phases("plain") == {"forward"}
    assert phases("segments(1)") == {"forward", "backward"}


def test_a_model_that_transformers_cannot_checkpoint_is_refused() -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=96))
    model.supports_gradient_checkpointing = False
    with pytest.raises(SnugfitError, match=r"BertModel does not support .*says transformers. Try 'keep_all'"):
        checkpoint_layers(model, CheckpointWish())
