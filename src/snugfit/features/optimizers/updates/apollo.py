"""APOLLO, written from its paper (Zhu et al., arXiv 2412.05270): each gradient matrix is scaled as AdamW
would scale it on average.

AdamW's change to a matrix's gradient is mostly a factor for each of its columns (or rows, the longer side).
APOLLO finds these factors in a small space. It projects the gradient onto `rank` rows with a fixed random
matrix, and keeps AdamW's moments of the projection.

Nothing of the authors' package, whose licence forbids commercial use, was read.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from snugfit.features.optimizers.updates.matrices import ProjectedAndAdamW, adamw_direction

GROWTH = 1.01
"""Largest allowed ratio of an update's norm to the norm of the previous update."""

SMALLEST = 1e-30
"""Small number added to divisors, so that none is zero."""


class ApolloWithAdamW(ProjectedAndAdamW):
    """APOLLO for the matrices that are larger than its rank, and AdamW for the rest."""

    further: ClassVar = {"rank": 64, "renew": 200}

    def update_matrix(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> torch.Tensor:
        """Return APOLLO's update of a matrix: its gradient, scaled column by column."""
        short = 0 if gradient.shape[0] <= gradient.shape[1] else 1
        rows, rank = gradient.shape[short], group["rank"]
        # `step` already includes this step, so the first step draws a projection.
        if (state["step"] - 1) % group["renew"] == 0:
            projection = torch.randn(rank, rows, dtype=gradient.dtype, device=gradient.device)
            # The projection is part of the state until the next draw, so that a checkpoint contains it.
            state["projection"] = projection.div_(math.sqrt(rank))
        projection = state["projection"]
        small = projection @ gradient if short == 0 else gradient @ projection.t()
        # A projected update is shorter than AdamW's by sqrt(rank / rows). With this factor, one learning rate
        # suits both.
        factors = _column_factors(small.float(), state, group, short).mul_(math.sqrt(rows / rank))
        columns = torch.linalg.vector_norm(gradient, dim=short, keepdim=True)
        length = torch.linalg.vector_norm(columns * factors)
        # The norm of an update may be at most `GROWTH` times the previous one (section 4).
        if "length" in state:
            shorter = (state["length"] * GROWTH).div_(length + SMALLEST).clamp_(max=1.0)
            factors.mul_(shorter)
            length.mul_(shorter)
        state["length"] = length
        return gradient * factors.to(gradient.dtype)


def _column_factors(
    small: torch.Tensor, state: dict[str, Any], group: dict[str, Any], short: int
) -> torch.Tensor:
    """Return a factor for each column of a gradient: the norm of AdamW's update of its projection, divided by
    the norm of the projection.
    """
    update = adamw_direction(small, state, group)
    lengths = [torch.linalg.vector_norm(matrix, dim=short, keepdim=True) for matrix in (update, small)]
    # AdamW's update of the projected gradient, relative to the projected gradient itself.
    factors: torch.Tensor = lengths[0].div_(lengths[1].add_(SMALLEST))
    return factors
