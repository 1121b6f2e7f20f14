"""The one tolerance of the tests: bounds on the difference of two runs of the same mathematics, by kind.

Bounds are relative to the larger of the two, and per value; `atol` is for values near zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SAME = (2e-4, 2e-6)
"""The same sums in another order, in fp32: rounding (6e-8), amplified by a few steps through a few layers."""

ROUNDS = (5e-2, 5e-3)
"""The same formula in 8 or 11 significant bits, or with 8-bit states, after a few small steps."""


def same_losses(left: Sequence[float], right: Sequence[float], tolerance: tuple[float, float] = SAME) -> None:
    """Assert that two runs' losses agree, step by step."""
    import torch

    assert left
    rtol, atol = tolerance
    torch.testing.assert_close(torch.tensor(left), torch.tensor(right), rtol=rtol, atol=atol)


def same_parameters(
    left: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    tolerance: tuple[float, float] = SAME,
) -> None:
    """Assert that two models' parameters agree, name by name."""
    import torch

    assert left.keys() == right.keys()
    assert left
    rtol, atol = tolerance
    for name, value in left.items():
        torch.testing.assert_close(
            value.float(),
            right[name].float(),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
