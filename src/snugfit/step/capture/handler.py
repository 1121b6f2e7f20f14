"""The wish for a step that is recorded: which loop can, on which device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar

from snugfit.step.wishes.handler import Context, Handler
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.step.capture.graphs import Graphs
    from snugfit.techniques.setup import CaptureWish

_NOT_OURS = (
    "its steps are those of another loop, and what is recorded are snugfit's own. snugfit train takes it"
)

REHEARSED: ContextVar[Callable[[], Graphs] | None] = ContextVar("REHEARSED", default=None)
"""Factory of a rehearsal's graphs; None outside of one."""


class CaptureHandler(Handler):
    """A step as CUDA graphs."""

    wish, slot, stage = "capture", Slot.ENGINE, InstallStage.STEP
    read_by_loops = True
    refused: ClassVar[Mapping[str, str]] = {
        "accelerate": _NOT_OURS,
        "trainer": _NOT_OURS,
        "fit": _NOT_OURS,
        "custom_loop": _NOT_OURS,
        "script": "its loop is snugfit's own code",
    }

    def around_run(self, value: CaptureWish | None) -> Context | None:
        """Run all GPU work of a run on one stream other than the default one. The default stream cannot be
        recorded, and memory that one stream has freed cannot be used by another.
        """
        return _on_own_stream if value is not None else None


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all runs of a process on this GPU: cuBLAS keeps some 70 MB for each stream."""
    import torch

    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _on_own_stream() -> Iterator[None]:
    import torch

    if not torch.cuda.is_available() or REHEARSED.get() is not None:
        yield
        return
    before = torch.cuda.current_stream()
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)
