"""What became of a user's configuration, as text: taken, not quite the same, ignored."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from snugfit.exchange.account import Reading
from snugfit.report.text.terminal import table, words

LONGEST_VALUE = 40


def render(reading: Reading) -> RenderableType:
    """The account of a file, key by key."""
    head = words(f"From {reading.path} ({reading.title}), for the {reading.settings['loop']} loop:")
    parts: list[RenderableType] = [head]
    rows = [(line.key, _short(line.value), line.says) for line in reading.took]
    if rows:
        parts.append(table(("Taken", "Value", "Here"), rows))
    if reading.differs:
        rows = [(line.key, _short(line.value), line.says) for line in reading.differs]
        parts.append(table(("Not quite the same", "Value", "Why"), rows))
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
