"""Fused kernels in the place of a model's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot


class Kernels(Feature):
    """Add the techniques `fused` and `liger`, and their handlers."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {Slot.KERNELS: ("fused", "liger")}

    def handlers(self) -> Sequence[Any]:
        """Return the handlers of both fields."""
        from snugfit.features.kernels.handlers import FusedHandler, LigerHandler

        return FusedHandler(), LigerHandler()
