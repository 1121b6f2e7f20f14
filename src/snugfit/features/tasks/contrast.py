"""The loss of text embeddings: each text is compared with the partners of all texts in the batch.

transformers' encoders have no such loss. A subclass of the model's own class adds it, so that weights keep
their names, and checkpoints are those of the encoder. The loss is `MultipleNegativesRankingLoss` of
sentence-transformers: the cross-entropy of scaled cosine similarities between the means of hidden states. As
there, the encoder runs once for the first texts and once for their partners.

| texts of a batch                 | shape           |
|----------------------------------|-----------------|
| input_ids, attention_mask        | (B, 2, S)       |
| embeddings of first and of second| (B, H) each     |
| logits: similarities             | (B, B)          |
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

SCALE = 20.0
"""Factor of cosine similarities in logits: the default of `MultipleNegativesRankingLoss`."""

TEXTS = 2
"""Number of texts in a sample: a text and its partner, such as a question and a passage."""


def with_contrastive_loss(model: Any) -> nn.Module:
    """Change the class of a transformers encoder to a subclass with the contrastive loss, and return it."""
    own_class: Any = type(model)
    model.__class__ = _contrastive_class(own_class)
    encoder: nn.Module = model
    return encoder


@cache
def _contrastive_class(encoder: type[Any]) -> type[Any]:
    """Return a subclass of an encoder's class with the same name, whose `forward` takes pairs of texts."""

    def forward(
        self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **more: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        import torch
        from torch.nn import functional

        embeddings = []
        for text in range(input_ids.shape[1]):
            mask = None if attention_mask is None else attention_mask[:, text]
            given = {name: value[:, text] for name, value in more.items()}
            hidden = encoder.forward(self, input_ids=input_ids[:, text], attention_mask=mask, **given)
            embeddings.append(functional.normalize(_mean(hidden[0], mask), dim=-1))
        logits = embeddings[0] @ torch.cat(embeddings[1:]).transpose(0, 1) * SCALE
        # The partner of each text is in the same row of the batch.
        labels = torch.arange(len(logits), device=logits.device)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    return type(encoder.__name__, (encoder,), {"forward": forward, "__module__": encoder.__module__})


def _mean(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of the hidden states (B, S, H) of tokens that are not padding, (B, H)."""
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
