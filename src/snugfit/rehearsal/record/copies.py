"""Copies to the host and back, and what the host computes, as a rehearsal hears of them and writes them
down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

from snugfit.rehearsal.trace.trace import (
    AWAIT_COPY,
    COPY_BACK,
    COPY_OUT,
    HELD_ON_HOST,
    PINNED_ON_HOST,
    PREFETCH,
    STAGE_BACK,
    STAGE_OUT,
    SWAPPED,
    UPDATE_ON_HOST,
    WORK_ON_HOST,
)
from snugfit.step.host_link import MetaLink

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.record.kernels import KernelCost

    Write = Callable[[str, KernelCost], None]


class HostCopies(Protocol):
    """Weights and states on the host, and what is copied between them and the device."""

    def copy_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives that copies to the host; `NotImplemented` of any other."""

    def copies_back(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator copies from there to the device."""


class CopyRecorder:
    """Hears of what a link would copy."""

    def __init__(self, write: Write, wait: Callable[[], None]) -> None:
        self._write, self._wait = write, wait

    def copy_out(self, nbytes: int) -> None:
        """Activations are copied to the host."""
        self._write(COPY_OUT, _moving(nbytes))

    def copy_back(self, nbytes: int) -> None:
        """Activations are copied to the device."""
        self._write(COPY_BACK, _moving(nbytes))

    def await_copy(self, later: int) -> None:
        """The device waits for a copy; so many were asked for after it."""
        self._write(AWAIT_COPY, _moving(0, tensors=later))

    def stage_out(self, nbytes: int) -> None:
        """Weights or gradients are copied to the host."""
        self._write(STAGE_OUT, _moving(nbytes))

    def update_on_host(self, nbytes: int, dtype: torch.dtype) -> None:
        """The host waits, and updates these bytes of weights."""
        self._wait()
        self._write(UPDATE_ON_HOST, _moving(nbytes, dtype=str(dtype)))

    def stage_back(self, nbytes: int) -> None:
        """Weights are copied to the device."""
        self._write(STAGE_BACK, _moving(nbytes))

    def prefetch(self, nbytes: int) -> None:
        """Pages of so many bytes are asked for, which are taken to be there already."""
        self._write(PREFETCH, _moving(nbytes))

    def work_on_host(self, nbytes: int) -> None:
        """The host reads and writes so many bytes itself."""
        self._write(WORK_ON_HOST, _moving(nbytes))

    def swap(self, nbytes: int) -> None:
        """A disk reads or writes so many bytes, and the host waits."""
        self._write(SWAPPED, _moving(nbytes))

    def hold_on_host(self, nbytes: int, pinned: int) -> None:
        """The host holds so many bytes, some of which are page-locked."""
        self._write(HELD_ON_HOST, _moving(nbytes))
        self._write(PINNED_ON_HOST, _moving(pinned))


def _moving(nbytes: int, *, tensors: int = 1, dtype: str = "torch.uint8") -> KernelCost:
    from snugfit.rehearsal.record.kernels import KernelCost

    return KernelCost(0, 2 * nbytes, ((nbytes,),), dtype, tensors, "", ())


@contextlib.contextmanager
def copies_heard(write: Write, wait: Callable[[], None]) -> Iterator[None]:
    """Within it, `write` is told of each copy, and of each time that the device waits for one; `wait` is
    called where the host waits for the device."""
    with patch.object(MetaLink, "observer", CopyRecorder(write, wait)):
        yield
