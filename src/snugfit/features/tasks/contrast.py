"""The loss of text embeddings: each text is compared with the partners of all texts in the batch.

transformers' encoders have no such loss. The model's forward pass is replaced, so that weights keep their
names, and checkpoints are those of the encoder. The loss is `MultipleNegativesRankingLoss` of
sentence-transformers: the cross-entropy of scaled cosine similarities between the means of hidden states. As
there, the encoder runs once for the first texts and once for their partners. On several GPUs each compares
the pairs of its own batch (`gather_across_devices=False`, the default there).

| texts of a batch                 | shape           |
|----------------------------------|-----------------|
| input_ids, attention_mask        | (B, 2, S)       |
| embeddings of first and of second| (B, H) each     |
| logits: similarities             | (B, B)          |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from snugfit.step.own_forward import OwnForward, forward_of

if TYPE_CHECKING:
    import torch
    from torch import nn

SCALE = 20.0
"""Factor of cosine similarities in logits: the default of `MultipleNegativesRankingLoss`."""

TEXTS = 2
"""Number of texts in a sample: a text and its partner, such as a question and a passage."""


def add_contrastive_loss(model: Any) -> nn.Module:
    """Replace an encoder's forward pass by one that takes pairs of texts and returns the contrastive loss.
    Return the encoder.
    """
    encoder: nn.Module = model
    # The loss uses no output of a pooler, and DDP waits for a gradient of each weight that trains.
    if (pooler := getattr(encoder, "pooler", None)) is not None:
        pooler.requires_grad_(False)
    encoder.forward = OwnForward(partial(_compare, forward_of(encoder)), encoder)
    return encoder


def _compare(
    encode: Callable[..., Any],
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **more: torch.Tensor,
) -> dict[str, torch.Tensor]:
    import torch
    from torch.nn import functional

    embeddings = []
    for text in range(input_ids.shape[1]):
        mask = None if attention_mask is None else attention_mask[:, text]
        given = {name: value[:, text] for name, value in more.items()}
        hidden = encode(input_ids=input_ids[:, text], attention_mask=mask, **given)
        embeddings.append(functional.normalize(_mean(hidden[0], mask), dim=-1))
    logits = embeddings[0] @ torch.cat(embeddings[1:]).transpose(0, 1) * SCALE
    # The partner of each text is in the same row of the batch.
    labels = torch.arange(len(logits), device=logits.device)
    return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _mean(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of the hidden states (B, S, H) of tokens that are not padding, (B, H)."""
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
