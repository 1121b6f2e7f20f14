"""A curve drawn with block characters, a few lines high, with the phases under it."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def bars(heights: Sequence[float], *, rows: int = 4) -> list[str]:
    """Columns of the given heights (0 to 1), as `rows` lines of text, the highest first."""
    levels = [round(max(0.0, min(1.0, height)) * rows * 8) for height in heights]
    return [
        "".join(_EIGHTHS[max(0, min(8, level - 8 * row))] for level in levels)
        for row in reversed(range(rows))
    ]


def sample(points: Sequence[tuple[float, float]], columns: int) -> list[float]:
    """The largest value in each of `columns` equal parts of [0, 1]; an empty part holds the one before it.

    Peaks are what the curve is looked at for, so a part shows its maximum and not its mean.
    """
    largest: list[float | None] = [None] * columns
    for position, value in points:
        part = min(columns - 1, max(0, int(position * columns)))
        largest[part] = max(value, largest[part] or 0.0)
    held, current = [], 0.0
    for value_here in largest:
        current = current if value_here is None else value_here
        held.append(current)
    return held


def legend(spans: Sequence[tuple[str, int, int]], columns: int) -> str:
    """Names under the columns they span, each cut to its span."""
    line = [" "] * columns
    for name, start, end in spans:
        room = end - start
        text = ("└" + name)[:room] if room > 1 else "└"[:room]
        line[start : start + len(text)] = text
    return "".join(line).rstrip()
