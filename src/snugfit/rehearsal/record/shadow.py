"""One shadow value: the contents of a storage, and the notes that it is computed from when somebody asks.

What an operator is given is noted as it is: a view of a shadow, a tensor of the host's, plain numbers. The
note is run on the CPU at the first question, and forgotten then.
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
"""Bytes up to which what the host gives is copied at once; a larger tensor is read when it is asked for."""

DEEPEST = 64
"""Computations on one another that wait to be asked; a longer chain is run as far as it goes."""

_CPU = torch.device("cpu")


class NotFollowed(Exception):
    """A value of which there is no shadow."""


class Shadow:
    """The contents of a storage, made when they are asked for."""

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
        if depth >= DEEPEST:
            with contextlib.suppress(NotFollowed):  # raised where the contents are asked for
                self.contents()
            self.depth = 1

    def contents(self) -> torch.UntypedStorage:
        """The bytes, on the CPU. Raises `NotFollowed` where the computation is one that the CPU refuses."""
        if self._contents is None:
            if self._make is None:
                raise NotFollowed
            make, self._make = self._make, None
            try:
                self._contents = make()
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as refused:
                raise NotFollowed from refused
        return self._contents


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    """Of the whole storage."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """As this tensor lies."""
        nbytes, offset = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, nbytes)

    def within(self, contents: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that lies so in these contents."""
        empty = torch.empty(0, dtype=self.dtype, device=_CPU)
        return empty.set_(contents, self.offset, self.shape, self.stride)

    def contents(self, value: torch.Tensor) -> torch.UntypedStorage:
        """A storage that holds this value. Raises `NotFollowed` for another shape."""
        if tuple(value.shape) != self.shape:
            raise NotFollowed
        contents = torch.UntypedStorage(self.nbytes)
        self.within(contents).copy_(value)
        return contents

    def shadow(
        self, make: Callable[[], torch.Tensor], assumption: Assumption | None = None, depth: int = 0
    ) -> Shadow:
        """The shadow of a storage that holds what `make` gives."""
        return Shadow(lambda: self.contents(make()), assumption, depth)


class View(NamedTuple):
    """A tensor on `meta` that has a shadow, and where it lies in its storage."""

    shadow: Shadow
    geometry: Geometry

    def tensor(self) -> torch.Tensor:
        """The value, on the CPU; not to be written into. Raises `NotFollowed`."""
        return self.geometry.within(self.shadow.contents())


class HostValue(NamedTuple):
    """A tensor of the host's, as it is when it is noted."""

    value: torch.Tensor
    version: int
    real: Callable[[], torch.Tensor] | None = None
    """Makes the real one, of which the tensor is a stand-in (`step/batches.py`)."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostValue:
        """This tensor; a small one is copied at once."""
        value, real = tensor.detach(), getattr(tensor, REAL_VALUES, None)
        if real is None and tensor.numel() * tensor.element_size() <= COPIED:
            value = value.clone()
        return cls(value, value._version, real)

    def tensor(self) -> torch.Tensor:
        """The value. Raises `NotFollowed` where it was written into meanwhile."""
        if self.value._version != self.version:
            raise NotFollowed
        return self.value if self.real is None else self.real()


class DeferredRun:
    """An operator that waits to be run on shadows: all its results come of one run."""

    __slots__ = ("_arguments", "_func", "_results")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._func, self._arguments = func, (args, kwargs)
        self._results: list[torch.Tensor] = []

    def result(self, number: int) -> torch.Tensor:
        """One of its results, of those that are tensors."""
        if not self._results:
            args, kwargs = values_of(self._arguments)
            self._results = list(tensors_in(self._func(*args, **kwargs)))
            self._arguments = ((), {})
        return self._results[number]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operator's operands or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def values_of(noted: Any) -> Any:
    """Noted operands as tensors on the CPU. Raises `NotFollowed`."""
    if isinstance(noted, (View, HostValue)):
        return noted.tensor()
    if isinstance(noted, (tuple, list)):
        return type(noted)([values_of(one) for one in noted])
    if isinstance(noted, dict):
        return {name: values_of(one) for name, one in noted.items()}
    return noted


def _views(noted: Any) -> Iterator[View]:
    if isinstance(noted, View):
        yield noted
    elif isinstance(noted, (tuple, list)):
        for one in noted:
            yield from _views(one)
    elif isinstance(noted, dict):
        yield from _views(list(noted.values()))


def rests_on(noted: Any) -> tuple[Assumption | None, int]:
    """The first assumption that operands rest on, and the longest chain behind them."""
    views = list(_views(noted))
    assumption = next((view.shadow.assumption for view in views if view.shadow.assumption), None)
    return assumption, max((view.shadow.depth for view in views), default=0)
