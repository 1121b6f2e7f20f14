"""A backward pass whose gradients are consumed as soon as they are computed, by hooks of the weights.

This class is the only link between the code that runs passes and the code that takes gradients. A replayed
pass (`replay/step.py`) runs no hooks, so the recording keeps the weights of its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class HookedPass:
    """A backward pass in which a hook of each weight consumes its gradient at once (for the norm or an
    update) and frees it.
    """

    name: str
    """Name of the kind of pass, such as `norm`."""
    take: Callable[[torch.Tensor, torch.Tensor], None]
    """Function that consumes a gradient: it gets a weight and its complete gradient."""
    again: bool = False
    """True if the pass repeats an earlier one, whose loss was reported already."""
    weights: dict[torch.Tensor, None] = field(default_factory=dict)
    """Weights whose gradients this pass has computed, in order."""
    is_recorded: bool = False
    """True while the pass is recorded as a CUDA graph, and its kernels do not run."""
