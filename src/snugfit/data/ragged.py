"""Lists of integers of any length, concatenated in one array.

A dataset's tokens take thirty bytes each as Python lists, and four here. Worker processes share the array
with their parent, because reading it writes no reference counts. Shapes: N lists of V values in total.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import numpy as np


@final
class Ragged:
    """A sequence of N lists of integers, stored in one array: `values[starts[i] : starts[i + 1]]` is the
    i-th."""

    def __init__(self, values: np.ndarray, starts: np.ndarray) -> None:
        """Store the arrays: `values` is (V), `starts` (N + 1), from 0 to V."""
        self.values, self.starts = values, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        values: list[int] = self.values[self.starts[index] : self.starts[index + 1]].tolist()
        return values

    @property
    def lengths(self) -> np.ndarray:
        """The length of each list, (N)."""
        lengths: np.ndarray = self.starts[1:] - self.starts[:-1]
        return lengths

    def sums(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sum of `numbers` over each list, (N). `numbers` has one number for each value, (V)."""
        import numpy as np

        total = np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])
        sums: np.ndarray = total[self.starts[1:]] - total[self.starts[:-1]]
        return sums

    def lists_of(self, positions: Any) -> Any:
        """Return the index of the list that contains each of these positions among the V values. The result
        has the shape of `positions`.
        """
        import numpy as np

        # `right` skips empty lists, which have the same start as the next list.
        return np.searchsorted(self.starts, positions, side="right") - 1

    def filter(self, keep: np.ndarray) -> Ragged:
        """Return the lists marked True in `keep`, (N)."""
        import numpy as np

        lengths = self.lengths
        return Ragged(self.values[np.repeat(keep, lengths)], _starts(lengths[keep]))

    def recut(self, length: int) -> Ragged:
        """Return all values in lists of one length, in order. A shorter last list is dropped, unless it is
        the only one."""
        import numpy as np

        count = len(self.values) // length or 1
        used = min(count * length, len(self.values))
        return Ragged(self.values[:used], np.minimum(np.arange(count + 1, dtype=np.int64) * length, used))


@final
class RaggedBuilder:
    """A builder that concatenates lists to a `Ragged`."""

    def __init__(self) -> None:
        # An array takes 4 bytes per token, a list of Python ints up to 36.
        self._values, self._lengths = array("i"), array("q")

    def append(self, values: Sequence[int]) -> None:
        """Add one list of 32-bit integers."""
        self._values.extend(values)
        self._lengths.append(len(values))

    def build(self) -> Ragged:
        """Return all appended lists as a `Ragged`. Its arrays are copies, because a growing array may have
        twice the memory that it needs.
        """
        import numpy as np

        return Ragged(
            np.array(self._values, dtype=np.int32), _starts(np.array(self._lengths, dtype=np.int64))
        )


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each of N lists and the end of the last one, (N + 1), from their lengths."""
    import numpy as np

    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
