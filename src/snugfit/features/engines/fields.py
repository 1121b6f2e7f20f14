"""The fields that the feature `engines` adds to `Setup` (a recipe's settings)."""

from __future__ import annotations

from snugfit.techniques.wish import Wish

RUNTIME = Wish[str | None]("runtime", str | None, None, touches=("passes",))
"""The field `runtime`: the library that runs an exported model, by its technique's name; None for torch."""

FAST_LAYERS = Wish[bool]("fast_layers", bool, False, touches=("passes",))
"""The field `fast_layers`: True if one operator of torch computes each encoder layer of an evaluation."""
