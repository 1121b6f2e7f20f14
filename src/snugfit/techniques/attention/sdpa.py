"""torch's fused attention: the score matrix is never whole in memory where a fused kernel takes the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class Sdpa(Technique):
    """Computes attention by torch's scaled_dot_product_attention, which picks a fused kernel."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    source: ClassVar = "torch.nn.functional.scaled_dot_product_attention; Dao et al., arXiv 2205.14135"
    elsewhere: ClassVar = ("flash_attention_2", "flash_attention", "flash_attn", "flash", "mem_efficient")
    counterparts: ClassVar = (
        Counterpart(arguments={"model.attn_implementation": "sdpa"}),
        Counterpart(
            arguments={"model.attn_implementation": "flash_attention_2"},
            note="torch chooses the same flash kernel for 16-bit inputs without padding. With padding, "
            "flash_attention_2 skips it and torch does not",
        ),
    )

    def install(self, setup: Setup) -> Setup:
        """Chooses transformers' default implementation by name."""
        return replace(setup, attention="sdpa")
