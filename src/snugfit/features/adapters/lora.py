"""Technique `lora`: peft's LoRA on frozen weights in their own dtype. `low_rank.py` describes the
settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.features.adapters.low_rank import ARGUMENTS, LowRank, has_default_targets
from snugfit.techniques.counterpart import Counterpart
from snugfit.techniques.technique import ALL_LINEAR, Fidelity

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Lora(LowRank):
    """Freezes the model and trains low-rank updates of some of its matrices."""

    title: ClassVar = "LoRA"
    fidelity: ClassVar = Fidelity.LEARNS
    needs: ClassVar = ("peft>=0.19",)
    extra: ClassVar = "peft"
    source: ClassVar = "Hu et al., arXiv 2106.09685; peft.LoraConfig"
    elsewhere: ClassVar = ("peft",)
    counterparts: ClassVar = (Counterpart(arguments={**ARGUMENTS}),)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique with common ranks, on peft's default modules and on every linear layer, as
        QLoRA does (arXiv 2305.14314).
        """
        if has_default_targets(job.model):
            yield from (cls(r=rank) for rank in (8, 16, 64))
        yield from (cls(r=rank, targets=(ALL_LINEAR,)) for rank in (8, 64))
