"""The feature `inference`, registered: options of the phase `generate` (`phases.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.techniques.feature import Feature

if TYPE_CHECKING:
    import inspect
    from contextlib import AbstractContextManager

    from snugfit.techniques.setup import Setup


class Inference(Feature):
    """The feature that predicts the generation of text."""

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the settings of a generation."""
        from snugfit.features.inference.options import COMMANDS, OPTIONS

        return OPTIONS if command in COMMANDS else ()

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Add the length of the prompt."""
        from snugfit.features.inference.options import add_prompt

        add_prompt(flags, settings)

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which the copies of an offloaded cache belong to this simulation."""
        from snugfit.features.inference.offloaded import recorded_by

        return recorded_by(recorder)

    def prepare(self, command: str, request: Any) -> Any:
        """Return the request. Raises `UsageError` if the command does not support the phase."""
        from snugfit.features.inference.options import refuse_others

        refuse_others(command, request)
        return request
