"""Memory of vLLM, sglang and llama.cpp at their start, and the sequences that their caches hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from snugfit.errors import UsageError
from snugfit.techniques.feature import Feature


class ServingFeature(Feature):
    """Add the command `serve` and the function `predict_serving`."""

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
        """Return the words. Raises `UsageError` with the right command for `--phase serve` of another."""
        phase = "--phase=serve" in words or ("--phase", "serve") in pairwise(words)
        if phase and "--engine" not in declared:
            raise UsageError(
                "--phase serve is not a phase of this command. Write snugfit serve MODEL --engine vllm --gpu "
                "NAME, or --all-gpus to compare GPUs."
            )
        return words

    def documents(self) -> Mapping[str, type]:
        """Return the documents of `snugfit serve`."""
        from snugfit.features.serving.answer import ServingAnswer, ServingComparison

        return {"serve --json": ServingAnswer, "serve --all-gpus --json": ServingComparison}

    def reports(self) -> Mapping[type, Callable[[Any], Any]]:
        """Return the report of a server's memory."""
        from snugfit.features.serving.answer import ServingAnswer
        from snugfit.features.serving.report import render

        return {ServingAnswer: render}
