"""The phase `generate` (text generation), which the core finds by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from snugfit.job.phases import AddedPhase, PhaseWords

MOST_CONTEXT, MOST_BEAMS = 1 << 24, 1 << 10
"""Limits of a search for the largest prompt in tokens, and for the largest number of beams."""


class Generation(AddedPhase):
    """The phase of text generation with transformers' `generate`."""

    name: ClassVar[str] = "generate"
    title: ClassVar[str] = "generation"
    words: ClassVar[PhaseWords] = PhaseWords("generate with", "call", "calls", "sequences", "tokens")
    note: ClassVar[str] = (
        "Medians of three H200 hosts: prefill 6 to 9 % off, decoding 11 to 20 %. "
        "Loading seconds are a formula."
    )
    setting_types: ClassVar[Mapping[str, type]] = {
        "new_tokens": int, "beams": int, "cache": str, "sample": bool, "top_k": int, "top_p": float,
    }  # fmt: skip
    slots: ClassVar[frozenset[str]] = frozenset({"cache"})
    unused: ClassVar[frozenset[str]] = frozenset({"batching"})
    sizes: ClassVar[Mapping[str, tuple[str, int]]] = {
        "context": ("sequence_length", MOST_CONTEXT),
        "beams": ("beams", MOST_BEAMS),
    }

    def settings(self, job: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all settings of text generation by name, with defaults. Raises `JobError` for invalid
        ones.
        """
        from snugfit.features.inference.settings import GenerationSettings

        return GenerationSettings.complete(job, given)

    def default_length(self, model: Any, task: str, given: Mapping[str, Any]) -> int | None:
        """Return the longest prompt, in tokens, that a model supports with its new tokens, if the default
        prompt is longer; otherwise None.
        """
        from snugfit.features.inference.settings import default_prompt

        return default_prompt(model, task, given)

    def arguments(self, job: Any) -> list[str]:
        """Return options for the settings of a generation that are not the default; `--sample` has no
        value.
        """
        from snugfit.features.inference.settings import GenerationSettings

        usual, words = vars(GenerationSettings()), list[str]()
        for name, value in job.phase_settings.items():
            if value != usual[name]:
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    def tokens(self, job: Any) -> int:
        """Return the number of new tokens of all sequences in a call of `generate`."""
        return int(job.batch_size * job.phase_settings["new_tokens"])

    def step_class(self, loop: str) -> type[Any]:
        """Return the class whose step is one call of `generate`. Raises `UsageError` for another loop than
        the plain one.
        """
        from snugfit.errors import UsageError
        from snugfit.features.inference.step import GenerateStep

        if loop != "plain":
            raise UsageError(f"The phase generate has no loop {loop!r}. Leave --loop out.")
        return GenerateStep

    def rehearse(
        self, job: Any, open_step: Callable[[Any], Any], record: Callable[[Any, int], Any], steps: int
    ) -> Any:
        """Simulate calls of `generate`, and return their `Trace`."""
        from snugfit.features.inference.long_runs import rehearse_generation

        return rehearse_generation(job, open_step, record, steps)

    def summary(self, prediction: Any) -> Any:
        """Return the key-value cache and the seconds of generation (`GenerationResult`) in a prediction."""
        from snugfit.features.inference.speed import GenerationResult

        return GenerationResult.of(prediction)

    def lines(self, summary: Any) -> Mapping[str, str]:
        """Return the report lines of a `GenerationResult` by label, such as the cache and seconds per
        token.
        """
        return dict(summary.lines())


GENERATION = Generation()
