"""Registration of the feature `inference`: the phase `generate` (`phases.py`) and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snugfit.techniques.feature import Feature
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import inspect
    from contextlib import AbstractContextManager

    from snugfit.techniques.setup import Setup


class Inference(Feature):
    """The feature that predicts memory and time of text generation."""

    techniques: ClassVar[Mapping[Slot, tuple[str, ...]]] = {Slot.CACHE: ("kv_cache",)}
    removed_options: ClassVar[Mapping[tuple[str, str], str]] = {
        (command, "--largest"): (
            f"snugfit {command} keeps the sizes of the job. For the largest size of one recipe: snugfit "
            "predict MODEL --recipe RECIPE --largest SIZE."
        )
        for command in ("plan", "gpus", "measure")
    } | {
        (command, option): advice
        for command in ("predict", "plan", "gpus", "measure")
        for option, advice in {
            "--temperature": "A temperature changes no bytes and no seconds. Leave it out.",
            "--generate": "Generation is a phase: --phase generate.",
        }.items()
    }

    def options(self, command: str) -> Sequence[inspect.Parameter]:
        """Return the command-line options of text generation, such as the number of new tokens, as
        parameters.
        """
        from snugfit.features.inference.options import COMMANDS, OPTIONS

        return OPTIONS if command in COMMANDS else ()

    def handlers(self) -> Sequence[Any]:
        """Return the handler that applies the field `cache` of `Setup` (a recipe's settings)."""
        from snugfit.features.inference.handler import CacheHandler

        return (CacheHandler(),)

    def read_configuration(self, flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Set the sequence length in the command's settings to the length of the prompt."""
        from snugfit.features.inference.options import add_prompt

        add_prompt(flags, settings)

    def rate_names(self, kernel: Any) -> Sequence[str]:
        """Return the name of the hardware rate at which a beam search copies the key-value cache."""
        of_beams = kernel.operator == "aten::index_select" and kernel.phase in ("prefill", "decode")
        return ("aten::index_select of beams",) if of_beams else ()

    def simulation_overrides(
        self, setup: Setup, policy: Any, recorder: Any, notes: Any
    ) -> AbstractContextManager[None]:
        """Return a context in which a call of `generate` can be simulated on `meta` tensors."""
        from unittest.mock import patch

        from snugfit.features.inference.step import GenerateStep

        return patch.object(GenerateStep, "recorder", recorder)

    def prepare(self, command: str, request: Any) -> Any:
        """Return the command's parsed options unchanged. Raises `UsageError` if the command does not support
        text generation.
        """
        from snugfit.features.inference.options import refuse_others

        refuse_others(command, request)
        return request
