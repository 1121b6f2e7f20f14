"""Marks of weights with masters in two halves, without an import of torch."""

from __future__ import annotations

HAS_MASTER = "has_master"
"""The attribute of a weight of bfloat16 that is one half of its master."""

RESIDUAL = "residual"
"""The name of the other half: a weight's attribute while it has no optimizer, then the key of its state."""


def has_residual(weight: object) -> bool:
    """Return whether the other half of its master is this weight's attribute: no optimizer has taken it."""
    return RESIDUAL in vars(weight)
