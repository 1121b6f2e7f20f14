"""Tables in a terminal of any width: the first column is always shown, numbers are not broken, no line is too
long.

In a narrow terminal the padding shrinks first. Then columns move to lines of their own under the row, recipes
first, texts next and figures last. Such a line is `Recipe: bf16 + every_layer · start-up s: 9.1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from snugfit.report.text.terminal import words

NARROWEST_HEAD = 8
"""Smallest width in characters of the heading of a column of numbers."""

READABLE = 24
"""Smallest width in characters of a column of text. The first column, which names the row, gets more."""

READABLE_FIRST = 48

RECIPE = "Recipe<"
"""Heading of the column of recipes, which comes first."""

INDENT = 4
"""Indentation in characters of a line below its table row."""


class _Column:
    """One column of a table. A title that ends in `>` marks a column of numbers, in `<` one of recipes."""

    def __init__(self, head: str, cells: Sequence[Text], *, first: bool) -> None:
        self.figures, self.recipe, self.first = head.endswith(">"), head.endswith("<"), first
        self.name, self.cells = head.rstrip("<>"), cells
        longest = max((cell.cell_len for cell in cells), default=0)
        if self.figures:
            lines = wrap(self.name, max(longest, NARROWEST_HEAD), break_long_words=False)
            self.head, self.narrowest = "\n".join(lines), max([longest, *map(len, lines)])
        else:
            longest = max(longest, len(self.name))
            word = max(len(word) for text in [self.name, *cells] for word in [*str(text).split(), ""])
            readable = longest if self.recipe else READABLE_FIRST if first else READABLE
            self.head, self.narrowest = self.name, max(word, min(longest, readable))
        # Numbers are not wrapped, so their column has a fixed width.
        self.longest = longest if not self.figures else self.narrowest

    def add_to(self, table: Table, width: int) -> None:
        """Add this column to a table of `rich` with `width` characters."""
        justify = "right" if self.figures else "left"
        table.add_column(
            self.head,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=self.figures,
            overflow="fold",
            width=width,
        )


class PlainTable:
    """A table that is laid out for the width of the terminal that prints it."""

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[Text]], title: str) -> None:
        self._title, self._rows = title, rows
        self.columns = [
            _Column(head, [row[number] for row in rows], first=number == 0)
            for number, head in enumerate(heads)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Columns that do not fit beside each other may fit without padding.
        for padding in (1, 0):
            gaps = 2 + (1 + 2 * padding) * (len(self.columns) - 1)  # including the table's edges
            available = options.max_width - gaps
            if sum(column.narrowest for column in self.columns) <= available:
                yield self._side_by_side(padding, _widths(self.columns, available))
                return
        if self.columns[0].recipe:
            yield from self._with_recipes_above(options.max_width)
        else:
            yield from self._with_lines_under_rows(options.max_width)

    def _side_by_side(self, padding: int, widths: Sequence[int]) -> Table:
        title = words(self._title, "bold") if self._title else None
        shown = Table(
            box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, padding)
        )
        for column, width in zip(self.columns, widths, strict=True):
            column.add_to(shown, width)
        for row in self._rows:
            shown.add_row(*row)
        return shown

    def _with_recipes_above(self, width: int) -> RenderResult:
        """Yield each recipe on a line of its own, which is never broken, and under it the other cells."""
        first, *rest = self.columns
        available = width - INDENT - len(rest) + 1
        is_narrow = sum(column.narrowest for column in rest) > available
        widths = _widths(rest, available)
        yield from [words(self._title, "bold")] if self._title else []
        yield words(first.head)
        if not is_narrow:
            yield Padding(_one_row(rest, widths, None), (0, 0, 0, INDENT))
        for number in range(len(self._rows)):
            yield Text(str(first.cells[number]), no_wrap=True, overflow="ignore")
            if is_narrow:
                yield from _fill(rest, number, width - INDENT)
            else:
                yield Padding(_one_row(rest, widths, number), (0, 0, 0, INDENT))
        yield words("")

    def _with_lines_under_rows(self, width: int) -> RenderResult:
        """Yield the columns that fit in the width, and under each row the contents of its other cells."""
        beside, under = list(self.columns), []
        # If columns must move below, recipes are first, then texts, then numbers. The first column always
        # stays.
        for column in sorted(
            self.columns[:0:-1], key=lambda candidate: (not candidate.recipe, candidate.figures)
        ):
            if sum(candidate.narrowest + 1 for candidate in beside) - 1 > width:
                beside.remove(column)
                under.append(column)
        under = [column for column in self.columns if column in under]
        widths = _widths(beside, width - len(beside) + 1)
        yield words(f"\n{self._title}\n" if self._title else "", "bold")
        yield _one_row(beside, widths, None)
        for number in range(len(self._rows)):
            yield _one_row(beside, widths, number)
            yield from _fill(under, number, width - INDENT)
        yield words("")


def table(heads: Iterable[str], rows: Iterable[Sequence[object]], *, title: str = "") -> PlainTable:
    """Return a plain table. A column title that ends in `<` marks a column of recipes, in `>` one of numbers.

    A column `Recipe<` comes first. Figures are aligned right and never broken. Their title is broken where it
    is wider than the figures.
    """
    heads, rows = recipes_first(tuple(heads), rows)
    cells = [[cell if isinstance(cell, Text) else words(cell) for cell in row] for row in rows]
    return PlainTable(heads, cells, title)


def recipes_first(
    heads: tuple[str, ...], rows: Iterable[Sequence[object]]
) -> tuple[tuple[str, ...], list[Sequence[object]]]:
    """Return column titles and rows with the column `Recipe<`, if there is one, before the rest."""
    at = heads.index(RECIPE) if RECIPE in heads else 0
    moved = [(row[at], *row[:at], *row[at + 1 :]) for row in (heads, *rows)] if at else [heads, *rows]
    return tuple(map(str, moved[0])), list(moved[1:])


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Return each column's width: its narrowest, and a fair share of the rest for those with longer texts."""
    widths = [min(column.narrowest, width) for column in columns]
    left = width - sum(widths)
    excesses = sorted((column.longest - column.narrowest, number) for number, column in enumerate(columns))
    # The column that needs the least comes first, so that its unused width is shared by the others.
    for done, (excess, number) in enumerate(excesses):
        more = min(left // (len(excesses) - done), excess)
        widths[number] += more
        left -= more
    return widths


def _one_row(columns: Sequence[_Column], widths: Sequence[int], number: int | None) -> Table:
    """Return one row as a table of its own, or the column titles if `number` is None."""
    shown = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0), show_header=number is None
    )
    for column, width in zip(columns, widths, strict=True):
        column.add_to(shown, width)
    if number is not None:
        shown.add_row(*(column.cells[number] for column in columns))
    return shown


def _fill(columns: Sequence[_Column], number: int, width: int) -> Iterator[Text]:
    """Yield the cells of a row that have no column in a narrow terminal, as lines. Each cell follows the
    title of its column.
    """
    line = Text()
    for column in sorted(columns, key=lambda candidate: candidate.recipe):
        cell = column.cells[number]
        if not cell.cell_len:
            continue
        part = Text.assemble(f"{column.name}: " if column.name else "", cell)
        if line.cell_len and (column.recipe or line.cell_len + 3 + part.cell_len > width):
            yield from _indent(line, width)
            line = Text()
        line = Text(" · ").join([line, part]) if line.cell_len else part
    if line.cell_len:
        yield from _indent(line, width)


def _indent(line: Text, width: int) -> Iterator[Text]:
    """Yield the line, wrapped at its words and indented."""
    console = Console(width=width)
    yield from (Text(" " * INDENT).append(part) for part in line.wrap(console, width, overflow="fold"))
