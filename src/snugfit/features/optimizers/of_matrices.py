"""Optimizers of matrices beside AdamW, which need no plan by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.techniques.setting import between
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job

UPDATES = "snugfit.features.optimizers.updates"


@dataclass(frozen=True, kw_only=True)
class OfMatrices(Technique):
    """Another update for the matrices of hidden layers, AdamW for everything else."""

    fidelity: ClassVar = Fidelity.LEARNS
    unplanned: ClassVar = (
        "it is for what a step learns, which is not predicted, so no plan chooses it by itself"
    )


@dataclass(frozen=True, kw_only=True)
class Projected(OfMatrices):
    """An update by projections of gradients onto fewer dimensions."""

    rank: int = between(1, 65_536, default=64)
    """Dimensions of a projection; matrices with no more rows or columns stay AdamW's."""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the default's rank, and a small one."""
        yield from (cls(), cls(rank=8))
