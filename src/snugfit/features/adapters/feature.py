"""Registration of the feature `adapters`: low-rank adapters by peft on frozen weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.features.adapters.fields import ADAPT, FREEZE
from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    from snugfit.techniques.setup import Setup

_ANY_NUMBER = re.compile(r"\[(\\d|0-9)\]|\\d|[A-Za-z_]+\d+")
"""Pattern of the parts of a module name's regular expression that match any number, or of names with a final
digit."""
_NUMBER = re.compile(r"\d")


class Adapters(Feature):
    """The feature that adds the techniques `frozen` and `lora`, and their handlers."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {Slot.ADAPTERS: ("frozen", "lora")}

    def handlers(self) -> Sequence[Any]:
        """Return the handlers that freeze parameters, and that add adapters to a built model."""
        from snugfit.features.adapters.freezing import FreezeHandler
        from snugfit.features.adapters.handler import AdaptHandler

        return AdaptHandler(), FreezeHandler()

    def layer_period(self, setup: Setup, layers: int) -> int:
        """Return the number of layers after which the trained parameters repeat. It is all layers if the
        recipe names some by number.
        """
        return layers if names_layers(setup) else 1

    def treats_layers_alike(self, setup: Setup) -> bool:
        """Return True if each layer has the same trained parameters."""
        return not names_layers(setup)


def names_layers(setup: Setup) -> bool:
    """Return True if adapters or frozen parts are selected by layer numbers, so that layers differ."""
    freeze, adapt = FREEZE.of(setup), ADAPT.of(setup)
    words: list[str] = [*freeze.parts, *freeze.only] if freeze else []
    given = adapt.arguments if adapt else {}
    for name in ("targets", "exclude", "rank_pattern", "save", "parameters"):
        words += given.get(name) or ()
    by_number = (freeze is not None and freeze.last != 0) or bool(given.get("layers"))
    return by_number or any(
        # In a rank pattern, a colon and the rank follow the name.
        _NUMBER.search(_ANY_NUMBER.sub("", word.rpartition(":")[0] or word))
        for word in words
    )
