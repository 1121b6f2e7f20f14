"""Texts of table cells: ranges of samples per second, and CSV cells that no spreadsheet executes as
formulas.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from io import StringIO

from snugfit.results.speed import StepSpeed

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def show_samples_range(speed: StepSpeed | None) -> str:
    """Return the range of predicted samples per second as text, such as `4.7 to 5.3`; empty without a
    range.
    """
    known = speed.samples_range if speed else None
    return f"{known[0]:,.1f} to {known[1]:,.1f}" if known else ""


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as comma-separated values. Cells that a spreadsheet would execute are made inert; None is
    an empty cell.
    """
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([inert(head) for head in heads])
    writer.writerows([[inert(cell) for cell in row] for row in rows])
    return out.getvalue()


def inert(cell: object) -> str:
    """Return a table cell's text, with an apostrophe before it if a spreadsheet would execute it as a
    formula.
    """
    if cell is None:
        return ""
    text = str(cell)
    # A negative number begins like a spreadsheet formula, but is not one.
    if isinstance(cell, int | float) or not text.startswith(_FORMULA):
        return text
    return f"'{text}"
