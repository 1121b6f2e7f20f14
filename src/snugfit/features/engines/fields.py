"""The fields that the feature `engines` adds to `Setup` (a recipe's settings)."""

from __future__ import annotations

from snugfit.techniques.wish import Wish

RUNTIME = Wish[str | None]("runtime", str | None, None, touches=("passes",))
"""The field `runtime` of a `Setup`: name of the technique whose library runs an exported model; None for
torch."""

FAST_LAYERS = Wish[bool]("fast_layers", bool, False, touches=("passes",))
"""The field `fast_layers` of a `Setup`: True if one fused operator of torch computes each encoder layer in
evaluation."""
