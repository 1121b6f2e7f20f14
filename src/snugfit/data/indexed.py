"""Sequences whose items are made when they are asked for: what a list does with an index and with slices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final, overload

if TYPE_CHECKING:
    import numpy as np

    from snugfit.data.collate import Collate
    from snugfit.data.ragged import Ragged

T_co = TypeVar("T_co", covariant=True)

Sample = dict[str, Any]
"""What a collate takes: `input_ids` and `labels`, or `pixel_values` and `label`, ..."""


class Indexed(Sequence[T_co]):
    """A sequence whose subclasses only say how long it is and what is at an index that exists."""

    @abstractmethod
    def _item(self, index: int) -> T_co:
        """The item at this index, which is from 0 to one less than the length."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    @final
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        if isinstance(index, slice):
            return [self._item(number) for number in range(*index.indices(len(self)))]
        return self._item(self._existing(index))

    @final
    def _existing(self, index: int) -> int:
        """The index counted from 0. Raises `IndexError` beyond the end, which ends a loop."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return int(index) % len(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedSamples(Indexed[Sample]):
    """A dataset of N samples, which may look otherwise in another epoch; picklable and without a state."""

    label: np.ndarray | None = None
    """One class or number to each sample, (N)."""

    labels: Ragged | None = None
    """A label to each token, or the tokens of a target, of each sample."""

    label_names: tuple[str, ...] = ()
    """The names of the classes, in order."""

    cut: int = 0
    """How many samples were too long."""

    cut_tokens: int = 0
    """How many tokens these lost; packed, the few left over at the end."""

    left_out: int = 0
    """Rows of which no sample was made, because nothing in them enters a loss."""

    notes: tuple[str, ...] = ()
    """What somebody who trains on this should know."""

    def target(self, index: int) -> Sample:
        """What the sample at this index, which exists, is to teach; empty where that is not kept here."""
        if self.label is not None:
            return {"label": self.label[index].item()}
        return {"labels": self.labels[index]} if self.labels is not None else {}

    def collate_with(self, targets: Collate) -> Callable[[list[Any]], dict[str, Any]]:
        """Return the function from samples to a batch; `targets` puts labels together, and tokens."""
        return targets

    @abstractmethod
    def _sample(self, index: int, epoch: int) -> Sample:
        """The sample at this index, which exists, as this epoch sees it."""

    @final
    def _item(self, index: int) -> Sample:
        return self._sample(index, epoch=0)

    @final
    def sample(self, index: int, *, epoch: int = 0) -> Sample:
        """The sample at this index, as this epoch sees it."""
        return self._sample(self._existing(index), epoch)
