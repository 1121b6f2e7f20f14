"""Attention within each of the sequences that are concatenated to one row.

It uses FlashAttention's kernels for sequences of several lengths in torch (`torch.nn.attention.varlen` calls
the same operator, without dropout). No mask matrix is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from snugfit.errors import RecipeError
from snugfit.features.kernels.attentions import PADDING_FREE
from snugfit.features.kernels.operations.shapes_on_cpu import is_on_cpu

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Register attention within concatenated sequences under a name in transformers. Without a mask function
    of that name, models create no masks.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PADDING_FREE, attend)


MAX_HEAD_SIZE = 256
"""Largest head size that the kernels support."""

HEAD_SIZE_MULTIPLE = 8
"""Supported head sizes are multiples of this number."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each sequence of one row, with the signature of transformers' attention
    functions.

    `query` is (1, H, N, D), `key` and `value` (1, G, N, D); H is a multiple of G. The result is (1, N, H, D).
    Raises `RecipeError` if the model does not pass the ends of sequences, or passes arguments that the
    kernels do not support.
    """
    import torch

    _refuse_unknown(module, query, attention_mask, cu_seq_lens_q, extra)
    assert cu_seq_lens_q is not None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    longest = query.size(2) if max_length_q is None else int(max_length_q)
    # A window of the longest sequence's length hides no token.
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    # Autocast does not cast for this operator, so its operands are cast here.
    dtype = _dtype(value)
    query, key, value = (operand.to(dtype) for operand in (query, key, value))
    if is_on_cpu(query):
        out = _one_by_one(query, key, value, cu_seq_lens_q, dropout, scaling, causal, window)
        return out.transpose(1, 2), None
    width = query.size(-1)
    if dtype not in (torch.bfloat16, torch.float16) or width > MAX_HEAD_SIZE or width % HEAD_SIZE_MULTIPLE:
        raise RecipeError(
            f"{PADDING_FREE} takes bfloat16 or float16 and heads of up to {MAX_HEAD_SIZE} numbers, a "
            f"multiple of {HEAD_SIZE_MULTIPLE}. {type(module).__name__} gives heads of "
            f"{width} numbers in {dtype}. Take 'sdpa'."
        )
    rows = [operand.transpose(1, 2)[0] for operand in (query, key, value)]  # (N, H or G, D)
    # FlashAttention counts neighbours on each side, without the token itself.
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": window - 1}
    if window is not None and causal:
        sides["window_size_right"] = 0
    operator = torch.ops.aten._flash_attention_forward
    # In self-attention, queries and keys have the same sequence boundaries.
    packed = operator(
        *rows, cu_seq_lens_q, cu_seq_lens_q, longest, longest, dropout, causal, False, scale=scaling, **sides
    )[0]
    return packed.unsqueeze(0), None


def _dtype(value: torch.Tensor) -> torch.dtype:
    """Return the dtype of attention: autocast's, as in torch's own attention, or that of the values."""
    import torch

    kind = value.device.type
    if value.dtype is torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return value.dtype


def _refuse_unknown(
    module: Any, query: torch.Tensor, mask: Any, ends: torch.Tensor | None, extra: Mapping[str, Any]
) -> None:
    name = type(module).__name__
    if ends is None or query.size(0) != 1:
        raise RecipeError(
            f"{name} does not know where sequences of a batch end, so {PADDING_FREE} would mix them. Take "
            "'sdpa' for this model; for generation, model.set_attn_implementation('sdpa')."
        )
    unsupported = [
        option for option in ("softcap", "s_aux", "position_bias") if extra.get(option) is not None
    ]
    if mask is not None:
        unsupported.append("a mask of its own")
    if unsupported:
        raise RecipeError(
            f"{name} needs {', '.join(unsupported)}, which {PADDING_FREE} does not have. Try 'sdpa'."
        )


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    dropout: float,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Compute attention on a CPU, which has no kernel for concatenated sequences: (1, H, N, D), one sequence
    at a time.
    """
    import torch

    bounds = ends.tolist()
    grouped = query.size(1) != key.size(1)
    parts = []
    for start, end in pairwise(bounds):
        # The filling of a row may consist of empty sequences.
        if start == end:
            continue
        rows, mask = slice(start, end), None
        if window is not None and window < end - start:
            mask = _window(end - start, window, causal, query.device)
        # The CPU has no such kernel, so sequences are computed one by one.
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, rows].to(value.dtype), key[:, :, rows].to(value.dtype), value[:, :, rows],
                attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scaling,
                enable_gqa=grouped,
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2)


def _window(length: int, window: int, causal: bool, device: torch.device) -> torch.Tensor:
    """Return a mask (S, S), True for each key that a query attends to within the window."""
    import torch

    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    return (distance < window) & (distance >= (0 if causal else 1 - window))
