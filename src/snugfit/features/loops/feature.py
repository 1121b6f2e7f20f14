"""`snugfit.fit` for a Trainer, and `snugfit.accelerate` for a hand-written loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from snugfit.techniques.feature import Feature


class Loops(Feature):
    """Train in loops of the user, with the session's checkpoints, journal and recovery."""

    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "custom_loop.accelerate": ("accelerate",),
        "trainer.fit": ("fit",),
        "custom_loop.run": ("HandRun",),
    }
