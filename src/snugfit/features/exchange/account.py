"""The result of reading a user's configuration file: settings for snugfit, and each key with its use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from snugfit.errors import UsageError
from snugfit.report.text.table import table
from snugfit.report.text.terminal import show, words

LONGEST_VALUE = 40

MOST_DOUBTS = 3
"""Largest number of unread script statements that a report lists."""


class UnsupportedJobError(UsageError):
    """Error for a training job, a model or a training method that snugfit does not support."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One key of a configuration file with its value, and its meaning for snugfit."""

    key: str
    """The key of a setting in the user's file."""

    value: str
    """The setting's value in the file, or `(default)`."""

    says: str
    """Meaning of the key for snugfit, or the reason why snugfit ignores or refuses it."""

    instead: str = ""
    """The option or job-file key that replaces a refused key; empty for none."""

    job: str = ""
    """Job or training method that a refused key belongs to, if no option replaces the key. Empty for other
    keys.
    """

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.says}" if self.value else f"{self.key}: {self.says}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A configuration file as snugfit's settings, with each key and its use."""

    path: str
    """The path of the file that was read."""

    title: str
    """Name of this kind of file in messages."""

    export: str
    """Value of `snugfit export --to` for the tool that the user's file belongs to; empty for `hf`."""

    settings: Mapping[str, Any]
    """Settings read from the file, with the keys of a job file: model, task, batch_size, recipe, loop, ..."""

    by_flags: Mapping[str, str]
    """Command-line argument that set each setting not read from the file, by setting."""

    took: tuple[Line, ...]
    """Keys of the file that became settings of the job or the recipe."""

    differs: tuple[Line, ...]
    """Keys that became settings with a slightly different meaning, which is explained."""

    ignored: tuple[Line, ...]
    """Keys without effect on memory and time, with the reasons."""

    refused: tuple[Line, ...]
    """Keys that snugfit does not support, with the reasons."""

    unread: tuple[Line, ...] = ()
    """Script statements and keys that may affect the prediction and were not read."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return warnings about unread parts of a configuration file."""
        if not self.unread:
            return ()
        shown = "; ".join(f"{one.key}: {one.value}" for one in self.unread[:MOST_DOUBTS])
        more = len(self.unread) - MOST_DOUBTS
        return (f"{self.path} was not read in full: {shown}{f'; and {more} more' if more > 0 else ''}.",)

    def refuse(self, otherwise: Collection[str] = ()) -> None:
        """Raise `UsageError` with a list of the keys of a configuration for which snugfit has no setting.

        A key is exempt if a flag or a job file sets its replacement, which `otherwise` names. A key of an
        unsupported job or method raises an error about it alone.
        """
        for line in self.refused:
            if line.job and line.instead not in otherwise:
                cure = f" --{line.instead} replaces it." if line.instead else ""
                raise UnsupportedJobError(
                    f"{self.path} ({self.title}): snugfit does not support {line.job} yet "
                    f"({line.key}={_short(line.value)}): {line.says}.{cure}"
                )
        refused = [line for line in self.refused if line.instead not in otherwise]
        if refused:
            flags = sorted({f"--{line.instead.replace('_', '-')}" for line in refused if line.instead})
            cure = f"Leave it out, or set what to predict instead with {', '.join(flags)}."
            head = f"{self.path} ({self.title}) has parts that are not predicted:"
            raise UsageError("\n".join([head, *map(str, refused), cure if flags else "Correct the file."]))

    def show(self) -> None:
        """Print on stderr how snugfit used each key of a configuration file, such as `bf16: true`."""
        show(render_reading(self), stderr=True)


def render_reading(reading: Reading) -> RenderableType:
    """Return the keys of a configuration file and their uses as terminal output."""
    head = words(f"From {reading.path} ({reading.title}), for the {reading.settings['loop']} loop:")
    parts: list[RenderableType] = [head]
    if reading.unread:
        rows = [(one.key, one.value, one.says) for one in reading.unread]
        parts.append(table(("Not read, may change the answer", "Statement", "Why"), rows))
    for lines, heads in (
        (reading.took, ("Taken", "Value", "Here")),
        (reading.differs, ("Not quite the same", "Value", "Why")),
    ):
        if lines:
            parts.append(table(heads, ((line.key, _short(line.value), line.says) for line in lines)))
    if reading.ignored:
        parts.append(table(("Ignored", "Why"), _by_reason(reading)))
    return Group(*parts, Text())


def _by_reason(reading: Reading) -> list[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for line in reading.ignored:
        reasons.setdefault(line.says, []).append(line.key)
    return [(", ".join(keys), reason) for reason, keys in reasons.items()]


def _short(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 3] + "..."
