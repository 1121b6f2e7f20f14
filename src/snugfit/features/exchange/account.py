"""What became of a user's configuration: its settings here, and an account of every key."""

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


@dataclass(frozen=True, kw_only=True)
class Line:
    """One key of the file, and what became of it."""

    key: str
    """The key as the file has it."""

    value: str
    """The value as the file has it, or `(default)`."""

    says: str
    """What it became, or why it did not."""

    instead: str = ""
    """Of what was refused: the key of a job file, or the flag, that makes it unnecessary."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.says}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a configuration file says."""

    path: str
    """The path of the file."""

    title: str
    """What kind of file it is."""

    export: str
    """The target of an export in the user's own tool; empty where that is `hf`."""

    settings: Mapping[str, Any]
    """As a job file would say it: model, task, batch_size, recipe, loop, ..."""

    by_flags: Mapping[str, str]
    """By setting: the argument on the command line that said it."""

    took: tuple[Line, ...]
    """What became part of the job or the recipe."""

    differs: tuple[Line, ...]
    """What was taken and is not quite the same here."""

    ignored: tuple[Line, ...]
    """What was ignored, and why that is right."""

    refused: tuple[Line, ...]
    """What has no counterpart."""

    def refuse(self, otherwise: Collection[str] = ()) -> None:
        """Raises `UsageError` with what has no counterpart and is not said `otherwise`, by a flag or so."""
        lines = [str(line) for line in self.refused if line.instead not in otherwise]
        if lines:
            flags = sorted({line.instead.replace("_", "-") for line in self.refused})
            raise UsageError(
                "\n".join([f"{self.path} ({self.title}) contains what snugfit cannot predict:", *lines])
                + "\nLeave it out, or set what to predict instead with "
                f"--{', --'.join(flags)}."
            )

    def show(self) -> None:
        """Print on stderr how each key was used: stdout is for the answer."""
        show(render_reading(self), stderr=True)


def render_reading(reading: Reading) -> RenderableType:
    """The account of a file, key by key."""
    head = words(f"From {reading.path} ({reading.title}), for the {reading.settings['loop']} loop:")
    parts: list[RenderableType] = [head]
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
