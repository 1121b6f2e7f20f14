"""Simulated CUDA graphs of an optimizer step: their memory, and the GPU's work in a replay.

Before a recording, the allocator releases its cached memory (`torch.cuda.graph`). During it, allocations use
the graphs' memory pool. A replay runs the same kernels with one launch of the host, and allocates nothing. On
shapes the work runs again for a replay, without recorded allocations. Work that waits for the device cannot
be recorded, in a real run either.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, final
from unittest.mock import patch

from snugfit.features.engine.replay.graphs import REHEARSED, Graphs, NotRecorded
from snugfit.rehearsal.trace.trace import GENERATOR_BYTES, Kernel, Memory
from snugfit.step.batches import place

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy
    from snugfit.rehearsal.record.recorder import Recorder

WAITS = "its code waits for the device, to read a number from it"
COPIES = "its code copies a tensor from memory of the host that is not pinned"


FUNCTIONS_OF_HOOK = 3
"""Python functions that a hook on a weight's gradient counts as, with its update or norm.

Steps of a Llama and a Phi-3 with `released` took an H200's host 171 and 209 us more for each hook than
without this count (results/h200-2026-11-30/seconds.json). A function takes 70 us (`HostLaunchCosts`).
"""


@final
class RehearsedGraphs(Graphs):
    """Records steps as simulated CUDA graphs on tensors without data."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._generator: list[torch.Tensor] = []
        self._batches: list[dict[str, Any]] = []  # recorded kernels read these batches, so they stay alive

    def own_memory(self) -> AbstractContextManager[None]:
        """Return a context that allocates from the simulated memory pool of the CUDA graphs."""
        return self._recorder.memory.allocating(Memory.GRAPHS)

    def record(self, work: Callable[[], None], *, may_draw: bool = True) -> Callable[[], None]:
        """Run `work` once in the graphs' memory, and return a function that replays it. Raises `NotRecorded`
        if it waits for the device or copies from the host.

        `work` runs again for the first replay of the last step alone. A replay allocates nothing.
        """
        import torch

        recorder = self._recorder
        recorder.records_graph()
        recorder.empty_cache()
        # The first CUDA graph allocates the random generator's seed and offset.
        if not self._generator:
            self._generator = [
                torch.empty(GENERATOR_BYTES, dtype=torch.uint8, device="meta") for _ in range(2)
            ]
        waited, copied = recorder.times_waited, recorder.host_copies
        try:
            with self.own_memory():
                work()
            # On a GPU, both are errors during a recording.
            if recorder.times_waited != waited:
                raise NotRecorded(WAITS)
            if recorder.host_copies != copied:
                raise NotRecorded(COPIES)
        except NotRecorded as fault:
            recorder.warn(
                f"The step cannot be recorded as CUDA graphs, so it runs without them: {fault}. "
                "Leave 'captured' out, or remove the cause."
            )
            raise

        played: list[Kernel] = []

        def play() -> None:
            # All replays launch the same kernels, so they are recorded only in the last step.
            if played or not recorder.is_last_step:
                recorder.add_kernels(played)
                return
            begin = len(recorder.kernels)
            nowhere = recorder.memory.allocating(Memory.NOWHERE)
            with nowhere, recorder.program(lowered=False), recorder.played_back():
                work()
            played.extend(recorder.kernels[begin:])

        return play

    def refill(self, batch: dict[str, Any], piece: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Return a copy of the batch on the device without an allocation; values that the simulation tracks
        are copied too.
        """
        # Recorded kernels read the first batch, so it must not be freed.
        self._batches.append(batch)
        with self._recorder.memory.allocating(Memory.NOWHERE):
            return place(piece, device)


@contextlib.contextmanager
def simulated_graphs(policy: Policy, recorder: Recorder) -> Iterator[None]:
    """Context in which a simulated GPU records training steps as CUDA graphs. A CPU records none."""
    from snugfit.features.engine.updates.passes import ReleasedPasses
    from snugfit.rehearsal.device.policy import CudaPolicy

    run_hook = ReleasedPasses._update_on_gradient

    def count_and_run(passes: ReleasedPasses, weight: torch.Tensor) -> None:
        for _ in range(FUNCTIONS_OF_HOOK):
            recorder.count_function()
        run_hook(passes, weight)

    token = REHEARSED.set(partial(RehearsedGraphs, recorder) if isinstance(policy, CudaPolicy) else None)
    try:
        with patch.object(ReleasedPasses, "_update_on_gradient", count_and_run):
            yield
    finally:
        REHEARSED.reset(token)


@contextlib.contextmanager
def recorded_on_shapes() -> Iterator[None]:
    """Context in which torch's optimizers treat `meta` as a device that can record CUDA graphs."""
    import torch

    known = importlib.import_module("torch.optim.optimizer")._get_capturable_supported_devices
    files = [
        # Several files of torch import the function by name, so it is replaced in each of them.
        file
        for name, file in sys.modules.items()
        if name.startswith(torch.optim.__name__) and hasattr(file, known.__name__)
    ]
    with contextlib.ExitStack() as undo:
        for file in files:
            undo.enter_context(patch.object(file, known.__name__, lambda *a, **k: [*known(*a, **k), "meta"]))
        yield
