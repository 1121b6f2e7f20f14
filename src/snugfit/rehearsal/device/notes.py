"""Callbacks with which a simulation's replacements for torch functions report choices, such as the attention
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
    """Callbacks and lists that receive reports of a simulation's replaced torch functions, such as the chosen
    attention kernel.
    """

    claim: Callable[[torch.Tensor, str], None] = _nothing
    """Called with each tensor that torch allocates for itself (such as autocast's copies of weights), and its
    category."""

    doubt: Callable[[str], None] = _nothing
    """Called with a warning about each assumption of the simulation."""

    phase: Callable[[], str] = str
    """Returns the current phase of the step."""

    attention: list[str] = field(default_factory=list)
    """The chosen attention kernels, in order."""
