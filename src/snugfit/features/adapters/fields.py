"""The fields that the feature `adapters` adds to `Setup` (a recipe's settings)."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Call, Wish


@dataclass(frozen=True, kw_only=True)
class FreezeWish:
    """Value of the field `freeze`: the names of frozen and of trained parameters."""

    parts: tuple[str, ...] = ()
    """Names of the modules and parameters to freeze."""

    only: tuple[str, ...] = ()
    """Names of the only modules and parameters that train; if empty, all except `parts` train."""

    last: int = 0
    """Number of the last layers that train in addition to `only`. A negative number means the first layers.
    """


ADAPT = Wish[Call | None](
    "adapt", Call | None, None, freezes=True, packages=("peft",), needs_no_compiler=True
)
"""The field `adapt` of a `Setup`: a function `adapt(model, **arguments)` that returns a model with adapters.
None trains the model itself."""

FREEZE = Wish[FreezeWish | None]("freeze", FreezeWish | None, None, selects=True)
"""The field `freeze` of a `Setup`: parameters that get no gradients; None trains all."""
