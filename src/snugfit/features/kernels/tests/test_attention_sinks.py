"""Attention with sinks by torch's kernels: numbers and gradients of transformers' eager code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from snugfit.features.kernels import attention
from snugfit.features.kernels.attention import attend, attend_with_sinks, takes_sinks

HEADS, GROUPS, WIDTH = 6, 3, 12


def inputs(length: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return queries, keys and values, the sinks, and a causal mask with a window and padding."""
    draw = torch.Generator().manual_seed(length)
    counts = HEADS, HEADS // GROUPS, HEADS // GROUPS
    heads = [torch.randn(2, count, length, WIDTH, generator=draw, dtype=dtype) for count in counts]
    visible = torch.ones(length, length).tril().triu(-3).bool().expand(2, 1, -1, -1).clone()
    visible[1, :, :, :2] = False
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return heads, torch.randn(HEADS, generator=draw, dtype=dtype), mask


def module(**config: Any) -> Any:
    config = {"_attn_implementation": "eager", **config}
    return SimpleNamespace(training=True, num_key_value_groups=GROUPS, config=SimpleNamespace(**config))


@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa"])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_results_are_those_of_eager_attention(family: str, length: int) -> None:
    file = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    heads, sinks, mask = inputs(length, torch.float64)
    # granite_swa takes the mean of no visible key for a row of padding, which no label counts.
    mask[1, :, :2, 0] = 0.0
    leaves = [tensor.requires_grad_() for tensor in (*heads, sinks)]
    owner = module()
    owner.sinks = sinks
    expected, _ = file.eager_attention_forward(owner, *heads, mask, scaling=0.3)
    got = attend_with_sinks(heads, sinks, mask, 0.3)
    # granite_swa computes its softmax in 32 bits.
    bounds = {"rtol": 1e-12, "atol": 1e-12} if family == "gpt_oss" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got, expected.flatten(2), **bounds)
    slope = torch.randn(got.shape, generator=torch.Generator().manual_seed(0), dtype=got.dtype)
    pair = [torch.autograd.grad(out, leaves, slope.view_as(out)) for out in (got, expected)]
    for ours, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(ours, theirs, **bounds)


def test_calls_with_another_form_run_the_model_s_own_code() -> None:
    heads, sinks, mask = inputs(8, torch.float32)
    known = {"s_aux": sinks}
    assert takes_sinks(module(), heads, mask, 0.0, known)
    for changed in (
        (module(output_attentions=True), heads, mask, 0.0, known),
        (module(), heads, None, 0.0, known),
        (module(), heads, mask.bool(), 0.0, known),
        (module(), heads, mask, 0.1, known),
        (module(), heads, mask, 0.0, {}),
    ):
        assert not takes_sinks(*changed)


def test_a_module_s_call_uses_the_kernels() -> None:
    file = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    heads, sinks, mask = inputs(8, torch.float32)
    owner = type("Attention", (SimpleNamespace,), {"__module__": file.__name__})(**vars(module()))
    owner.sinks = sinks
    with patch.object(attention, "attend_with_sinks", wraps=attend_with_sinks) as ours:
        out, scores = attend(owner, heads, mask, 0.0, 0.3, {"s_aux": sinks})
    assert ours.call_count == 1
    assert scores is None
    expected, _ = file.eager_attention_forward(owner, *heads, mask, scaling=0.3)
    torch.testing.assert_close(out, expected.flatten(2))
