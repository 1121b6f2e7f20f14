"""GaLore, written from its paper (Zhao et al., arXiv 2403.03507, algorithm 2): AdamW in a small space.

A matrix's gradient is projected onto the `rank` singular vectors that hold most of it, AdamW works on the
projection, and what it would take is projected back and `scale` times as large:

    R = P' G                  (r x n)  for a gradient G (m x n) with m <= n, R = G Q' (m x r) else
    W <- W - lr * scale * P AdamW(R)

`side` says which singular vectors: `std` those of the shorter side, `reverse_std` of the longer one, `left`
and `right` P (m x r) and Q (r x n) of every matrix, `full` both, so that R is r x r. They are found by a
singular value decomposition in the first step and every `renew` steps; until then they are a state, so that
a checkpoint holds them.

The authors' package galore-torch is not used: it had one release (1.0, March 2024) and no change since
September 2024, keeps Python objects in its state, which no checkpoint that is safe to load contains, and
with weights in fp32 keeps all singular vectors alive where it uses the first `rank` of them: slices of a
matrix hold the whole. Here each is copied out, and the decomposition's results are gone after the step.

On a GPU torch hands the decomposition to cuSOLVER (`gesvdj`, and `gesvd` where that does not converge;
`svd_cusolver` in `native/cuda/linalg/BatchLinearAlgebraLib.cpp`). It works on a copy of the matrix and in a
workspace whose size only cuSOLVER knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from snugfit.features.optimizers.updates.matrices import (
    BY_ADAMW,
    ProjectedAndAdamW,
    adamw_direction,
    leave_to_adamw,
)

ALL_LINEAR = "all-linear"
"""transformers' word for every linear layer, the head with them."""


class GaloreWithAdamW(ProjectedAndAdamW):
    """GaLore for the matrices that are larger than its rank, and AdamW."""

    further: ClassVar = {"rank": 128, "renew": 200, "scale": 0.25, "side": "std"}

    def update_matrix(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update a matrix in its small space; only a decomposition makes tensors of the matrix's size."""
        if (state["step"] - 1) % group["renew"] == 0:
            state |= _singular_vectors(gradient, group["rank"], group["side"])
        left, right = state.get("left"), state.get("right")
        small = gradient if left is None else left.t() @ gradient
        small = small if right is None else small @ right.t()
        direction = adamw_direction(small, state, group)
        if left is not None and right is not None:
            direction = left @ direction
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        factors = (direction, right) if right is not None else (left, direction)
        weight.addmm_(*factors, alpha=-group["lr"] * group["scale"])


def _singular_vectors(gradient: torch.Tensor, rank: int, side: str) -> dict[str, torch.Tensor]:
    """The first of the singular vectors that this `side` projects with: `left` (m x r), `right` (r x n)."""
    wide = gradient.shape[0] < gradient.shape[1]
    shorter, longer = ("left", "right") if wide else ("right", "left")
    sides = {"std": (shorter,), "reverse_std": (longer,), "full": ("left", "right")}.get(side, (side,))
    vectors, _, rows = torch.linalg.svd(gradient.float(), full_matrices=False)
    first = {"left": vectors[:, :rank], "right": rows[:rank]}
    return {
        name: first[name].to(gradient.dtype, copy=True, memory_format=torch.contiguous_format)
        for name in sides
    }


def leave_others_to_adamw(model: torch.nn.Module, targets: Sequence[str] = ()) -> None:
    """Marks what is not projected: all but the matrices of hidden layers, or, where there are `targets`, all
    but the weights of linear layers that one of these words stands in the name of (or of every one, for
    `ALL_LINEAR`): transformers' `optim_target_modules`, which counts the head too."""
    if not targets:
        leave_to_adamw(model)
        return
    chosen = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and any(word in (ALL_LINEAR, name) or word in name for word in targets)
    }
    for weight in model.parameters():
        setattr(weight, BY_ADAMW, id(weight) not in chosen)
