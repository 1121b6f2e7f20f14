"""Text that stands in a row, and what stands there instead."""

from __future__ import annotations

from typing import Any

from snugfit.data.rows import Row, Rows
from snugfit.errors import UsageError


def text_of(rows: Rows, row: Row, column: str, index: int) -> str:
    """The text in a row's column. Raises `UsageError` where there is none."""
    return as_text(rows.value(row, column, index), rows.where(index), column)


def as_text(value: Any, where: str, column: str) -> str:
    """The value, if it is text that a tokenizer can read."""
    if not isinstance(value, str):
        what = "nothing (null)" if value is None else f"{value!r:.40}"
        raise UsageError(f"{where}: {column!r} is {what}; every row's must be text.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{where}: character {error.start + 1} of {column!r} is half of a surrogate pair, which is no"
                " text."
            ) from None
    return value
