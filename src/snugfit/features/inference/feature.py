"""The feature `inference`, registered: options of the phase `generate` (`phases.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import inspect


class Inference(Feature):
    """The feature that predicts the generation of text."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {Slot.CACHE: ("kv_cache",)}

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the settings of a generation."""
        from snugfit.features.inference.options import COMMANDS, OPTIONS

        return OPTIONS if command in COMMANDS else ()

    def handlers(self) -> Sequence[Any]:
        """Return the handler of the field `cache`."""
        from snugfit.features.inference.handler import CacheHandler

        return (CacheHandler(),)

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Add the length of the prompt."""
        from snugfit.features.inference.options import add_prompt

        add_prompt(flags, settings)

    def prepare(self, command: str, request: Any) -> Any:
        """Return the request. Raises `UsageError` if the command does not support the phase."""
        from snugfit.features.inference.options import refuse_others

        refuse_others(command, request)
        return request
