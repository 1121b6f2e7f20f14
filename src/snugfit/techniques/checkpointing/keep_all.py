"""Every activation that the backward pass needs is kept: autograd's default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import Fidelity, Technique


@dataclass(frozen=True, kw_only=True)
class KeepAll(Technique):
    """Keeps every activation that the backward pass needs."""

    fidelity: ClassVar = Fidelity.SAME
    plain: ClassVar = True
    value: ClassVar = None
    source: ClassVar = "torch.autograd's saved tensors"
    counterparts: ClassVar = (Counterpart(arguments={"activation_checkpointing": False}),)
