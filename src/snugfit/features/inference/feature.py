"""The feature `inference`, registered: options of the phase `generate` (`phases.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    import inspect


class Inference(Feature):
    """The feature that predicts the generation of text."""

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the command-line options of text generation, such as the number of new tokens, as
        parameters.
        """
        from snugfit.features.inference.options import COMMANDS, OPTIONS

        return OPTIONS if command in COMMANDS else ()

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Set the sequence length to that of the prompt in the command's settings."""
        from snugfit.features.inference.options import add_prompt

        add_prompt(flags, settings)

    def prepare(self, command: str, request: Any) -> Any:
        """Return the request. Raises `UsageError` if the command does not support the phase."""
        from snugfit.features.inference.options import refuse_others

        refuse_others(command, request)
        return request
