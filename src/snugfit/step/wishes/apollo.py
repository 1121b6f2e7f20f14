"""APOLLO, written from its paper (Zhu et al., arXiv 2412.05270): gradients scaled as AdamW would, on average.

What AdamW does to a matrix's gradient is mostly a factor for each of its columns (or rows, the longer side).
APOLLO finds these factors in a small space: a fixed random projection of the gradient onto `rank` rows has
AdamW's moments, and how much longer AdamW's update of it is in each column than the projection itself is the
factor of that column. Such an update is shorter than AdamW's by the root of rank over rows, which is put
right here, so that a learning rate that suits AdamW suits both. The projection is drawn anew every `renew`
steps, from the device's own generator; until then it is a state, so that a checkpoint holds it. An update
may be longer than the last one by `GROWTH` at most (section 4).

Nothing of the authors' package, whose licence forbids commercial use, was read.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from snugfit.step.muon import MatricesAndAdamW, adamw_direction

GROWTH = 1.01
"""How many times as long as the last one an update may be."""

SMALLEST = 1e-30
"""Added to lengths that are divided by."""


class ApolloOfMatrices(torch.optim.Optimizer):
    """Scales the gradient of each matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of all matrices that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    update = self._update(weight.grad, self.state[weight], group)
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _update(self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        short = 0 if gradient.shape[0] <= gradient.shape[1] else 1
        rows, rank = gradient.shape[short], group["rank"]
        state["step"] = state.get("step", 0) + 1
        if (state["step"] - 1) % group["renew"] == 0:
            projection = torch.randn(rank, rows, dtype=gradient.dtype, device=gradient.device)
            state["projection"] = projection.div_(math.sqrt(rank))
        projection = state["projection"]
        small = projection @ gradient if short == 0 else gradient @ projection.t()
        factors = _column_factors(small.float(), state, group, short).mul_(math.sqrt(rows / rank))
        columns = torch.linalg.vector_norm(gradient, dim=short, keepdim=True)
        length = torch.linalg.vector_norm(columns * factors)
        if "length" in state:
            shorter = (state["length"] * GROWTH).div_(length + SMALLEST).clamp_(max=1.0)
            factors.mul_(shorter)
            length.mul_(shorter)
        state["length"] = length
        return gradient * factors.to(gradient.dtype)


def _column_factors(
    small: torch.Tensor, state: dict[str, Any], group: dict[str, Any], short: int
) -> torch.Tensor:
    """How much longer AdamW's update of a projection is than itself, column by column."""
    update = adamw_direction(small, state, group)
    lengths = [torch.linalg.vector_norm(one, dim=short, keepdim=True) for one in (update, small)]
    factors: torch.Tensor = lengths[0].div_(lengths[1].add_(SMALLEST))
    return factors


class ApolloWithAdamW(MatricesAndAdamW):
    """APOLLO for the matrices that are larger than its rank, and AdamW."""

    of_matrices = ("lr", "weight_decay", "betas", "eps", "rank", "renew")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        rank: int = 64,
        renew: int = 200,
    ) -> None:
        """AdamW's numbers are torch's defaults."""
        numbers = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, {**numbers, "rank": rank, "renew": renew})

    def matrix_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Scales the gradients of these matrices."""
        return ApolloOfMatrices(groups, {})

    def takes(self, weight: torch.Tensor, group: dict[str, Any]) -> bool:
        """Takes no matrix that a projection would not make smaller."""
        return super().takes(weight, group) and min(weight.shape) > group["rank"]
