"""The wish for masters: trained weights are cut in halves once the model is on its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from snugfit.step.wishes.handler import Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

_MADE_BEFORE = (
    "the model and its optimizer were made before the recipe is known, and masters are the optimizer's own "
    "states. snugfit train takes this recipe, or use 'bf16'."
)


class MastersHandler(Handler):
    """Masters of weights of bfloat16, the other half of which the optimizer has."""

    wish, slot, stage = "masters", Slot.PRECISION, InstallStage.CAST
    refused: ClassVar[Mapping[str, str]] = {
        "fit": _MADE_BEFORE,
        "custom_loop": _MADE_BEFORE,
        "script": "its optimizer is snugfit's own code",
    }

    def model_arguments(self, value: bool) -> dict[str, Any]:
        """Load weights in 32 bits: a loader that rounds them would leave no other half."""
        return {"dtype": "float32"} if value else {}

    def wrap(self, value: bool, model: Any) -> None:
        """Cut trained weights in halves."""
        if value:
            from snugfit.step.wishes.masters.halves import split_weights

            split_weights(model)
