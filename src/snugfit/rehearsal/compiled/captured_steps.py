"""CUDA graphs of an optimizer step, rehearsed: what they take, and what playing them back asks of the device.

While a graph is recorded, what the work allocates is allocated in the memory of graphs, once the allocator
has given back what it keeps for later (`torch.cuda.graph`). When it is played, the same kernels run, the host
launches one thing, and nothing is allocated. On shapes the work runs again for that, in memory that is not
there. Work that waits for the device cannot be recorded, here as there.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final
from unittest.mock import patch

from snugfit.rehearsal.compiled.graph_trees import GENERATOR_BYTES
from snugfit.rehearsal.trace.trace import Memory
from snugfit.step.batches import place
from snugfit.step.capture.graphs import Graphs, NotRecorded
from snugfit.step.capture.handler import REHEARSED

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.record.recorder import Recorder

WAITS = "its code waits for the device, to read a number from it"


@final
class RehearsedGraphs(Graphs):
    """The graphs of one rehearsal."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._generator: list[torch.Tensor] = []
        self._batches: list[dict[str, Any]] = []  # which recorded work reads, so that they stay

    def own_memory(self) -> AbstractContextManager[None]:
        """Blocks of the graphs' pool."""
        return self._recorder.memory.allocating(Memory.GRAPHS)

    def record(self, work: Callable[[], None], *, may_draw: bool = True) -> Callable[[], None]:
        """The work runs once in the graphs' memory. Raises `NotRecorded` where it waits for the device."""
        import torch

        recorder = self._recorder
        recorder.records_graph()
        recorder.empty_cache()
        if not self._generator:
            self._generator = [
                torch.empty(GENERATOR_BYTES, dtype=torch.uint8, device="meta") for _ in range(2)
            ]
        waited = recorder.times_waited
        try:
            with self.own_memory():
                work()
        except NotRecorded as fault:
            recorder.doubt(f"The step is not recorded, and runs as it is written: {fault}.")
            raise
        if recorder.times_waited != waited:
            recorder.doubt(f"The step is not recorded, and runs as it is written: {WAITS}.")
            raise NotRecorded(WAITS)

        def play() -> None:
            nowhere = recorder.memory.allocating(Memory.NOWHERE)
            with nowhere, recorder.program(lowered=False), recorder.played_back():
                work()

        return play

    def refill(self, batch: dict[str, Any], piece: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """A copy to the device, which takes no memory: what a rehearsal knows of its numbers goes along."""
        self._batches.append(batch)
        with self._recorder.memory.allocating(Memory.NOWHERE):
            return place(piece, device)


@contextlib.contextmanager
def captured_steps(recorder: Recorder) -> Iterator[None]:
    """Within it, a step that is to be recorded is recorded here."""
    token = REHEARSED.set(lambda: RehearsedGraphs(recorder))
    try:
        with _recorded_on_shapes():
            yield
    finally:
        REHEARSED.reset(token)


@contextlib.contextmanager
def _recorded_on_shapes() -> Iterator[None]:
    """Within it, torch's optimizers take `meta` for a device on which they may be recorded."""
    import torch

    known = importlib.import_module("torch.optim.optimizer")._get_capturable_supported_devices
    files = [
        file
        for name, file in sys.modules.items()
        if name.startswith(torch.optim.__name__) and hasattr(file, known.__name__)
    ]
    with contextlib.ExitStack() as undo:
        for file in files:
            undo.enter_context(patch.object(file, known.__name__, lambda *a, **k: [*known(*a, **k), "meta"]))
        yield
