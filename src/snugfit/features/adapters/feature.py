"""Low-rank adapters by peft, beside weights that are frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot


class Adapters(Feature):
    """Add the technique `lora` and its handler."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {Slot.ADAPTERS: ("lora",)}

    def handlers(self) -> Sequence[Any]:
        """Return the handler that puts an adapted model in place of the built one."""
        from snugfit.features.adapters.handler import AdaptHandler

        return (AdaptHandler(),)
