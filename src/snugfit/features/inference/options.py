"""Command-line options of the phase `generate` (text generation), and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from snugfit.cli import arguments as given
from snugfit.errors import UsageError

COMMANDS = ("predict", "plan", "gpus", "measure")
"""Commands of snugfit that have the phase `generate`."""


def _option(name: str, kind: Any, sentence: str, *flags: str) -> inspect.Parameter:
    annotation = Annotated[kind, given.option(given.JOB, f"With --phase generate: {sentence}", *flags)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


OPTIONS = (
    _option(
        "prompt",
        int | None,
        "tokens of each prompt; the same as --sequence-length. [512 or the longest]",
    ),
    _option(
        "new_tokens", int | None, "tokens that each sequence gets. [128]", "--new-tokens", "--max-new-tokens"
    ),
    _option("beams", int | None, "beams of each sequence. [1]", "--beams", "--num-beams"),
    _option(
        "cache",
        Literal["dynamic", "static", "quantized", "offloaded", "offloaded_static"] | None,
        "kind of transformers' cache. \\[dynamic]",
        "--cache",
        "--cache-implementation",
    ),
    _option("sample", bool | None, "draw tokens by their probabilities.", "--sample", "--do-sample"),
    _option("top_k", int | None, "draw one of this many tokens; 0 for all. [50]"),
    _option("top_p", float | None, "draw a token of those with this probability together. [1]"),
)
"""Command-line options of the phase. Some also have transformers' names of the settings."""


def add_prompt(flags: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Set the sequence length in the settings to the length of the prompt. Raises `UsageError` for a phase
    without text generation, and for two lengths.
    """
    prompt = flags.get("prompt")
    if prompt is None:
        return
    phase = settings.get("phase", "train")
    if phase != "generate":
        raise UsageError(f"--prompt {prompt}: the phase {phase} has no prompt. Add --phase generate.")
    if settings.get("sequence_length", prompt) != prompt:
        raise UsageError(
            f"--prompt {prompt} and --sequence-length {settings['sequence_length']} contradict each other. "
            "Give one of them."
        )
    settings["sequence_length"] = prompt


def refuse_others(command: str, request: Any) -> None:
    """Raise `UsageError` for a command that does not support text generation, and for several GPUs."""
    if request.job.phase != "generate":
        return
    if command not in COMMANDS:
        raise UsageError(
            f"snugfit {command} does not support --phase generate yet. Commands: {', '.join(COMMANDS)}."
        )
    if request.gpus != 1:
        raise UsageError("--phase generate is for one GPU. Leave --gpus and --mesh out.")
    if request.has_auto:
        raise UsageError("--phase generate recomputes nothing. Leave 'auto' out of the recipe.")
    if request.recipe.pieces != 1:
        raise UsageError("--phase generate takes a batch as a whole. Leave micro_batches out.")
