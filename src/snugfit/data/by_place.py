"""A dataset whose samples are made when they are asked for, by their places: what lists do with places."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, final, overload

Sample = dict[str, Any]


class ByPlace(Sequence[Sample]):
    """Its samples may look otherwise in another epoch."""

    @abstractmethod
    def _made(self, index: int, epoch: int) -> Sample:
        """The sample at this place, which there is."""

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    @final
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self.sample(each) for each in range(*index.indices(len(self)))]
        return self.sample(index)

    @final
    def sample(self, index: int, *, epoch: int = 0) -> Sample:
        """As this epoch sees it."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._made(int(index) % len(self), epoch)
