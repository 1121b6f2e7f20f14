"""Copies of activations beside the computation, as a rehearsal hears of them and writes them down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest.mock import patch

from snugfit.rehearsal.trace.trace import AWAIT_COPY, COPY_BACK, COPY_OUT
from snugfit.step.host_link import MetaLink

if TYPE_CHECKING:
    from snugfit.rehearsal.record.kernels import KernelCost

    Write = Callable[[str, KernelCost], None]


class CopyRecorder:
    """Hears of what a link would copy."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def copy_out(self, nbytes: int) -> None:
        """Activations are copied to the host."""
        self._write(COPY_OUT, _moving(nbytes))

    def copy_back(self, nbytes: int) -> None:
        """Activations are copied to the device."""
        self._write(COPY_BACK, _moving(nbytes))

    def await_copy(self, later: int) -> None:
        """The device waits for a copy; so many were asked for after it."""
        self._write(AWAIT_COPY, _moving(0, tensors=later))


def _moving(nbytes: int, *, tensors: int = 1) -> KernelCost:
    from snugfit.rehearsal.record.kernels import KernelCost

    return KernelCost(0, 2 * nbytes, ((nbytes,),), "torch.uint8", tensors, "", ())


@contextlib.contextmanager
def copies_heard(write: Write) -> Iterator[None]:
    """Within it, `write` is told of each copy, and of each time that the device waits for one."""
    with patch.object(MetaLink, "observer", CopyRecorder(write)):
        yield
