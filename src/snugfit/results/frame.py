"""Conversion of results to pandas tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from snugfit.errors import require_packages


class Tabular(ABC):
    """Base class of results that convert to rows of a table."""

    @abstractmethod
    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows, all with the same keys; bytes and seconds are plain numbers."""

    def to_frame(self) -> Any:
        """Return the rows as a `pandas.DataFrame`. Raises `UsageError` where pandas is not installed."""
        require_packages("to_frame()", "pandas")
        from pandas import DataFrame

        return DataFrame(self.to_rows())
