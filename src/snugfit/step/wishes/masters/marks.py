"""How weights whose masters are in two halves are known, without torch."""

HAS_MASTER = "has_master"
"""The attribute of a weight of bfloat16 that is one half of its master."""

RESIDUAL = "residual"
"""The name of the other half: a weight's attribute while it has no optimizer, then the key of its state."""
