"""Plugins that a command line or its job file names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from snugfit.errors import SnugfitError, UsageError

OPTION, JOB = "--plugin", "--job"


def named_plugins(arguments: Sequence[str]) -> list[str]:
    """Return the names and paths of plugins in the option `--plugin`, and in the key `plugin` of the job
    file.
    """
    return [*_values_of(OPTION, arguments), *_of_job_files(_values_of(JOB, arguments))]


def without_plugins(arguments: Sequence[str]) -> list[str]:
    """Return the command line without `--plugin` and its values. Raises `UsageError` for a missing value."""
    if OPTION in arguments[-1:]:
        raise UsageError(
            "--plugin needs a value: the name of an installed plugin, or the path of its folder."
        )
    words = iter(arguments)
    # `next` skips the word after the option, which is its value.
    return [word for word in words if not (word == OPTION and next(words)) and not _is_joined(word)]


def words_in(text: str) -> list[str]:
    """Return the names and paths of plugins in the value of a job file's key `plugin`."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _is_joined(word: str) -> bool:
    return word.startswith(f"{OPTION}=")


def _values_of(option: str, arguments: Sequence[str]) -> Iterator[str]:
    for word, following in pairwise([*arguments, ""]):
        if word == option and following:
            yield following
        elif word.startswith(f"{option}="):
            yield word.partition("=")[2]


def _of_job_files(files: Iterator[str]) -> Iterator[str]:
    """Yield the plugins that job files name. A file that cannot be read is skipped; the command itself
    reports it.
    """
    for file in files:
        from snugfit.user_files import LimitedLoader, load_yaml, read_text

        with suppress(SnugfitError):
            document = load_yaml(read_text(Path(file), noun="job file"), file, LimitedLoader)
            if isinstance(document, dict) and isinstance(text := document.get("plugin"), str):
                yield from words_in(text)
