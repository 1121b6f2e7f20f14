"""Callbacks by which the replaced torch functions of a simulation report decisions, such as the attention
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _nothing(*about: object) -> None:
    """Ignore the arguments: the default callback for a reported decision."""


@dataclass(frozen=True)
class PolicyNotes:
    """Callbacks and lists that receive decisions of a simulation's replaced torch functions, such as the
    chosen attention kernel.
    """

    claim: Callable[[torch.Tensor, str], None] = _nothing
    """Called with each tensor that torch allocates for itself (autocast's copies), and its kind."""

    doubt: Callable[[str], None] = _nothing
    """Called with a sentence about each assumption."""

    phase: Callable[[], str] = str
    """Returns the current phase of the step."""

    attention: list[str] = field(default_factory=list)
    """The chosen attention kernels, in order."""
