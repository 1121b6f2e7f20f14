"""Sequences that compute an item on access, with a list's rules for indices and slices."""

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
"""The type of a sample: a mapping with `input_ids` and `labels`, or `pixel_values` and `label`, ..."""


class ComputedSequence(Sequence[T_co]):
    """Base class of sequences that compute an item on access; subclasses define the length and the item at a
    valid index."""

    @abstractmethod
    def _item(self, index: int) -> T_co:
        """Return the item at this index, from 0 to the length minus one."""

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
        """Return the index counted from the start; a negative index counts from the end. Raises `IndexError`
        beyond the end, which ends a `for` loop.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return int(index) % len(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedSamples(ComputedSequence[Sample]):
    """Base class of datasets of N samples, which may differ from epoch to epoch; picklable and without
    state."""

    label: np.ndarray | None = None
    """One class index or regression target per sample (N,)."""

    labels: Ragged | None = None
    """One label per token of each sample, or the tokens of its target sequence."""

    label_names: tuple[str, ...] = ()
    """The names of the classes, in the order of their indices."""

    cut: int = 0
    """Number of truncated samples."""

    cut_tokens: int = 0
    """Number of tokens lost by truncation; for packed samples, the few dropped at the end."""

    left_out: int = 0
    """Number of dataset rows without a sample, because none of their tokens enters a loss."""

    notes: tuple[str, ...] = ()
    """Sentences for the user about the prepared dataset."""

    def target(self, index: int) -> Sample:
        """Return the labels of the sample at this valid index, as a part of the sample; empty if the dataset
        stores none.
        """
        if self.label is not None:
            return {"label": self.label[index].item()}
        return {"labels": self.labels[index]} if self.labels is not None else {}

    def collate_with(self, targets: Collate) -> Callable[[list[Any]], dict[str, Any]]:
        """Return the collate function for these samples, from a list of samples to a batch; `targets`
        collates labels and tokens."""
        return targets

    @abstractmethod
    def _sample(self, index: int, epoch: int) -> Sample:
        """Return the sample at this valid index for this epoch."""

    @final
    def _item(self, index: int) -> Sample:
        return self._sample(index, epoch=0)

    @final
    def sample(self, index: int, *, epoch: int = 0) -> Sample:
        """Return the sample at this index for this epoch. Raises `IndexError`."""
        return self._sample(self._existing(index), epoch)
