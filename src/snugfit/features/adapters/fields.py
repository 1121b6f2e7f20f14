"""The field of `Setup` that this feature adds."""

from __future__ import annotations

from snugfit.techniques.wish import Call, Wish

ADAPT = Wish[Call | None](
    "adapt", Call | None, None, freezes=True, packages=("peft",), needs_no_compiler=True
)
"""`adapt(model, **arguments)` gives the model to train instead; None trains the model itself."""
