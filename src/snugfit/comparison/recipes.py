"""Predictions of one job under several recipes, in one table."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from snugfit.documents import JsonDocument
from snugfit.results.frame import Tabular
from snugfit.results.prediction import Prediction
from snugfit.results.speed import StepSpeed

SPEED_FIELDS = tuple(entry.name for entry in fields(StepSpeed))


@dataclass(frozen=True)
class RecipeComparison(JsonDocument, Tabular):
    """Predictions of one job under several recipes; differences refer to the first."""

    what: ClassVar = "predictions"

    predictions: tuple[Prediction, ...]
    """One prediction for each recipe, in the order of the arguments."""

    @property
    def best(self) -> Prediction | None:
        """The fastest recipe that fits and leaves the headroom (memory to keep free), or else the fastest
        that fits; None if none fits.

        Without predicted seconds, it is the recipe with the least memory.
        """
        candidates = [prediction for prediction in self.predictions if prediction.fits is not False]
        candidates = [prediction for prediction in candidates if not prediction.tight] or candidates
        # `all` is True without candidates too; `min` then returns its default.
        if all(prediction.timing for prediction in candidates):
            return min(
                candidates,
                key=lambda prediction: prediction.timing.step_seconds if prediction.timing else 0,
                default=None,
            )
        return min(candidates, key=lambda prediction: prediction.needed_bytes)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each recipe, with the bytes of each category (weights, activations, ...) at its
        own peak.

        A category that only other recipes have is 0.
        """
        kinds = dict.fromkeys(
            (str(line.kind) for prediction in self.predictions for line in prediction.anatomy.kinds), 0
        )
        return [
            {
                "recipe": str(prediction.recipe),
                "needed_bytes": prediction.needed_bytes,
                "difference_bytes": prediction.needed_bytes - self.predictions[0].needed_bytes,
                "fits": prediction.fits,
                **{name: getattr(prediction.speed, name, None) for name in SPEED_FIELDS},
                **kinds,
                **{str(line.kind): line.bytes for line in prediction.anatomy.kinds},
            }
            for prediction in self.predictions
        ]

    def derived_keys(self) -> dict[str, Any]:
        """Return the difference in bytes of each prediction from the first one, for the JSON document."""
        return {"difference_bytes": [row["difference_bytes"] for row in self.to_rows()]}
