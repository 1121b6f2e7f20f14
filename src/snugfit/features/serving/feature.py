"""Registration of the feature `serving`: memory of vLLM, sglang and llama.cpp servers at their start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from snugfit.techniques.feature import Feature


class ServingFeature(Feature):
    """The feature that adds the command `serve` and the function `predict_serving`."""

    public_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "request": ("ServingRequest",),
        "answer": ("ServingAnswer",),
        "predict": ("predict_serving",),
    }

    def commands(self) -> Sequence[Callable[..., Any]]:
        """Return the function of `snugfit serve`."""
        from snugfit.features.serving.command import serve

        return (serve,)

    def rewrite_words(self, words: Sequence[str], declared: Collection[str]) -> Sequence[str]:
        """Rewrite the command line of `predict` or `gpus` with `--phase serve` as `snugfit serve`. Raises
        `UsageError` for another command.
        """
        from snugfit.features.serving.phase_words import as_serve

        return as_serve(words) if "serve" in declared else words

    def documents(self) -> Mapping[str, type]:
        """Return the classes of the JSON documents of `snugfit serve`."""
        from snugfit.features.serving.answer import ServingAnswer, ServingComparison

        return {"serve --json": ServingAnswer, "serve --all-gpus --json": ServingComparison}

    def reports(self) -> Mapping[type, Callable[[Any], Any]]:
        """Return the function that renders the report of a `ServingAnswer`, by that class."""
        from snugfit.features.serving.answer import ServingAnswer
        from snugfit.features.serving.report import render

        return {ServingAnswer: render}
