"""The kernel over weights and the halves of their masters on the CPU, in Triton's interpreter, beside plain
torch. Run as a process with `TRITON_INTERPRET=1`, which Triton reads when kernels are defined."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from snugfit.step.wishes.masters import adamw
from snugfit.step.wishes.masters.adamw import MOMENTS, MasterAdamW
from snugfit.step.wishes.masters.halves import join, split_weights
from snugfit.step.wishes.masters.kernel import launch
from snugfit.step.wishes.masters.marks import RESIDUAL

SIZES = ((33, 200), (1000,), (3, 4, 5, 6), (), (4099,), (8192,))
"""Below, at and beyond a block, and of one number."""

CLOSE = {"rtol": 1e-6, "atol": 1e-8}


def launch_here(*arguments: Any) -> None:
    """The operator's launch without a GPU."""
    *lists, places, numbers = arguments
    launch(lists, places, numbers)


def compare_steps() -> None:
    """Several steps by the kernel and by plain torch, from the same gradients, one of which is no number."""
    draw = torch.Generator().manual_seed(7)
    made = [torch.randn(size, generator=draw) / 20 for size in SIZES]
    both = [torch.nn.ParameterList([torch.nn.Parameter(one.clone()) for one in made]) for _ in range(2)]
    for weights in both:
        split_weights(weights)
    plain, by_kernel = (MasterAdamW(weights, lr=1e-2) for weights in both)
    for step in range(4):
        for ours, theirs in zip(*both, strict=True):
            theirs.grad = (torch.randn(ours.shape, generator=draw) / 10).bfloat16()
            if step == 2 and ours.numel() == 1000:
                theirs.grad[:3] = float("nan")
            ours.grad = theirs.grad.clone()
        plain.step()
        with (
            patch.object(adamw, "has_kernel", lambda weight: True),
            patch.object(adamw, "adamw_of_halves", launch_here),
        ):
            by_kernel.step()
    for ours, theirs in zip(*both, strict=True):
        left, right = plain.state[ours], by_kernel.state[theirs]
        exact = join(ours.data, left[RESIDUAL]), join(theirs.data, right[RESIDUAL])
        torch.testing.assert_close(*exact, equal_nan=True, **CLOSE)
        for name in MOMENTS:
            torch.testing.assert_close(left[name], right[name], equal_nan=True, **CLOSE)
    assert int(both[1][1].isnan().sum()) == 3


if __name__ == "__main__":
    compare_steps()
    print("as the reference")
