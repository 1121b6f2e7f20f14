"""The kernel over weights and the halves of their masters, beside plain torch.

Run as a process: with `TRITON_INTERPRET=1`, which Triton reads when kernels are defined, on the CPU in its
interpreter; with the argument `cuda` on a GPU, where it also says how long an update takes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from snugfit.step.wishes.masters import adamw
from snugfit.step.wishes.masters.adamw import MOMENTS, MasterAdamW
from snugfit.step.wishes.masters.halves import join, split_weights
from snugfit.step.wishes.masters.marks import RESIDUAL

SIZES = ((33, 200), (1000,), (3, 4, 5, 6), (), (4099,), (8192,))
"""Below, at and beyond a block, and of one number."""

CLOSE = {"rtol": 1e-6, "atol": 1e-8}
"""A GPU's and an interpreter's products and sums differ by whether they are one operation."""


def launch_here(*arguments: Any) -> None:
    """The operator's launch without a GPU."""
    from snugfit.step.wishes.masters.kernel import launch

    *lists, places, numbers = arguments
    launch(lists, places, numbers)


@contextlib.contextmanager
def by_kernel(device: str) -> Iterator[None]:
    """Within it the kernel updates, on a GPU or in the interpreter."""
    with contextlib.ExitStack() as undo:
        if device == "cpu":
            undo.enter_context(patch.object(adamw, "has_kernel", lambda weight: True))
            undo.enter_context(patch.object(adamw, "adamw_of_halves", launch_here))
        yield


def compare_steps(device: str) -> None:
    """Several steps by the kernel and by plain torch, from the same gradients, one of which is no number."""
    draw = torch.Generator().manual_seed(7)
    made = [torch.randn(size, generator=draw) / 20 for size in SIZES]
    both = [
        torch.nn.ParameterList([torch.nn.Parameter(one.to(device, copy=True)) for one in made])
        for _ in range(2)
    ]
    for weights in both:
        split_weights(weights)
    plain, launched = (MasterAdamW(weights, lr=1e-2) for weights in both)
    for step in range(4):
        for ours, theirs in zip(*both, strict=True):
            theirs.grad = (torch.randn(ours.shape, generator=draw) / 10).bfloat16().to(device)
            if step == 2 and ours.numel() == 1000:
                theirs.grad[:3] = float("nan")
            ours.grad = theirs.grad.clone()
        with patch.object(adamw, "has_kernel", lambda weight: False):
            plain.step()
        with by_kernel(device):
            launched.step()
    for ours, theirs in zip(*both, strict=True):
        left, right = plain.state[ours], launched.state[theirs]
        exact = join(ours.data, left[RESIDUAL]), join(theirs.data, right[RESIDUAL])
        torch.testing.assert_close(*exact, equal_nan=True, **CLOSE)
        for name in MOMENTS:
            torch.testing.assert_close(left[name], right[name], equal_nan=True, **CLOSE)
    assert int(both[1][1].isnan().sum()) == 3


def time_updates() -> None:
    """Seconds of an update of about a billion weights, beside torch's fused AdamW over fp32."""
    sizes = [(2048, 8192)] * 56 + [(2048,)] * 64
    for name in ("halves", "fp32"):
        weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes]
        )
        if name == "halves":
            split_weights(weights)
        optimizer: Any = MasterAdamW(weights) if name == "halves" else torch.optim.AdamW(weights, fused=True)
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.1)
        for repeat in range(12):
            if repeat == 2:
                torch.cuda.synchronize()
                begin = time.perf_counter()
            optimizer.step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / 10
        count = sum(weight.numel() for weight in weights)
        moved = (26 if name == "halves" else 28) * count / seconds
        print(f"{name}: {1e3 * seconds:.3f} ms for {count:,} weights, {moved / 1e12:.2f} TB/s")
        del weights, optimizer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    compare_steps(asked)
    print("as the reference")
    if asked == "cuda":
        time_updates()
