"""AdamW with both moments in 8 bits, for fp32 weights that are stored in two halves or as a whole.

For a weight in two halves, an update reads 8 bytes per element and writes 6; `MasterAdamW` reads 14 and
writes 12. Scales add an eighth of a byte to each. Gradients and all arithmetic are as in `MasterAdamW`;
`compact.py` describes the storage of moments. A weight takes 4 bytes per element with its lower half, and its
moments take 2.125.

With 24-bit weights the lower half takes 1 byte instead of 2, so an update reads 7 bytes and writes 5. Weights
are then rounded stochastically (`halves.py`), like moments.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from snugfit.features.engine.masters import compact
from snugfit.features.engine.masters.adamw import MasterAdamW, Numbers, update, widen
from snugfit.features.engine.masters.block import COMPACT_SETTINGS
from snugfit.features.engine.masters.halves import AT_ONCE, RESIDUAL, join, split, split_by_chance
from snugfit.features.engine.masters.table import MOMENTS, WeightTable
from snugfit.step.wishes.own_adamw import STEP, flat, with_strides_of

SCALES = ("exp_avg_scales", "exp_avg_sq_scales")
"""Keys of the optimizer states that contain the scales of 8-bit moments."""


class CompactTable(WeightTable):
    """A table of memory addresses for update kernels; each weight's record also has the scales of both 8-bit
    moments.
    """

    record = 9
    group = compact.GROUP
    usual_settings = COMPACT_SETTINGS

    @classmethod
    def tensors_kept(cls, state: dict[str, Any]) -> list[torch.Tensor | None]:
        """Return the tensors that an update reads in addition to the weight: low half, both moments and both
        scales.
        """
        return [*super().tensors_kept(state), *(state[name] for name in SCALES)]


class CompactAdamW(MasterAdamW):
    """AdamW with moments in 8 bits, rounded stochastically."""

    table_of = CompactTable

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_bits: Literal[32, 24] = 32,
    ) -> None:
        """Create the optimizer, with torch's default hyperparameters. They are repeated because snugfit
        builds optimizers from the signature (`wishes/optimizer.py`). `master_bits` is the size of master
        weights in two halves.
        """
        # A 24-bit weight is stored as bfloat16 and 8 further bits.
        self.residual_dtype = torch.int16 if master_bits == 32 else torch.int8
        super().__init__(params, lr, betas, eps, weight_decay)

    def new_moments(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return moments before the first step: zero codes with the weight's memory layout, and scales in the
        order of its memory."""
        groups = compact.scale_count(weight.numel())
        codes = {
            name: torch.zeros_like(weight, dtype=dtype, memory_format=torch.preserve_format)
            for name, dtype in zip(MOMENTS, (torch.int8, torch.uint8), strict=True)
        }
        return codes | {
            name: torch.zeros(groups, dtype=torch.float32, device=weight.device) for name in SCALES
        }

    def update_plainly(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        numbers: Numbers,
        coefficient: torch.Tensor | None,
    ) -> None:
        """Update one weight in plain torch without a kernel, and store its moments as 8-bit codes again."""
        state = self.state[weight]
        slopes, values = flat(with_strides_of(weight, gradient)), flat(weight)
        codes = [flat(state[name]) for name in MOMENTS]
        for begin in range(0, weight.numel(), AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            # Each piece is a multiple of the group size, so that no group is split.
            groups = slice(begin // compact.GROUP, compact.scale_count(begin + AT_ONCE))
            first_code, second_code = (code[part] for code in codes)
            first_scale, second_scale = (state[name][groups] for name in SCALES)
            first = compact.widen_first(first_code, first_scale)
            second = compact.widen_second(second_code, second_scale)
            slope = widen(slopes[part], coefficient)
            if weight.dtype is torch.float32:
                update(values[part], slope, first, second, numbers)
            else:
                low = flat(state[RESIDUAL])[part]
                exact = join(values[part], low)
                update(exact, slope, first, second, numbers)
                # With 24 bits, small updates would be lost without stochastic rounding.
                if low.dtype is torch.int8:
                    draws = compact.draws(begin, first.numel(), state[STEP], weight.device)
                    split_by_chance(exact, values[part], low, draws)
                else:
                    split(exact, values[part], low)
            chance = compact.chances(begin, first.numel(), state[STEP], weight.device)
            compact.narrow_first(first, chance.first, first_code, first_scale)
            compact.narrow_second(second, chance.second, second_code, second_scale)
