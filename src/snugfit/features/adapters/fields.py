"""The field of `Setup` that this feature adds."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Call, Wish


@dataclass(frozen=True, kw_only=True)
class FreezeWish:
    """Parameters that do not train."""

    parts: tuple[str, ...] = ()
    """Modules and parameters that freeze."""

    only: tuple[str, ...] = ()
    """Modules and parameters that train alone; empty for all but `parts`."""

    last: int = 0
    """Number of the last layers that train beside those of `only`; below 0, of the first ones."""


ADAPT = Wish[Call | None](
    "adapt", Call | None, None, freezes=True, packages=("peft",), needs_no_compiler=True
)
"""`adapt(model, **arguments)` gives the model to train instead; None trains the model itself."""

FREEZE = Wish[FreezeWish | None]("freeze", FreezeWish | None, None, selects=True)
"""Parameters that get no gradients; None trains all."""
