"""AdamW for weights of bfloat16, whose new values are rounded by chance, so that none is lost on average.

A bfloat16 has 8 significant bits: what an update adds to a weight is lost where it is less than about 1/512
of it, because the sum is rounded to the weight that was there. Rounded up or down by chance, with the odds of
how near either neighbour is, the sum is right on average, and no copy of the weights in 32 bits is needed
(Zamirai et al., arXiv 2010.06192). Both moments have 16 bits too and are rounded alike: else the second one,
which moves by a thousandth of itself, would stand still.

What chance gives is drawn from the device's own generator, as dropout's is: a checkpoint keeps it. Weights in
other dtypes are rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from snugfit.features.optimizers.updates.pieces import MOMENTS, AdamWInPieces, WeightRows, gather, scatter

LOW_BITS = 1 << 16
"""What the lower half of a number in 32 bits, which bfloat16 has no room for, counts to."""


class StochasticAdamW(AdamWInPieces):
    """AdamW that rounds new weights and moments of bfloat16 up or down by chance."""

    def new_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Makes zeros in the weight's dtype."""
        return {name: torch.zeros_like(weight, memory_format=torch.preserve_format) for name in MOMENTS}

    def widen(self, piece: Sequence[WeightRows], name: str) -> torch.Tensor:
        """Copy a moment into 32 bits."""
        return gather([rows.state[name] for rows in piece])

    def narrow(self, piece: Sequence[WeightRows], moments: tuple[torch.Tensor, ...]) -> None:
        """Round both moments by chance."""
        for name, exact in zip(MOMENTS, moments, strict=True):
            parts = [rows.state[name] for rows in piece]
            scatter(round_by_chance(exact) if parts[0].dtype is torch.bfloat16 else exact, parts)

    def write(self, weights: list[torch.Tensor], exact: torch.Tensor) -> None:
        """Rounds them by chance. What is not a number may carry into its sign; nothing of it, added, keeps it
        what it is."""
        if weights[0].dtype is torch.bfloat16:
            exact = round_by_chance(exact).add_(exact, alpha=0)
        scatter(exact, weights)


def round_by_chance(exact: torch.Tensor) -> torch.Tensor:
    """Numbers in 32 bits that bfloat16 has, next to these: the one or the other neighbour, by chance.

    A number below 2^16 is added to the bits, of which the lower half is then cleared: it carries as often as
    that half says.
    """
    chance = torch.randint(LOW_BITS, exact.shape, dtype=torch.int32, device=exact.device)
    return chance.add_(exact.view(torch.int32)).bitwise_and_(-LOW_BITS).view(torch.float32)
