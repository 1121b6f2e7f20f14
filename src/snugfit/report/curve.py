"""The curve of live bytes through a step, drawn with block characters, with the phases under it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from snugfit.report.text.passages import micro_batch_passages, phase_passages
from snugfit.report.text.terminal import words
from snugfit.results.prediction import CurvePoint
from snugfit.units import show_bytes

COLUMNS = 72
NARROWEST_NUMBER = 3
"""Width in columns of a micro-batch from which each shows its number."""

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw_curve(
    curve: Sequence[CurvePoint], *, micro_batches: int = 1, turn: str = "step"
) -> list[RenderableType]:
    """Return the live bytes during one `turn` (a step or a call) as lines of text, with the phases below.

    Micro-batches get numbers if they are too short for names.
    """
    top = max(point.live_bytes for point in curve) or 1
    heights = sample([(point.position, point.live_bytes / top) for point in curve], COLUMNS)
    passages, note = phase_passages(curve), ""
    rounds = micro_batch_passages(curve, micro_batches, NARROWEST_NUMBER / COLUMNS)
    forward = min((one.end - one.start for one in passages if one.name == "forward"), default=1.0)
    # In narrow forward passes, numbers of micro-batches replace the names of phases.
    if rounds and forward * COLUMNS < len("└forward"):
        passages = [*rounds, *(one for one in passages if one.start >= rounds[-1].end)]
        note = ", the numbers are micro-batches" if len(rounds) > 1 else ""
    spans = [(one.name, round(one.start * COLUMNS), round(one.end * COLUMNS)) for one in passages]
    head = words(f"Live bytes through one steady {turn} (top {show_bytes(top)}{note})", "bold")
    return [head, words("\n".join([*bars(heights), legend(spans, COLUMNS)])), Text()]


def bars(heights: Sequence[float], *, rows: int = 4) -> list[str]:
    """Return bars of the given heights (0 to 1) as `rows` lines of block characters, the highest
    line first.
    """
    # A letter of `_EIGHTHS` has eight levels.
    levels = [round(max(0.0, min(1.0, height)) * rows * 8) for height in heights]
    return [
        "".join(_EIGHTHS[max(0, min(8, level - 8 * row))] for level in levels)
        for row in reversed(range(rows))
    ]


def sample(points: Sequence[tuple[float, float]], columns: int) -> list[float]:
    """Return the largest value in each of `columns` equal parts of [0, 1]; an empty part repeats the one
    before it.

    A part shows its maximum and not its mean, because the curve is there for its peaks.
    """
    largest: list[float | None] = [None] * columns
    for position, value in points:
        part = min(columns - 1, max(0, int(position * columns)))
        largest[part] = max(value, largest[part] or 0.0)
    samples, current = [], 0.0
    for maximum in largest:
        current = current if maximum is None else maximum
        samples.append(current)
    return samples


def legend(spans: Sequence[tuple[str, int, int]], columns: int) -> str:
    """Return a line of names under the columns that they cover, each truncated to its columns."""
    line = [" "] * columns
    for name, start, end in spans:
        room = end - start
        text = ("└" + name)[:room] if room > 1 else "└"[:room]
        line[start : start + len(text)] = text
    return "".join(line).rstrip()
