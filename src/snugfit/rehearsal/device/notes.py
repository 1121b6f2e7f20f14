"""Callbacks from a policy's overrides to the current simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _nothing(*about: object) -> None:
    """Ignore the arguments: the default of callbacks for decisions."""


@dataclass(frozen=True)
class PolicyNotes:
    """Callbacks and lists that receive the decisions of the overrides for a device (its policy)."""

    claim: Callable[[torch.Tensor, str], None] = _nothing
    """Called with each tensor that torch allocates for itself (autocast's copies), and its kind."""

    doubt: Callable[[str], None] = _nothing
    """Called with a sentence about each assumption."""

    phase: Callable[[], str] = str
    """Returns the current phase of the step."""

    attention: list[str] = field(default_factory=list)
    """The chosen attention kernels, in order."""
