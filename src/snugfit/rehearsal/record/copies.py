"""Record simulated copies between host and device, and the host's own work on weights and optimizer
states."""

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
from snugfit.step.host_link import LinkObserver, MetaLink

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.record.kernels import KernelCost

    Write = Callable[[str, KernelCost], None]


class HostCopies(Protocol):
    """Interface for the weights and states that a simulation keeps on the host, and their copies to and from
    the device.
    """

    def copy_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of an operator that copies to the host, or `NotImplemented` for any other."""

    def copies_back(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if an operator copies from the host to the device."""


class CopyRecorder(LinkObserver):
    """Observer of the simulated link between host and device that records copies in the trace as kernels."""

    def __init__(self, write: Write, wait: Callable[[], None]) -> None:
        self._write, self._wait = write, wait

    def copy_out(self, nbytes: int) -> None:
        """Record a copy of activations to the host."""
        self._write(COPY_OUT, _moving(nbytes))

    def copy_back(self, nbytes: int) -> None:
        """Record a copy of activations to the device."""
        self._write(COPY_BACK, _moving(nbytes))

    def await_copy(self, later: int) -> None:
        """Record that the device waits for a copy with `later` copies queued after it."""
        # A wait has no tensors. `KernelClock` reads this field as the number of later copies.
        self._write(AWAIT_COPY, _moving(0, tensors=later))

    def stage_out(self, nbytes: int) -> None:
        """Record a copy of weights or gradients to the host."""
        self._write(STAGE_OUT, _moving(nbytes))

    def update_on_host(self, nbytes: int, dtype: torch.dtype) -> None:
        """Record that the host waits for the device, and updates these bytes of weights itself."""
        self._wait()
        self._write(UPDATE_ON_HOST, _moving(nbytes, dtype=str(dtype)))

    def stage_back(self, nbytes: int) -> None:
        """Record a copy of weights to the device."""
        self._write(STAGE_BACK, _moving(nbytes))

    def prefetch(self, nbytes: int) -> None:
        """Record a prefetch of these bytes of managed memory (`cudaMemPrefetchAsync`)."""
        self._write(PREFETCH, _moving(nbytes))

    def work_on_host(self, nbytes: int) -> None:
        """Record that the host reads and writes these bytes of weights, gradients or states itself."""
        self._write(WORK_ON_HOST, _moving(nbytes))

    def swap(self, nbytes: int) -> None:
        """Record that the host waits for a disk that reads or writes these bytes of weights, gradients or
        states.
        """
        self._write(SWAPPED, _moving(nbytes))

    def hold_on_host(self, nbytes: int, pinned: int) -> None:
        """Record the bytes of weights and states in host memory, and the page-locked part of them."""
        self._write(HELD_ON_HOST, _moving(nbytes))
        self._write(PINNED_ON_HOST, _moving(pinned))


def _moving(nbytes: int, *, tensors: int = 1, dtype: str = "torch.uint8") -> KernelCost:
    from snugfit.rehearsal.record.kernels import KernelCost

    # A copy reads and writes its bytes, and `KernelCost.nbytes` counts both.
    return KernelCost(0, 2 * nbytes, ((nbytes,),), dtype, tensors, "", ())


@contextlib.contextmanager
def copies_recorded(write: Write, wait: Callable[[], None]) -> Iterator[None]:
    """Context in which simulated copies between host and device are recorded: `write` adds a kernel, `wait` a
    wait of the host.
    """
    with patch.object(MetaLink, "observer", CopyRecorder(write, wait)):
        yield
