"""Handler of the field `offload`, for models that are built or already in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.offload.fields import OFFLOAD
from snugfit.step.wishes.handler import Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.features.offload.fields import OffloadWish
    from snugfit.step.wishes.handler import LiveTraining


class OffloadHandler(Handler):
    """Handler of the field `offload`: it copies saved activations to the host until the backward pass."""

    wish, slot, stage = OFFLOAD.name, Slot.ACTIVATION_OFFLOAD, InstallStage.SAVE
    refused: ClassVar[Mapping[str, str]] = {
        "script": "snugfit does it with its own code, which a script without snugfit does not have"
    }
    change_words = "activations are stored by"

    def wrap(self, value: OffloadWish, model: Any) -> None:
        """Add hooks that offload the model's saved tensors."""
        from snugfit.features.offload.activations import offload_activations

        offload_activations(model, value)

    def undo(self, live: LiveTraining) -> None:
        """Remove the offload hooks of a model in training."""
        from snugfit.features.offload.activations import offload_activations

        offload_activations(live.model, None)
