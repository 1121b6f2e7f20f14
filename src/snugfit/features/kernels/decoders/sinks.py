"""Attention with a sink for each head (gpt-oss) by torch's kernels: one more score in each row's softmax.

Two forms avoid the tensor (S, T) of scores. Without padding, FlashAttention computes attention to tokens
alone, and its sums are then corrected by the sink. With a mask, the sink is one more key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from snugfit.features.kernels.operations.operators import has_kernel

if TYPE_CHECKING:
    import torch

WITHOUT_PADDING = "snugfit_without_padding"
"""Argument of a layer's call that is True if no token of the batch is padding."""


def attend(
    module: Any,
    heads: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    keywords: dict[str, Any],
) -> torch.Tensor | None:
    """Return attention (B, S, H * D) of queries to keys, values and sinks. Return None for a call that needs
    the model's own code.

    Queries are (B, H, S, D), keys and values (B, H / g, S, D), and sinks (H,).
    """
    sinks, window = keywords["s_aux"], keywords.get("sliding_window")
    own = not module.training or dropout or getattr(module.config, "output_attentions", False)
    if keywords.get(WITHOUT_PADDING) and not own and _is_for_flash(heads[0]):
        return attend_causally(heads, sinks, scaling, window)
    mask = mask_of(heads[0], mask, keywords)
    if own or not _is_added(mask, heads):
        return None
    assert mask is not None
    return attend_with_sink_keys(heads, sinks, mask, scaling)


def _is_for_flash(query: torch.Tensor) -> bool:
    """Return True if FlashAttention supports these queries: in 16 bits on a GPU, in heads of its sizes."""
    from snugfit.features.kernels.without_padding.attention import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE

    width = query.size(-1)
    of_size = width <= MAX_HEAD_SIZE and width % HEAD_SIZE_MULTIPLE == 0
    return has_kernel(query) and query.element_size() == 2 and of_size


def mark_whole_batches(model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Forward pre-hook of a decoder: add `WITHOUT_PADDING` to a call that has no mask, no positions and no
    cache, and let it create no masks. Its layers then attend causally to all tokens.

    transformers 5.17 copies a number from the host to create a mask, which a CUDA graph cannot record.
    """
    names = ("attention_mask", "position_ids", "past_key_values")
    if len(arguments) > 1 or any(keywords.get(name) is not None for name in names):
        return None
    masks = dict.fromkeys(model.config.layer_types)
    return arguments, {**keywords, "attention_mask": masks, WITHOUT_PADDING: True}


def mask_of(x: torch.Tensor, mask: torch.Tensor | None, keywords: dict[str, Any]) -> torch.Tensor | None:
    """Return the mask of an attention's call with the input `x` (..., S, N). A call that is known to have no
    padding brings none, and gets a causal one (1, 1, S, S) in the dtype of `x`.
    """
    import torch

    if mask is not None or not keywords.get(WITHOUT_PADDING):
        return mask
    length, window = x.size(-2), keywords.get("sliding_window")
    order = torch.arange(length, device=x.device)
    apart = order[:, None] - order
    hidden = (apart < 0) | (apart >= (window or length))
    causal = torch.zeros(1, 1, length, length, dtype=x.dtype, device=x.device)
    return causal.masked_fill_(hidden, torch.finfo(x.dtype).min)


def attend_causally(
    heads: Sequence[torch.Tensor], sinks: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Return causal attention with sinks (B, S, H * D) by FlashAttention. With a `window`, a token attends to
    so many tokens, itself included.
    """
    import torch

    batch, _, length, _ = heads[0].shape
    # The kernels take the sequences of a batch as one row, and sequences may have a window there.
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in heads]
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=rows[0].device)
    sides = {} if window is None or window >= length else {
        "window_size_left": window - 1, "window_size_right": 0,
    }  # fmt: skip
    out: torch.Tensor = _autograd().apply(*rows, sinks, ends, length, scaling, sides)
    return out.reshape(batch, length, -1)


def flash(
    rows: Sequence[torch.Tensor], ends: torch.Tensor, longest: int, scaling: float, sides: dict[str, int]
) -> tuple[torch.Tensor, ...]:
    """Return causal attention (N, H, D), the logarithm of the sums of exponentials (H, N), and the state of
    random numbers.
    """
    import torch

    operator = torch.ops.aten._flash_attention_forward
    results: tuple[torch.Tensor, ...] = operator(
        *rows, ends, ends, longest, longest, 0.0, True, False, scale=scaling, **sides
    )[:4]
    return results


