"""Technique of torch's fused attention, whose kernels never store the whole score matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class Sdpa(PlainTechnique):
    """Computes attention by torch's scaled_dot_product_attention, which picks a fused kernel."""

    source: ClassVar = "torch.nn.functional.scaled_dot_product_attention; Dao et al., arXiv 2205.14135"
    elsewhere: ClassVar = ("mem_efficient", "scaled_dot_product_attention")
    counterparts: ClassVar = (Counterpart(arguments={"model.attn_implementation": "sdpa"}),)
