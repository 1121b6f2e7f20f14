"""A pass whose gradients are taken as they come, by hooks of the weights.

Who runs passes and who takes gradients know of each other by this alone: a pass that is played back
(`capture/step.py`) runs no hooks, so the weights that they heard of are kept with the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class HookedPass:
    """One kind of pass, and what became of its last one."""

    name: str
    """Tells it from other kinds."""
    take: Callable[[torch.Tensor, torch.Tensor], None]
    """Is told of a weight, and of its gradient."""
    again: bool = False
    """Whether it repeats a pass, whose loss was heard of then."""
    weights: dict[torch.Tensor, None] = field(default_factory=dict)
    """Whose gradients came, in order."""
    is_recorded: bool = False
    """Whether what is asked of the device is recorded now, and not done."""
