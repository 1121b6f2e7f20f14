"""Registration of the feature `loops`: `snugfit.fit` and `snugfit.SnugfitCallback` for a Trainer, and
`snugfit.accelerate` for a hand-written loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from snugfit.techniques.feature import Feature


class Loops(Feature):
    """The feature that adds `fit` and `accelerate`: training in the user's own loop or Trainer."""

    needs: ClassVar[Mapping[str, str]] = {"callback": "watch"}
    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "custom_loop.accelerate": ("accelerate",),
        "trainer.fit": ("fit",),
        "trainer.callback": ("SnugfitCallback",),
        "custom_loop.run": ("HandRun",),
    }
