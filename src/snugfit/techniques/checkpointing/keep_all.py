"""Default technique without activation checkpointing: every activation that the backward pass needs is
kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import PlainTechnique


@dataclass(frozen=True, kw_only=True)
class KeepAll(PlainTechnique):
    """Keeps every activation that the backward pass needs."""

    source: ClassVar = "torch.autograd's saved tensors"
    counterparts: ClassVar = (Counterpart(arguments={"activation_checkpointing": False}),)
