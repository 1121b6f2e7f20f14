"""APOLLO: gradients of hidden layers' matrices, scaled by what AdamW does to a small projection of them.

State of an m x n matrix, m the smaller: two moments and a projection, rank x (2n + m) numbers against AdamW's
2mn; of rank 64 in a matrix of 4,096 x 4,096 a fortieth. Embedding tables, the head, biases, normalisations
and matrices no larger than the rank keep AdamW's two moments. An update multiplies each matrix once with the
projection and needs one temporary of its size. How it works stands in `step/wishes/apollo.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.techniques.setting import between
from snugfit.techniques.setup import Call, OptimizerWish, Setup
from snugfit.techniques.technique import Fidelity, Technique

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Apollo(Technique):
    """Gradients scaled as AdamW scales a small projection of them; AdamW for all but hidden matrices."""

    fidelity: ClassVar = Fidelity.LEARNS
    source: ClassVar = "Zhu et al., arXiv 2412.05270; written from the paper"

    rank: int = between(1, 65_536, default=64)
    """Rows of the projection; matrices with no more of either stay AdamW's."""

    renew: int = between(1, 1_000_000, default=200)
    """Steps after which another projection is drawn."""

    def install(self, setup: Setup) -> Setup:
        """APOLLO and AdamW as one optimizer; the HF Trainer's is the authors' package."""
        wish = OptimizerWish(
            factory=Call(
                path="snugfit.step.wishes.apollo:ApolloWithAdamW",
                arguments={"rank": self.rank, "renew": self.renew},
            ),
            prepare=Call(path="snugfit.step.muon:leave_to_adamw"),
        )
        return setup.with_fields(optimizer=wish)

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """The default's rank, and a small one."""
        yield from (cls(), cls(rank=8))

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """What it learns in a step is not predicted, and nothing of it was measured."""
        return "it is for what a step learns, which is not predicted, so no plan chooses it by itself"

    def warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        """Its kernels' rates are those of others."""
        yield "the seconds of its update were measured on no GPU: they follow from its kernels' sizes."