def flash_backward(
    slope: torch.Tensor,
    saved: Sequence[torch.Tensor],
    ends: torch.Tensor,
    longest: int,
    scaling: float,
    sides: dict[str, int],
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of queries, keys and values. `saved` are these, the output, the logarithm of sums
    and the state of random numbers.
    """
    import torch

    *tensors, state, unused = saved
    operator = torch.ops.aten._flash_attention_backward
    gradients: tuple[torch.Tensor, ...] = operator(
        slope, *tensors, ends, ends, longest, longest, 0.0, True, state, unused, scale=scaling, **sides,
    )  # fmt: skip
    return gradients


@cache
def _autograd() -> Any:
    """Return the autograd Function of `attend_causally`, so that this file needs no torch.

    With l the logarithm of the sum over tokens and s the sink, the sum over both is e^l' = e^l + e^s. The
    output is multiplied by e^(l - l'). The backward pass of FlashAttention reads the output and l' alone, so
    it returns the gradients of attention with the sink. That of s is -e^(s - l') <dy, y>, summed over rows.
    """
    import torch

    class SinkAttention(torch.autograd.Function):
        @staticmethod
        def forward(  # type: ignore[no-untyped-def]
            ctx, query, key, value, sinks, ends, longest, scaling, sides
        ):
            """Return attention with sinks, and save what its backward pass reads."""
            out, sums, state, unused = flash((query, key, value), ends, longest, scaling, sides)
            whole = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])  # (H, N)
            out.mul_((sums - whole).exp_().t().unsqueeze(-1))
            ctx.save_for_backward(query, key, value, out, whole, state, unused, sinks, ends)
            ctx.settings = longest, scaling, sides
            return out

        @staticmethod
        def backward(ctx, slope):  # type: ignore[no-untyped-def]
            """Return the gradients of queries, keys and values, and of trained sinks."""
            *saved, sinks, ends = ctx.saved_tensors
            slope = slope.contiguous()
            gradients = flash_backward(slope, saved, ends, *ctx.settings)
            of_sinks = None
            if ctx.needs_input_grad[3]:
                out, whole = saved[3:5]
                share = (sinks.to(whole.dtype)[:, None] - whole).exp_()  # (H, N)
                products = (slope * out).sum(-1, dtype=whole.dtype)  # (N, H)
                of_sinks = (share * products.t()).sum(1).neg_().to(sinks.dtype)
            return *gradients, of_sinks, None, None, None, None

    return SinkAttention


def _is_added(mask: torch.Tensor | None, heads: Sequence[torch.Tensor]) -> bool:
    """Return True if this mask is added to the scores (S, T) of all tokens."""
    return (
        mask is not None
        and mask.is_floating_point()
        and mask.shape[-2:] == (heads[0].size(2), heads[1].size(2))
    )


SINK_COLUMNS = 8
"""Keys and columns of a head that are added for a sink. The attention kernels need multiples of 8."""

SINK_PARTS = 3
"""Numbers of 16 bits whose sum is one of 32 bits."""


def attend_with_sink_keys(
    heads: Sequence[torch.Tensor], sinks: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return attention of queries (B, H, S, D) to keys and values (B, H / g, T, D), as (B, S, H * D). Each
    head attends also to a sink of the score `sinks` (H,) and the value 0.

    The sink is one more key. It is 1 in the columns after D, and 0 in all others. The queries have
    s / scaling there, in parts whose sum is exact. So torch's kernels compute the softmax over tokens and
    sink, and no tensor (S, T) of scores is written. `mask` (B, 1, S, T) is added to the scores of tokens.
    """
    import torch
    from torch.nn.functional import pad

    query, key, value = heads
    tokens, width, groups = key.size(2), key.size(3), query.size(1) // key.size(1)
    columns = pad(
        _parts(sinks.to(torch.promote_types(sinks.dtype, torch.float32)) / scaling, query.dtype)[
            None, :, None
        ],
        (0, SINK_COLUMNS - SINK_PARTS),
    )
    query = torch.cat([query, columns.expand(*query.shape[:3], -1)], dim=-1)
    # The number of keys is a multiple of 8, so that rows of the mask are aligned.
    added = (0, SINK_COLUMNS, 0, SINK_COLUMNS - tokens % SINK_COLUMNS)
    key, value = (pad(tensor, added).repeat_interleave(groups, dim=1) for tensor in (key, value))
    with torch.no_grad():
        key[:, :, tokens, width : width + SINK_PARTS] = 1.0
    bias = pad(mask.to(query.dtype), (0, added[-1]), value=-torch.inf)
    bias[..., tokens] = 0.0
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return out[..., :width].transpose(1, 2).flatten(2)


def _parts(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of this dtype (H, 3) whose sum is the values (H,), with the gradient at the first."""
    import torch

    first = values.to(dtype)
    parts, rest = (
        [first],
        values.detach().to(torch.promote_types(values.dtype, torch.float32)) - first.detach(),
    )
    while len(parts) < SINK_PARTS:
        parts.append(rest.to(dtype))
        rest = rest - parts[-1]
    return torch.stack(parts, dim=-1)
