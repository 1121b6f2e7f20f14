"""Attention as transformers' models call it: by the name that the model's config says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.step.wishes.kernels.padded import attend_in_stretches

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

    dropout = dropout if module.training else 0.0
    implementation = module.config._attn_implementation
    if implementation == "sdpa" and keywords.get("cu_seq_lens_q") is not None:
        return attend_in_stretches(module, list(heads), dropout, scaling, keywords), None
    eager = sys.modules[type(module).__module__].eager_attention_forward
    run = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    query, key, value = heads
    out, scores = run(module, query, key, value, mask, dropout=dropout, scaling=scaling, **keywords)
    return out.reshape(*out.shape[:-2], -1), scores
