"""Registration of the feature `ways_out`: the cheapest changes of a recipe with which a step fits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature


class WaysOutFeature(Feature):
    """The feature that searches for changes after `does not fit`, and after an out-of-memory error."""

    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"search": ("ways_out",)}

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return `--no-ways-out` of predictions and plans."""
        from snugfit.features.ways_out.options import NO_WAYS_OUT

        return (NO_WAYS_OUT,) if command in ("plan", "predict") else ()

    def changes_that_fit(self) -> Any:
        """Return the module that adds changes of a recipe to results, errors and reports, if nothing fits."""
        from snugfit.features.ways_out import additions

        return additions
