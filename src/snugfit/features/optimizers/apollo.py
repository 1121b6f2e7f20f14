"""APOLLO: gradients of hidden layers' matrices, scaled by factors that AdamW yields on a small projection.

State of an m x n matrix, m the smaller: two moments and a projection. That is rank x (2n + m) numbers,
against AdamW's 2mn. With rank 64 and a matrix of 4,096 x 4,096 it is a fortieth. Embedding tables, the head,
biases, normalisations and matrices no larger than the rank keep AdamW's two moments. An update multiplies
each matrix once with the projection and needs one temporary of its size. `updates/apollo.py` describes the
algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit.features.optimizers.of_matrices import UPDATES, Projected
from snugfit.techniques.setting import between
from snugfit.techniques.setup import Call, OptimizerWish


@dataclass(frozen=True, kw_only=True)
class Apollo(Projected):
    """Gradients scaled as AdamW scales a small projection of them; AdamW for all but hidden matrices."""

    caveat: ClassVar = (
        "the seconds of its update were measured on no GPU: they follow from its kernels' sizes. "
        "snugfit measure shows yours."
    )
    source: ClassVar = "Zhu et al., arXiv 2412.05270; written from the paper"
    advice: ClassVar = dict.fromkeys(
        ("apollo_adamw", "apollo_adamw_layerwise"),
        "apollo-torch's licence (CC BY-NC 4.0) forbids commercial use, so snugfit does not run it. 'apollo' "
        "is snugfit's own, written from the paper.",
    )

    renew: int = between(1, 1_000_000, default=200)
    """Steps after which another projection is drawn."""

    @property
    def value(self) -> OptimizerWish:
        """Return the setting for APOLLO with AdamW as one optimizer. The HF Trainer uses the authors' package
        instead.
        """
        return OptimizerWish(
            factory=Call(
                path=f"{UPDATES}.apollo:ApolloWithAdamW",
                arguments={"rank": self.rank, "renew": self.renew},
            ),
            prepare=Call(path=f"{UPDATES}.matrices:leave_to_adamw"),
        )
