"""The charts of a command's result as plain data. `document.py` puts them on a page, `static.py` draws them
to a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import RenderableType

from snugfit.features.page.colours import BEST, LIMIT, RESERVED
from snugfit.report.text.passages import Passage
from snugfit.results.prediction import ModuleLine
from snugfit.results.step_seconds import PhaseSpan


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the memory chart: the bytes of one category (weights, activations, ...) at each position
    of a step.
    """

    kind: str
    bytes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """The memory chart: bytes by category (weights, activations, ...) during a step, the lowest layer
    first.
    """

    positions: Sequence[float]
    """Horizontal positions, as shares of the step's events from 0 to 1."""
    layers: Sequence[Layer]
    reserved: Sequence[int]
    """Bytes that the allocator reserves plus those of CUDA's context, at each position."""
    limit: int | None
    """Usable bytes, drawn as a line; None if they are unknown or far above the curve."""
    phases: Sequence[Passage]
    micro_batches: Sequence[Passage]
    peak: int
    """Index of the position at which memory peaks."""
    peak_label: str

    @property
    def meanings(self) -> list[str]:
        """The entries of the legend: categories of memory (weights, activations, ...) and lines."""
        lines = [RESERVED, *([LIMIT] if self.limit else [])]
        return [*(layer.kind for layer in self.layers), *lines]


@dataclass(frozen=True, kw_only=True)
class ModuleMap:
    """The chart of bytes at the peak of memory by module and category, in descending order."""

    lines: Sequence[ModuleLine]

    @property
    def meanings(self) -> list[str]:
        """The entries of the legend: categories of memory (weights, activations, ...)."""
        return [line.kind for line in self.lines]


class BarFigure(NamedTuple):
    """One bar of a bar chart, with its value and label."""

    value: float
    label: str
    """The value in words, with its range."""
    low: float | None = None
    """Lower end of the value's range; None without a range."""
    high: float | None = None
    """Upper end of the value's range; None without a range."""


class BarGroup(NamedTuple):
    """Bars of a chart that share a name, such as a recipe's, with one bar for each series."""

    name: str
    bars: Sequence[BarFigure | None]
    """One bar for each series; None for a missing bar."""
    remark: str = ""
    """Text after the group's name."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A bar chart of several series on one scale."""

    series: Sequence[str]
    groups: Sequence[BarGroup]
    limit: float | None = None
    """Value of a line across all bars; None for no line."""

    @property
    def top(self) -> float:
        """The value at the end of the scale."""
        bars = [bar for group in self.groups for bar in group.bars if bar]
        ends = [end for bar in bars for end in (bar.value, bar.high or 0.0)]
        # An axis without length cannot be drawn.
        return max([*ends, self.limit or 0.0], default=0.0) or 1.0

    @property
    def meanings(self) -> list[str]:
        """The entries of the legend: the series, and the limit."""
        return [*self.series, *([LIMIT] if self.limit else [])]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The timeline of a training step: each phase's launches on the host, and its run on the device."""

    spans: Sequence[PhaseSpan]
    end_seconds: float
    meanings: Sequence[str] = ()


class RecipePoint(NamedTuple):
    """One recipe of a plan's Pareto front (of memory and speed), as a point of the chart."""

    number: int
    recipe: str
    bytes: int
    speed: float
    fits: bool
    best: bool
    label: str
    """The recipe's bytes and speed in words."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """The chart of a plan's Pareto front: memory against speed, one point for each recipe."""

    points: Sequence[RecipePoint]
    limit: int | None
    item: str = "samples"
    """Noun for the parts of a batch, such as samples. Speed is their number per second."""

    @property
    def meanings(self) -> list[str]:
        """The entries of the legend: the limit, and the ring around the best recipe."""
        best = [BEST] if any(point.best for point in self.points) else []
        return [*([LIMIT] if self.limit else []), *best]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart of a page, with a description for screen readers and a table of the same numbers."""

    title: str
    about: str
    """Description of the picture for a screen reader."""
    drawing: MemoryCurve | ModuleMap | Bars | Timeline | Front
    heads: tuple[str, ...] = ()
    """Column heads of the table. A head that ends in `>` is of a column of numbers. Empty without a table."""
    rows: Sequence[Sequence[str]] = ()
    """Rows of the table's cells, one cell for each head."""
    note: str = ""
    """Sentence below the picture."""
    numbered: bool = False
    """True if numbers in the picture refer to rows of the table."""


class Figure(NamedTuple):
    """One large number at the top of a page, such as the memory, with its name and a remark."""

    name: str
    value: str
    remark: str = ""
    share: float | None = None
    """Value from 0 to 1 of a bar below the number; None for no bar."""
    tone: str = ""
    """Colour class of the number: `good`, `tight` or `bad`; empty for neutral."""


class PageParts(NamedTuple):
    """The title, charts and texts of a command's result, for a page, a plot or a notebook cell."""

    title: str
    """Page title: the result in everyday words."""
    lines: Sequence[str]
    """Sentences below the title: the job, the recipe, and the result in detail."""
    charts: Sequence[Chart]
    report: RenderableType
    """Complete report in words and tables."""
    doubts: Sequence[str] = ()
    """Warnings about uncertain parts of the result."""
    figures: Sequence[Figure] = ()
    tone: str = ""
    """Colour class of the title: `good`, `tight` or `bad`; empty for a result that is neither."""

    @property
    def meanings(self) -> Iterable[str]:
        """Entries of the legend for all colours and lines of the charts, in the order of their first use."""
        return dict.fromkeys(meaning for chart in self.charts for meaning in chart.drawing.meanings)
