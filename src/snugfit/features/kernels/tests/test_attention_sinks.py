"""Attention with sinks by torch's kernels: numbers and gradients of transformers' eager code."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from snugfit.features.kernels.attention import attend
from snugfit.features.kernels.decoders import sinks as own
from snugfit.features.kernels.decoders.sinks import WITHOUT_PADDING, attend_causally, attend_with_sink_keys
from snugfit.rehearsal.record.kernels import flops_of

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


def assert_equal_gradients(
    got: torch.Tensor, expected: torch.Tensor, leaves: Sequence[torch.Tensor], **bounds: float
) -> None:
    torch.testing.assert_close(got, expected.flatten(2), **bounds)
    slope = torch.randn(got.shape, generator=torch.Generator().manual_seed(0), dtype=got.dtype)
    pair = [torch.autograd.grad(out, leaves, slope.view_as(out)) for out in (got, expected)]
    for ours, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(ours, theirs, **bounds)


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
    # granite_swa computes its softmax in 32 bits.
    bounds = {"rtol": 1e-12, "atol": 1e-12} if family == "gpt_oss" else {"rtol": 1e-5, "atol": 1e-6}
    assert_equal_gradients(attend_with_sink_keys(heads, sinks, mask, 0.3), expected, leaves, **bounds)


def scores_of(
    query: torch.Tensor, key: torch.Tensor, ends: torch.Tensor, scaling: float, sides: dict[str, int]
) -> torch.Tensor:
    """Return the scores (H, N, N) of each token with those that it attends to."""
    order = torch.arange(len(query))
    sequence = torch.bucketize(order, ends, right=True)
    near = order[:, None] - order <= sides.get("window_size_left", len(query))
    visible = (sequence[:, None] == sequence) & (order[:, None] >= order) & near
    scores = torch.einsum("nhd,mhd->hnm", query, ungrouped(key)) * scaling
    return scores.masked_fill(~visible, -torch.inf)


def ungrouped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(GROUPS, dim=1)


def flash(rows: Any, ends: Any, longest: int, scaling: float, sides: Any) -> tuple[torch.Tensor, ...]:
    """Compute what FlashAttention's forward pass returns."""
    query, key, value = rows
    scores = scores_of(query, key, ends, scaling, sides)
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), ungrouped(value))
    return out, scores.logsumexp(-1), torch.empty(0), torch.empty(0)


def flash_backward(
    slope: torch.Tensor, saved: Any, ends: Any, longest: int, scaling: float, sides: Any
) -> tuple[torch.Tensor, ...]:
    """Compute what FlashAttention's backward pass returns for this output and these sums (Dao et al.,
    arXiv 2205.14135, algorithm 4)."""
    query, key, value, out, sums, *_ = saved
    shares = (scores_of(query, key, ends, scaling, sides) - sums[:, :, None]).exp()
    products = torch.einsum("nhd,mhd->hnm", slope, ungrouped(value))
    of_scores = shares * (products - (slope * out).sum(-1).t()[:, :, None]) * scaling
    of_query = torch.einsum("hnm,mhd->nhd", of_scores, ungrouped(key))
    of_key = torch.einsum("hnm,nhd->mhd", of_scores, query)
    of_value = torch.einsum("hnm,nhd->mhd", shares, slope)
    groups = [tensor.unflatten(1, (-1, GROUPS)).sum(2) for tensor in (of_key, of_value)]
    return of_query, *groups


@pytest.mark.parametrize("window", [None, 4, 64])
def test_the_correction_of_flash_attention_gives_eager_attention(window: int | None) -> None:
    file = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    heads, sinks, _ = inputs(9, torch.float64)
    visible = torch.ones(9, 9).tril().triu(1 - (window or 9)).bool()
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    leaves = [tensor.requires_grad_() for tensor in (*heads, sinks)]
    owner = module()
    owner.sinks = sinks
    expected, _ = file.eager_attention_forward(owner, *heads, mask, scaling=0.3)
    with patch.object(own, "flash", flash), patch.object(own, "flash_backward", flash_backward):
        got = attend_causally(heads, sinks, 0.3, window)
        assert_equal_gradients(got, expected, leaves, rtol=1e-11, atol=1e-11)


def test_calls_with_another_form_run_the_model_s_own_code() -> None:
    heads, sinks, mask = inputs(8, torch.float32)
    known = {"s_aux": sinks}
    assert own.attend(module(), heads, mask, 0.0, 0.3, known) is not None
    for changed in (
        (module(output_attentions=True), heads, mask, 0.0),
        (module(), heads, None, 0.0),
        (module(), heads, mask.bool(), 0.0),
        (module(), heads, mask, 0.1),
    ):
        assert own.attend(*changed, 0.3, known) is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_module_s_call_uses_the_kernels(whole: bool) -> None:
    """A call that is known to have no padding brings no mask, and gets a causal one with a window."""
    file = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    heads, sinks, mask = inputs(8, torch.float32)
    known = {"s_aux": sinks, "sliding_window": 3, WITHOUT_PADDING: whole}
    if whole:
        mask = own.mask_of(heads[0], None, known)
        assert mask[0, 0].eq(0).equal(torch.ones(8, 8).tril().triu(-2).bool())
    owner = type("Attention", (SimpleNamespace,), {"__module__": file.__name__})(**vars(module()))
    owner.sinks = sinks
    with patch.object(own, "attend_with_sink_keys", wraps=attend_with_sink_keys) as ours:
        out, scores = attend(owner, heads, None if whole else mask, 0.0, 0.3, known)
    assert ours.call_count == 1
    assert scores is None
    expected, _ = file.eager_attention_forward(owner, *heads, mask, scaling=0.3)
    torch.testing.assert_close(out, expected.flatten(2))


@pytest.mark.parametrize(("window", "most"), [(1023, 1.0), (127, 0.45)])
def test_flops_leave_out_tokens_before_a_window(window: int, most: float) -> None:
    operator = torch.ops.aten._flash_attention_forward.default
    rows = [torch.empty(1024, 4, 16, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    arguments = (*rows, ends, ends, 1024, 1024, 0.0, True, False)
    out = operator(*arguments)
    whole = flops_of(operator, arguments, {}, out)
    part = flops_of(operator, arguments, {"window_size_left": window, "window_size_right": 0}, out)
    assert whole
    assert 128 / 1024 * whole < part <= most * whole  # type: ignore[operator]
