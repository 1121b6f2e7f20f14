"""What a policy's overrides tell of a rehearsal that is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _nothing(*about: object) -> None:
    """Nobody hears of it."""


@dataclass(frozen=True)
class PolicyNotes:
    """Where overrides write down what they decided."""

    claim: Callable[[torch.Tensor, str], None] = _nothing
    """Called with each tensor that torch keeps for itself (autocast's copies), and its
    kind."""

    doubt: Callable[[str], None] = _nothing
    """Called with a sentence on each thing that had to be assumed."""

    phase: Callable[[], str] = str
    """Gives the phase of the step that is on."""

    attention: list[str] = field(default_factory=list)
    """The attention kernels that were chosen, in order."""
