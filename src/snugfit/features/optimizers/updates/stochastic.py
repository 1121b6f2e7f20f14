"""AdamW for bfloat16 weights with stochastic rounding, so that no update is lost on average.

A bfloat16 has 8 significant bits. An update below about 1/512 of a weight is lost, because the sum is rounded
to the old weight. Stochastic rounding picks the upper or lower neighbour with a probability proportional to
its closeness. So the sum is right on average (Zamirai et al., arXiv 2010.06192). No copy of the weights in 32
bits is needed.

Random numbers come from the device's own generator, as for dropout: a checkpoint stores its state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from snugfit.features.optimizers.updates.pieces import MOMENTS, AdamWInPieces, WeightRows, gather, scatter

LOW_BITS = 1 << 16
"""Number of distinct values of the lower 16 bits of an fp32 number, which bfloat16 drops."""


class StochasticAdamW(AdamWInPieces):
    """AdamW that rounds new bfloat16 weights and moments stochastically."""

    def new_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return moments of zeros in the weight's dtype."""
        return {name: torch.zeros_like(weight, memory_format=torch.preserve_format) for name in MOMENTS}

    def widen(self, piece: Sequence[WeightRows], name: str) -> torch.Tensor:
        """Return a moment of some rows of weights, copied to 32 bits."""
        return gather([rows.state[name] for rows in piece])

    def narrow(self, piece: Sequence[WeightRows], moments: tuple[torch.Tensor, ...]) -> None:
        """Round both moments to bfloat16 stochastically, if they are stored in it."""
        for name, exact in zip(MOMENTS, moments, strict=True):
            parts = [rows.state[name] for rows in piece]
            # With rounding to nearest, the second moment would never change, because a step changes it by a
            # thousandth.
            scatter(round_by_chance(exact) if parts[0].dtype is torch.bfloat16 else exact, parts)

    def write(self, weights: list[torch.Tensor], exact: torch.Tensor) -> None:
        """Write the fp32 values into the weights with stochastic rounding to bfloat16.

        A NaN's bits may carry into its sign when rounded. Adding the exact value times zero preserves the
        NaN.
        """
        if weights[0].dtype is torch.bfloat16:
            # With `alpha=0` this adds zero to a number, and keeps a NaN.
            exact = round_by_chance(exact).add_(exact, alpha=0)
        scatter(exact, weights)


def round_by_chance(exact: torch.Tensor) -> torch.Tensor:
    """Return the fp32 numbers rounded stochastically to values that bfloat16 can represent.

    A random number below 2^16 is added to the bits, and the lower half is then cleared. The probability of a
    carry is the lower half divided by 2^16.
    """
    chance = torch.randint(LOW_BITS, exact.shape, dtype=torch.int32, device=exact.device)
    return chance.add_(exact.view(torch.int32)).bitwise_and_(-LOW_BITS).view(torch.float32)
