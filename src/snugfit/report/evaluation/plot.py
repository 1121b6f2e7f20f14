"""The summary plot: memory and speed of all experiments, predicted, measured and published side by side.

Drawn on a `Figure` of its own, without pyplot, so that nothing global changes and no window system is asked
for. The same result gives the same bytes: no date and no random identifiers go into the file. Texts are drawn
as they are; a `$` in a name is no formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

from snugfit.evaluation.guide_result import GuideResult
from snugfit.evaluation.guide_suite import machines
from snugfit.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg")
STYLE = {
    "text.parse_math": False,
    "svg.hashsalt": "snugfit",
    "svg.fonttype": "path",
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_WIDTH = 12.5
"""Inches."""
_HEIGHT_OF_ROW = 0.56
_LABEL_COLUMNS = 26
_UNDER_BARS = 0.47
"""Down from the middle of a row, in rows."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One colour of bars: a value, or nothing, for each experiment."""

    label: str
    color: str
    values: tuple[float | None, ...]


def summary(result: GuideResult, form: str) -> bytes:
    """The plot as a `png` or an `svg` file's bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = [fill(row.name, _LABEL_COLUMNS) for row in result.rows]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, 1.8 + _HEIGHT_OF_ROW * len(names)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _bars(left, memory_series(result), "{:.1f}")
        _diamonds(left, result)
        for place, row in enumerate(result.rows):
            if row.refused:
                left.text(0.05, place, "not predicted", fontsize=7, color="0.4", va="center")
        _bars(right, speed_series(result), "{:.1f}")
        left.set_yticks(range(len(names)), names)
        left.set_ylim(len(names) - 0.4, -0.6)
        left.set_xlabel("GPU memory, GiB")
        right.set_xlabel("Samples per second")
        if result.memory_bytes:
            left.axvline(
                result.memory_bytes / GIB,
                color="0.4",
                linewidth=0.8,
                linestyle=":",
                label=f"memory, {result.gpu}",
            )
        figure.suptitle("The guide's experiments: memory and speed", fontsize=12)
        handles, labels = _legend((left, right))
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        out = BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(out, format=form, dpi=130, metadata=metadata)
    return out.getvalue()


def memory_series(result: GuideResult) -> list[Series]:
    """GiB of GPU memory: predicted, measured, published, and predicted for the published machine."""
    rows, named = result.rows, [machine for machine in machines().values() if machine.gpu]
    found = [
        Series(
            label=f"predicted, {result.gpu}",
            color="#0072B2",
            values=tuple(_gib(row.predicted_bytes) for row in rows),
        ),
        Series(
            label=f"measured, {result.device}",
            color="#009E73",
            values=tuple(_gib(row.measured_bytes) for row in rows),
        ),
    ]
    for machine in named:
        thens = [
            next((one for one in row.then if one.published.machine == machine.name), None) for row in rows
        ]
        predicted = tuple(_gib(then.predicted_bytes if then else None) for then in thens)
        printed = tuple(_gib(then.published_bytes if then else None) for then in thens)
        found.append(
            Series(
                label=f"predicted, {machine.gpu}, {machine.software} software",
                color="#56B4E9",
                values=predicted,
            )
        )
        found.append(Series(label=f"published, {machine.gpu}", color="#E69F00", values=printed))
    return [series for series in found if any(value is not None for value in series.values)]


def speed_series(result: GuideResult) -> list[Series]:
    """Samples per second: measured and published; predictions hold no seconds yet."""
    rows = result.rows
    seen = tuple(row.timing.samples_per_second if row.timing else None for row in rows)
    found = [Series(label=f"measured, {result.device}", color="#009E73", values=seen)]
    for machine in machines().values():
        if machine.gpu:
            thens = [
                next((one for one in row.then if one.published.machine == machine.name), None) for row in rows
            ]
            values = tuple(then.published.samples_per_second if then else None for then in thens)
            found.append(Series(label=f"published, {machine.gpu}", color="#E69F00", values=values))
    return [series for series in found if any(value is not None for value in series.values)]


def _bars(axes: Axes, series: list[Series], form: str) -> None:
    """Each experiment's bars under each other; only those that it has take room."""
    count = len(series[0].values) if series else 0
    widest = max((value or 0 for one in series for value in one.values), default=0)
    for place in range(count):
        present = [one for one in series if one.values[place] is not None]
        height = 0.84 / max(len(present), 2)
        for order, one in enumerate(present):
            value = one.values[place] or 0.0
            at = place + (order - (len(present) - 1) / 2) * height
            axes.barh(at, value, height=0.92 * height, color=one.color)
            axes.text(value + widest * 0.008, at, form.format(value), va="center", fontsize=6.5, color="0.2")
    for one in series:
        axes.barh(0, 0, color=one.color, label=one.label)
    axes.set_xlim(0, widest * 1.1 or 1)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _diamonds(axes: Axes, result: GuideResult) -> None:
    """Published figures of machines that name no GPU: a mark, since no prediction can stand beside them."""
    known = machines()
    points = [
        (then.published_bytes / GIB, place + _UNDER_BARS)
        for place, row in enumerate(result.rows)
        for then in row.then
        if not known[then.published.machine].gpu
    ]
    if points:
        x, y = zip(*points, strict=True)
        axes.scatter(
            x,
            y,
            marker="D",
            s=22,
            color="0.25",
            edgecolors="white",
            linewidths=0.8,
            zorder=3,
            label="published, GPU not named",
        )


def _legend(panels: tuple[Axes, Axes]) -> tuple[list[Any], list[str]]:
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return list(handles.values()), list(handles)


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB
