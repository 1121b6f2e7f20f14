"""The handler of the cache of keys and values, which the step of generation reads from the `Setup`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from snugfit.features.inference.fields import CACHE
from snugfit.step.wishes.handler import Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

_TRAINS = "training and evaluation read no cache of keys and values. Leave it out"


class CacheHandler(Handler):
    """Handler of the field `cache`, which every loop but that of generation refuses."""

    wish, slot, stage = CACHE.name, Slot.CACHE, InstallStage.LOOP
    read_by_loops = True
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("accelerate", "trainer", "fit", "custom_loop", "script"), _TRAINS
    )
