"""The arguments of torch's AdamW, for optimizers with an update of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

STEP = "step"
"""The key of a state under which the steps of a weight are counted."""


class OwnAdamW(torch.optim.Optimizer):
    """AdamW with an update of our own, and torch's defaults."""

    further: ClassVar[Mapping[str, Any]] = {}
    """Further arguments with their defaults, which are stored in groups too."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **further: Any,
    ) -> None:
        """Store the arguments in the defaults of each group."""
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, **self.further, **further})
