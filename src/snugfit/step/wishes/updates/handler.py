"""The wish for updates within the backward pass: which loop can make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from snugfit.step.wishes.handler import Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

_NOT_OURS = (
    "its loop reads all gradients after the backward pass, and updates then. snugfit train takes this recipe"
)


class ReleaseHandler(Handler):
    """Weights that are updated as their gradients come (`released.py`)."""

    wish, slot, stage = "release", Slot.GRADIENTS, InstallStage.STEP
    read_by_loops = True
    refused: ClassVar[Mapping[str, str]] = {
        "accelerate": _NOT_OURS,
        "trainer": _NOT_OURS,
        "fit": _NOT_OURS,
        "custom_loop": _NOT_OURS,
        "script": "its loop is snugfit's own code",
    }
