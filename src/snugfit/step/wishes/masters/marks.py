"""How weights whose masters are in two halves are known, without torch."""

from __future__ import annotations

HAS_MASTER = "has_master"
"""The attribute of a weight of bfloat16 that is one half of its master."""

RESIDUAL = "residual"
"""The name of the other half: a weight's attribute while it has no optimizer, then the key of its state."""


def has_residual(weight: object) -> bool:
    """Whether the other half of its master is this weight's attribute: no optimizer has taken it."""
    return RESIDUAL in vars(weight)
