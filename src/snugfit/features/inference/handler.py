"""The handler of the key-value cache type, which the loop of text generation reads from `Setup` (a recipe's
settings).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from snugfit.features.inference.fields import CACHE
from snugfit.step.wishes.handler import Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

_TRAINS = "training and evaluation read no cache of keys and values. Leave it out"


class CacheHandler(Handler):
    """Handler of the field `cache`, the key-value cache type. Every loop but that of text generation refuses
    it.
    """

    wish, slot, stage = CACHE.name, Slot.CACHE, InstallStage.LOOP
    read_by_loops = True
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("accelerate", "trainer", "fit", "custom_loop", "script"), _TRAINS
    )
