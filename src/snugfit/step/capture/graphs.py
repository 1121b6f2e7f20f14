"""CUDA graphs that share one memory: work is recorded once, and played back with one launch.

What a graph computes lies where it lay when it was recorded, so each graph needs its results to stay. One
memory pool belongs to all graphs of a step. What recorded work has freed is free for whatever is recorded
after it: graphs are played one after the other, each makes what it reads, and only tensors that somebody
holds keep their places.

The same pool serves passes that run as they are written (the first with each layout of a batch, of which
kernels must be loaded before they can be recorded): else the device would have to hold both.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import SnugfitError
from snugfit.step.memory_errors import memory_cause

if TYPE_CHECKING:
    import torch


class NotRecorded(SnugfitError):
    """Work cannot be recorded: it waits for the device, or asks for what a graph does not have."""


class Graphs(ABC):
    """Records work, and the memory that what is recorded has."""

    @abstractmethod
    def own_memory(self) -> AbstractContextManager[None]:
        """Within it, what is allocated on the device is allocated in the graphs' memory."""

    @abstractmethod
    def record(self, work: Callable[[], None], *, may_draw: bool = True) -> Callable[[], None]:
        """Records what `work` asks of the device, and gives what does it. The work is not done by that: what
        it has computed is undefined until it is played. Work that may not draw random numbers ends the run
        when it is played first and has drawn some. Raises `NotRecorded`, and what torch raises where memory
        runs out."""

    @abstractmethod
    def refill(self, batch: dict[str, Any], piece: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Copies a host micro-batch to where `batch`, which recorded work reads, lies on the device; gives
        what recorded work reads from then on."""


@final
class CudaGraphs(Graphs):
    """Graphs of the current stream of a GPU. The stream must not be the default one."""

    def __init__(self, device: torch.device) -> None:
        import torch

        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()
            self._number = torch.cuda.current_device()

    @contextlib.contextmanager
    def own_memory(self) -> Iterator[None]:
        """By the stream, and not by the thread as `torch.cuda.use_mem_pool` does it: the backward pass of
        autograd runs in a thread of its own."""
        import torch

        torch._C._cuda_beginAllocateCurrentStreamToPool(self._number, self._pool.id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self._number, self._pool.id)
            torch._C._cuda_releasePool(self._number, self._pool.id)

    def record(self, work: Callable[[], None], *, may_draw: bool = True) -> Callable[[], None]:
        """Other threads may go on meanwhile, as the one that copies batches to page-locked memory; the
        collector may not, for what it frees may be of another graph."""
        import torch

        graph, fault = torch.cuda.CUDAGraph(), None
        pool: Any = self._pool.id
        stream = torch.cuda.current_stream()
        try:
            with (
                _without_collector(),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                try:
                    work()
                except Exception as error:  # the end of the recording would hide it behind its own
                    fault = error
                    raise
        except Exception as error:
            why = fault or error
            if memory_cause(why):
                raise why from None
            raise NotRecorded(str(why).splitlines()[0] if str(why) else type(why).__name__) from why
        return graph.replay if may_draw else _FirstReplay(graph, torch.cuda.default_generators[self._number])

    def refill(self, batch: dict[str, Any], piece: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Beside the computation, when the host's memory is pinned."""
        import torch

        for name, value in piece.items():
            if isinstance(value, Mapping):
                self.refill(batch[name], value, device)
            elif isinstance(value, torch.Tensor):
                batch[name].copy_(value, non_blocking=True)
        return batch


class _FirstReplay:
    """Plays a graph, and looks the first time whether it has taken numbers from the device's generator."""

    def __init__(self, graph: torch.cuda.CUDAGraph, generator: torch.Generator) -> None:
        self._graph, self._generator, self._is_first = graph, generator, True

    def __call__(self) -> None:
        if not self._is_first:
            self._graph.replay()
            return
        before, self._is_first = self._generator.get_offset(), False
        self._graph.replay()
        if self._generator.get_offset() != before:
            raise SnugfitError(
                "A layer that is recomputed draws random numbers, and others than in its forward pass where "
                "the step is recorded. Leave 'captured' or the checkpointing out. No weight was changed by "
                "this step."
            )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
