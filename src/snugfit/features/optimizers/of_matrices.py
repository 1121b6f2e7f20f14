"""Base classes of optimizers with their own update for matrices, which no plan chooses by itself."""

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
class MatrixOptimizer(Technique):
    """Base class of optimizers with a special update (such as Muon's) for the matrices of hidden layers, and
    AdamW for everything else.
    """

    fidelity: ClassVar = Fidelity.LEARNS
    unplanned: ClassVar = (
        "it changes the training result, which is not predicted, so no plan chooses it by itself"
    )


@dataclass(frozen=True, kw_only=True)
class Projected(MatrixOptimizer):
    """Base class of optimizers that project gradients onto fewer dimensions."""

    rank: int = between(1, 65_536, default=64)
    """Dimensions of a projection; matrices with no more rows or columns stay AdamW's."""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique with the default rank, and with a smaller one."""
        yield from (cls(), cls(rank=8))
