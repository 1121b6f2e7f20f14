"""AdamW as in transformers until 2024: parameters are updated one by one, and states created when first
needed.

Only the order of allocations matters here. torch's AdamW creates all states first. This AdamW creates a
parameter's two states when it updates that parameter. The update's denominator is still alive while the next
parameter's states are created, so the caching allocator returns other blocks. It is used to simulate old
package versions (`software/*.json`), and not for training.

Algorithm: Loshchilov and Hutter, arXiv 1711.05101, with decay after the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class LoopAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay that updates one parameter at a time."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient once."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                # The denominator of the last parameter is still alive here, which affects the allocator's
                # blocks.
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
                size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                parameter.addcdiv_(state["exp_avg"], denominator, value=-size)
                # This version applied weight decay after the update.
                if group["weight_decay"]:
                    parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
