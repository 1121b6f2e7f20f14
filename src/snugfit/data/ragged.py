"""Lists of whole numbers of any length, one behind the other in one array.

A dataset's tokens as Python lists would take thirty bytes each; here they take four, and worker processes
share them with their parent, because nothing in them is ever counted or touched.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import numpy as np


@final
class Ragged:
    """A sequence of lists: `values[starts[i] : starts[i + 1]]` is the i-th."""

    def __init__(self, values: np.ndarray, starts: np.ndarray) -> None:
        self.values, self.starts = values, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        found: list[int] = self.values[self.starts[index] : self.starts[index + 1]].tolist()
        return found

    @property
    def lengths(self) -> np.ndarray:
        """Of each list."""
        lengths: np.ndarray = self.starts[1:] - self.starts[:-1]
        return lengths

    def sums(self, counted: np.ndarray) -> np.ndarray:
        """For a number to each value, their sum over each list."""
        import numpy as np

        total = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
        sums: np.ndarray = total[self.starts[1:]] - total[self.starts[:-1]]
        return sums

    def owners(self, positions: Any) -> Any:
        """The list that each of these positions among the values lies in."""
        import numpy as np

        return np.searchsorted(self.starts, positions, side="right") - 1

    def only(self, kept: np.ndarray) -> Ragged:
        """The lists that are marked True."""
        import numpy as np

        lengths = self.lengths
        return Ragged(self.values[np.repeat(kept, lengths)], _starts(lengths[kept]))

    def recut(self, length: int) -> Ragged:
        """All values in lists of one length, in order. What is left over is dropped, unless it is all."""
        import numpy as np

        whole = len(self.values) // length or 1
        used = min(whole * length, len(self.values))
        return Ragged(self.values[:used], np.minimum(np.arange(whole + 1, dtype=np.int64) * length, used))


@final
class Filling:
    """A `Ragged` that grows."""

    def __init__(self) -> None:
        self._values, self._lengths = array("i"), array("q")

    def append(self, values: Sequence[int]) -> None:
        """One list more; numbers of 32 bits."""
        self._values.extend(values)
        self._lengths.append(len(values))

    def done(self) -> Ragged:
        """As an array. (A copy, for what grows may have twice the room.)"""
        import numpy as np

        return Ragged(
            np.array(self._values, dtype=np.int32), _starts(np.array(self._lengths, dtype=np.int64))
        )


def _starts(lengths: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
