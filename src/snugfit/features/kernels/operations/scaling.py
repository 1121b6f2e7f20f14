"""Forms of an RMSNorm."""

from __future__ import annotations

from enum import IntEnum


class Scaling(IntEnum):
    """Forms of the multiplication by the learned scale."""

    ROUNDED = 0
    """The normed value is rounded to the stream's dtype before it is multiplied, as in Llama."""
    FROM_ONE = 1
    """The value is multiplied by one plus the scale in 32 bits, as in Gemma."""
    UNROUNDED = 2
    """The value is multiplied by the scale in 32 bits, as in OLMo 2."""
