"""GaLore, written from its paper (Zhao et al., arXiv 2403.03507, algorithm 2): AdamW in a small space.

A matrix's gradient is projected onto the `rank` singular vectors that capture most of it. AdamW runs on the
projection. Its update is projected back and multiplied by `scale`:

    R = P' G                  (r x n)  for a gradient G (m x n) with m <= n, R = G Q' (m x r) else
    W <- W - lr * scale * P AdamW(R)

`side` selects the singular vectors. `std` takes those of the shorter side, `reverse_std` those of the longer
one. `left` and `right` take P (m x r) and Q (r x n) of every matrix. `full` takes both, so that R is r x r.
They come from a singular value decomposition in the first step and every `renew` steps. Until then they are a
state, so that a checkpoint contains them.

The authors' package galore-torch is not used. It had one release (1.0, March 2024) and no change since
September 2024. It stores Python objects in its state, which no checkpoint that is safe to load contains. With
weights in fp32 it keeps all singular vectors alive, because its slices of the first `rank` share their
storage. Here each slice is copied, and the decomposition's results are freed after the step.

On a GPU torch passes the decomposition to cuSOLVER (`gesvdj`, and `gesvd` where that does not converge;
`svd_cusolver` in `native/cuda/linalg/BatchLinearAlgebraLib.cpp`). cuSOLVER works on a copy of the matrix and
in a workspace of a size that it does not document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from snugfit.features.optimizers.updates.matrices import (
    ADAMW_ATTRIBUTE,
    ProjectedAndAdamW,
    adamw_direction,
    leave_to_adamw,
)

ALL_LINEAR = "all-linear"
"""transformers' word for every linear layer, including the head."""


class GaloreWithAdamW(ProjectedAndAdamW):
    """GaLore for the matrices that are larger than its rank, and AdamW for the rest."""

    further: ClassVar = {"rank": 128, "renew": 200, "scale": 0.25, "side": "std"}

    def update_matrix(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update a matrix by AdamW on its projected gradient; only a decomposition makes tensors of the
        matrix's size."""
        # `step` already includes this step, so the first step computes a decomposition.
        if (state["step"] - 1) % group["renew"] == 0:
            state |= _singular_vectors(gradient, group["rank"], group["side"])
        left, right = state.get("left"), state.get("right")
        small = gradient if left is None else left.t() @ gradient
        small = small if right is None else small @ right.t()
        direction = adamw_direction(small, state, group)
        # With both sides, the update is projected back in two products, of which the first is small.
        if left is not None and right is not None:
            direction = left @ direction
        # Weight decay is decoupled, as in AdamW.
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        factors = (direction, right) if right is not None else (left, direction)
        # The product is added in place, so that no tensor of the matrix's size is created.
        weight.addmm_(*factors, alpha=-group["lr"] * group["scale"])


def _singular_vectors(gradient: torch.Tensor, rank: int, side: str) -> dict[str, torch.Tensor]:
    """Return the first `rank` singular vectors of a gradient for this `side`: `left` (m x r), `right` (r x
    n).
    """
    wide = gradient.shape[0] < gradient.shape[1]
    shorter, longer = ("left", "right") if wide else ("right", "left")
    sides = {"std": (shorter,), "reverse_std": (longer,), "full": ("left", "right")}.get(side, (side,))
    # cuSOLVER supports no 16-bit decomposition.
    vectors, _, rows = torch.linalg.svd(gradient.float(), full_matrices=False)
    first = {"left": vectors[:, :rank], "right": rows[:rank]}
    return {
        # A copy is made, because a slice would keep all singular vectors alive.
        name: first[name].to(gradient.dtype, copy=True, memory_format=torch.contiguous_format)
        for name in sides
    }


def leave_others_to_adamw(model: torch.nn.Module, targets: Sequence[str] = ()) -> None:
    """Mark the weights that AdamW updates without a projection: all except the matrices of hidden layers.

    With `targets`, AdamW gets all but the weights of linear layers whose names contain one of these words.
    `ALL_LINEAR` selects every linear layer. That is transformers' `optim_target_modules`, which includes the
    head.
    """
    if not targets:
        leave_to_adamw(model)
        return
    chosen = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        # transformers compares these words with parts of names, and `all-linear` with the whole word.
        and any(word in (ALL_LINEAR, name) or word in name for word in targets)
    }
    for weight in model.parameters():
        setattr(weight, ADAMW_ATTRIBUTE, id(weight) not in chosen)
