"""Lists of whole numbers of any length, one behind the other in one array.

A dataset's tokens as Python lists would take thirty bytes each; here they take four, and worker processes
share them with their parent, because nothing in them is ever counted or touched. Shapes: N lists of V values
in all.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import numpy as np


@final
class Ragged:
    """A sequence of N lists: `values[starts[i] : starts[i + 1]]` is the i-th."""

    def __init__(self, values: np.ndarray, starts: np.ndarray) -> None:
        """`values` is (V), `starts` (N + 1), from 0 to V."""
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
        """For a number to each value, (V), their sum over each list, (N)."""
        import numpy as np

        total = np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])
        sums: np.ndarray = total[self.starts[1:]] - total[self.starts[:-1]]
        return sums

    def lists_of(self, positions: Any) -> Any:
        """The number of the list that each of these positions among the V values lies in, in their shape."""
        import numpy as np

        return np.searchsorted(self.starts, positions, side="right") - 1

    def filter(self, keep: np.ndarray) -> Ragged:
        """The lists that are marked True in `keep`, (N)."""
        import numpy as np

        lengths = self.lengths
        return Ragged(self.values[np.repeat(keep, lengths)], _starts(lengths[keep]))

    def recut(self, length: int) -> Ragged:
        """All values in lists of one length, in order. What is left over is dropped, unless it is all."""
        import numpy as np

        count = len(self.values) // length or 1
        used = min(count * length, len(self.values))
        return Ragged(self.values[:used], np.minimum(np.arange(count + 1, dtype=np.int64) * length, used))


@final
class RaggedBuilder:
    """Collects lists, one after the other, and makes a `Ragged` of them."""

    def __init__(self) -> None:
        self._values, self._lengths = array("i"), array("q")

    def append(self, values: Sequence[int]) -> None:
        """Adds one list of numbers of 32 bits."""
        self._values.extend(values)
        self._lengths.append(len(values))

    def build(self) -> Ragged:
        """The lists in arrays. (These are copies, for what grows may have twice the room.)"""
        import numpy as np

        return Ragged(
            np.array(self._values, dtype=np.int32), _starts(np.array(self._lengths, dtype=np.int64))
        )


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each of N lists begins, and the end of the last, (N + 1)."""
    import numpy as np

    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
