"""Attention as transformers' models call it: by the name that the model's config says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def attend(
    module: Any,
    heads: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    keywords: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What attention gives for queries, keys and values (B, heads, S, width): (B, S, heads * width), and the
    scores where the implementation has them. `keywords` are those that the module was called with."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = sys.modules[type(module).__module__].eager_attention_forward
    run = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    query, key, value = heads
    dropout = dropout if module.training else 0.0
    out, scores = run(module, query, key, value, mask, dropout=dropout, scaling=scaling, **keywords)
    return out.reshape(*out.shape[:-2], -1), scores
