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
    """Ignore the arguments. This is the default callback for a reported choice."""


@dataclass(frozen=True)
class PolicyNotes:
    """Callbacks and lists that receive reports of a simulation's replaced torch functions, such as the chosen
    attention kernel.
    """

    claim: Callable[[torch.Tensor, str], None] = _nothing
    """Callback for each tensor that torch allocates for itself (such as autocast's copies of weights), with
    its category.
    """

    doubt: Callable[[str], None] = _nothing
    """Callback for a warning about each assumption of the simulation."""

    phase: Callable[[], str] = str
    """Function that returns the current phase of the step, such as `forward`."""

    attention: list[str] = field(default_factory=list)
    """Names of the attention kernels that the simulation has chosen, in order."""
