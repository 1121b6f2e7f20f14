"""Conversion of the command lines `snugfit predict --phase serve` and `snugfit gpus --phase serve` to
`snugfit serve`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise

from snugfit.errors import UsageError, escape_controls

COMMANDS = ("predict", "gpus")
"""Commands of snugfit that have the phase `serve`."""


def as_serve(words: Sequence[str]) -> Sequence[str]:
    """Rewrite a command line with `--phase serve` as `snugfit serve`. Return other command lines unchanged.

    The new command is printed on stderr. Raises `UsageError` for a command without the option `--phase`.
    """
    if words[:1] == ["serve"]:
        words = _with_engine_version(words)
    if "--phase=serve" not in words and ("--phase", "serve") not in pairwise(words):
        return words
    command, *rest = words
    if command == "serve":
        return [command, *_without_phase(rest)]
    if command.startswith("-"):
        raise UsageError(
            "--phase serve comes after a command. Try snugfit serve MODEL --engine vllm --gpu NAME, or "
            "--all-gpus to compare GPUs."
        )
    if command not in COMMANDS:
        raise UsageError(
            f"--phase serve is not a phase of snugfit {command}. Allowed are {', '.join(COMMANDS)}. Try "
            "snugfit serve MODEL --engine vllm --gpu NAME, or --all-gpus to compare GPUs."
        )
    rest = _without_phase(rest)
    served = ["serve", *(rest if command == "predict" else _comparison(rest))]
    print(escape_controls(f"Same as: {shlex.join(['snugfit', *served])}"), file=sys.stderr)
    return served


def _with_engine_version(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `--engine-version` in place of `--version` and a number.
    `--version` alone belongs to snugfit.
    """
    return [
        "--engine-version" if word == "--version" and after[:1].isdigit() else word
        for word, after in zip(words, [*words[1:], ""], strict=True)
    ]


def _without_phase(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without `--phase serve`."""
    rest: list[str] = []
    for word in words:
        if word == "serve" and rest[-1:] == ["--phase"]:
            rest.pop()
        elif word != "--phase=serve":
            rest.append(word)
    return rest


def _comparison(words: Sequence[str]) -> list[str]:
    """Rewrite the words of `snugfit gpus` as `snugfit serve` for all GPUs, or for the one that they name
    first.

    Raises `UsageError` for several names.
    """
    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    names, options = words[:count], list(words[count:])
    if len(names) > 1:
        raise UsageError(
            f"--phase serve with the GPUs {', '.join(names)}: allowed are one GPU or all. Name one, or leave "
            "the names out."
        )
    model: list[str] = []
    if "--for" in options[:-1]:
        at = options.index("--for")
        model, options = [options[at + 1]], options[:at] + options[at + 2 :]
    model += [word.removeprefix("--for=") for word in options if word.startswith("--for=")]
    options = [word for word in options if not word.startswith("--for=")]
    return [*model, *(("--gpu", names[0]) if names else ("--all-gpus",)), *options]
