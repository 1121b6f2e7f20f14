"""Default technique: the model's head computes the logits of all tokens, and then the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class WholeLogits(PlainTechnique):
    """Computes the logits of all tokens, then their loss."""

    source: ClassVar = "torch.nn.functional.cross_entropy of the head's output"
