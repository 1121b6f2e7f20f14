"""Several recipes for one job, predicted and laid side by side."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from snugfit.results.frame import Tabular
from snugfit.results.prediction import Prediction
from snugfit.results.speed import StepSpeed

SPEED_FIELDS = tuple(entry.name for entry in fields(StepSpeed))


@dataclass(frozen=True)
class RecipeComparison(Tabular):
    """Predictions of one job under several recipes; differences are to the first."""

    predictions: tuple[Prediction, ...]
    """One for each recipe, in the order in which they were asked about."""

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each recipe, with the bytes of each kind at its own peak: 0 of those that others have."""
        kinds = dict.fromkeys((str(line.kind) for one in self.predictions for line in one.anatomy.kinds), 0)
        return [
            {
                "recipe": str(one.recipe),
                "needed_bytes": one.needed_bytes,
                "difference_bytes": one.needed_bytes - self.predictions[0].needed_bytes,
                "fits": one.fits,
                **{name: getattr(one.speed, name, None) for name in SPEED_FIELDS},
                **kinds,
                **{str(line.kind): line.bytes for line in one.anatomy.kinds},
            }
            for one in self.predictions
        ]

    def to_json(self) -> dict[str, Any]:
        """The document of `snugfit predict --compare --json`: every prediction whole, and its difference to
        the first."""
        return {
            "schema": 1,
            "what": "predictions",
            "predictions": [one.to_json() for one in self.predictions],
            "difference_bytes": [row["difference_bytes"] for row in self.to_rows()],
        }
