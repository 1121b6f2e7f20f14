"""The fields that the feature `adapters` adds to `Setup` (a recipe's settings)."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Call, Wish


@dataclass(frozen=True, kw_only=True)
class FreezeWish:
    """Value of the field `freeze`: the names of frozen and of trained parameters."""

    parts: tuple[str, ...] = ()
    """Modules and parameters that freeze."""

    only: tuple[str, ...] = ()
    """Modules and parameters that train alone; if empty, all but `parts` train."""

    last: int = 0
    """Number of the last layers that train in addition to `only`; below 0, of the first ones."""


ADAPT = Wish[Call | None](
    "adapt", Call | None, None, freezes=True, packages=("peft",), needs_no_compiler=True
)
"""The field `adapt`: a function `adapt(model, **arguments)` that returns the model to train instead; None
trains the model itself."""

FREEZE = Wish[FreezeWish | None]("freeze", FreezeWish | None, None, selects=True)
"""The field `freeze`: parameters without gradients; None trains all."""
