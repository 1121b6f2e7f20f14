"""Tracked values (shadows) of `meta` storages: the contents on the CPU, or the deferred operator that
computes them.

The operator's operands are stored: views of shadows, host tensors, plain numbers. The operator runs on the
CPU at the first read, and its operands are then dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from snugfit.job.batch import REAL_VALUES
from snugfit.rehearsal.record.assumed import Assumption
from snugfit.units import MIB

COPIED = MIB
"""Size in bytes up to which a host tensor's values are copied immediately. Values of a larger tensor are read
when needed.
"""

DEEPEST = 64
"""Largest length of a chain of operators whose computation is deferred. A longer chain is computed
immediately.
"""

_CPU = torch.device("cpu")


class NotFollowed(Exception):
    """Error for a `meta` tensor whose values cannot be tracked on the CPU."""


class Shadow:
    """The values of a `meta` storage, tracked on the CPU and computed at the first read."""

    __slots__ = ("_contents", "_make", "assumption", "depth")

    def __init__(
        self,
        make: Callable[[], torch.UntypedStorage],
        assumption: Assumption | None = None,
        depth: int = 0,
    ) -> None:
        self._make: Callable[[], torch.UntypedStorage] | None = make
        self._contents: torch.UntypedStorage | None = None
        self.assumption, self.depth = assumption, depth + 1
        # Reading a value runs the chain recursively, so its length is limited.
        if depth >= DEEPEST:
            with contextlib.suppress(NotFollowed):  # the read raises it again
                self.contents()
            self.depth = 1

    def contents(self) -> torch.UntypedStorage:
        """Return the storage's values as bytes on the CPU. Raise `NotFollowed` if the CPU does not support
        the computation.
        """
        if self._contents is None:
            # A computation that failed once is not tried again.
            if self._make is None:
                raise NotFollowed
            make, self._make = self._make, None
            # `make` keeps the operands alive, so it is dropped even if it fails.
            try:
                self._contents = make()
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as refused:
                raise NotFollowed from refused
        return self._contents


class Geometry(NamedTuple):
    """Size, strides, offset and dtype of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    """Bytes of the whole storage."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return size, strides, offset and dtype of this tensor in its storage."""
        nbytes, offset = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, nbytes)

    def within(self, contents: torch.UntypedStorage) -> torch.Tensor:
        """Return a CPU tensor with this size, strides and dtype over the storage `contents`."""
        empty = torch.empty(0, dtype=self.dtype, device=_CPU)
        return empty.set_(contents, self.offset, self.shape, self.stride)

    def contents(self, value: torch.Tensor) -> torch.UntypedStorage:
        """Return a CPU storage that contains `value` in this geometry. Raise `NotFollowed` if the value has
        another shape.
        """
        if tuple(value.shape) != self.shape:
            raise NotFollowed
        contents = torch.UntypedStorage(self.nbytes)
        self.within(contents).copy_(value)
        return contents

    def shadow(
        self, make: Callable[[], torch.Tensor], assumption: Assumption | None = None, depth: int = 0
    ) -> Shadow:
        """Return a new `Shadow` for the storage of a tensor with this geometry. The function `make` computes
        the tensor's value on the CPU at the first read.
        """
        return Shadow(lambda: self.contents(make()), assumption, depth)


class View(NamedTuple):
    """The tracked values of a `meta` tensor: those of its storage (shadow), and its geometry in the
    storage."""

    shadow: Shadow
    geometry: Geometry

    def tensor(self) -> torch.Tensor:
        """Return the tracked value as a CPU tensor, which must not be modified. Raise `NotFollowed` if it is
        unknown.
        """
        return self.geometry.within(self.shadow.contents())


class HostValue(NamedTuple):
    """The value of a host tensor at one moment, before later modifications."""

    value: torch.Tensor
    version: int
    real: Callable[[], torch.Tensor] | None = None
    """Function that creates the real values of a placeholder tensor (`step/batches.py`); None for other
    tensors.
    """

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostValue:
        """Return the current value of this host tensor; a small one is copied at once."""
        value, real = tensor.detach(), getattr(tensor, REAL_VALUES, None)
        # The host may overwrite a small tensor, such as a counter, before the value is read.
        if real is None and tensor.numel() * tensor.element_size() <= COPIED:
            value = value.clone()
        return cls(value, value._version, real)

    def tensor(self) -> torch.Tensor:
        """Return the host tensor's value. Raise `NotFollowed` if the tensor was modified after it was
        stored.
        """
        # A large tensor is not copied, so a later write makes its recorded value unknown.
        if self.value._version != self.version:
            raise NotFollowed
        return self.value if self.real is None else self.real()


class DeferredRun:
    """A deferred operator on tracked values. A single run on the CPU computes all of its results."""

    __slots__ = ("_arguments", "_func", "_results")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._func, self._arguments = func, (args, kwargs)
        self._results: list[torch.Tensor] = []

    def result(self, number: int) -> torch.Tensor:
        """Return one result of the deferred operator, by its index among those that are tensors."""
        # The results come from one run, at the read of the first of them.
        if not self._results:
            args, kwargs = values_of(self._arguments)
            self._results = list(tensors_in(self._func(*args, **kwargs)))
            self._arguments = ((), {})
        return self._results[number]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operator's operands or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from tensors_in(entry)


def values_of(stored: Any) -> Any:
    """Return the stored operands of a deferred operator as tensors on the CPU. Raise `NotFollowed` if a value
    is unknown.
    """
    if isinstance(stored, (View, HostValue)):
        return stored.tensor()
    if isinstance(stored, (tuple, list)):
        return type(stored)([values_of(entry) for entry in stored])
    if isinstance(stored, dict):
        return {name: values_of(entry) for name, entry in stored.items()}
    return stored


def _views(stored: Any) -> Iterator[View]:
    if isinstance(stored, View):
        yield stored
    elif isinstance(stored, (tuple, list)):
        for entry in stored:
            yield from _views(entry)
    elif isinstance(stored, dict):
        yield from _views(list(stored.values()))


def assumption_of(stored: Any) -> tuple[Assumption | None, int]:
    """Return the first assumption on which these operands' values depend, and the length of their longest
    chain of deferred operators.
    """
    views = list(_views(stored))
    assumption = next((view.shadow.assumption for view in views if view.shadow.assumption), None)
    return assumption, max((view.shadow.depth for view in views), default=0)
