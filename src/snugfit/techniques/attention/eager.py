"""Technique of eager attention: scores, softmax, dropout and product are separate tensors.

The score matrix takes batch x heads x length x length elements, several times over. Models computed attention
so before fused kernels existed, and older published figures were measured with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Eager(Technique):
    """Computes attention step by step, with the score matrix in memory."""

    fidelity: ClassVar = Fidelity.SAME
    value: ClassVar = "eager"
    source: ClassVar = "Vaswani et al., arXiv 1706.03762; transformers' eager_attention_forward"
    elsewhere: ClassVar = ("math_attention", "vanilla_attention")
    counterparts: ClassVar = (Counterpart(arguments={"model.attn_implementation": "eager"}),)
