"""Recording of GPU work as CUDA graphs that share one memory pool, each replayed with one launch.

The results of a graph have fixed addresses, so their memory must stay allocated. All graphs of a step share
one memory pool. Later recordings reuse the memory that earlier ones have freed. This is safe, because graphs
are replayed one after the other, and each computes its own inputs. Only tensors with a live reference keep
their memory.

The first step with each batch layout runs without graphs, so that its kernels are loaded before the
recording. It uses the same memory pool. Otherwise the device would need this memory twice.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import SnugfitError
from snugfit.step.memory_errors import memory_cause

if TYPE_CHECKING:
    import torch


class NotRecorded(SnugfitError):
    """Error: GPU work cannot be recorded, since it waits for the device or calls a function that CUDA graphs
    do not support.
    """


class Graphs(ABC):
    """Base class of recorders of CUDA graphs, with the graphs' memory pool."""

    @abstractmethod
    def own_memory(self) -> AbstractContextManager[None]:
        """Return a context in which device memory is allocated in the graphs' pool."""

    @abstractmethod
    def record(self, work: Callable[[], None], *, may_draw: bool = True) -> Callable[[], None]:
        """Record the GPU work of the function `work` as a CUDA graph, and return a function that replays it.

        Recording computes nothing: results are undefined before the first replay. With `may_draw=False` the
        first replay ends the run if the work has drawn random numbers. Raises `NotRecorded`, and torch's
        error when memory runs out.
        """

    @abstractmethod
    def refill(self, batch: dict[str, Any], piece: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Copy a host micro-batch to the device addresses of `batch`, which the CUDA graph reads; return the
        device batch.
        """


REHEARSED: ContextVar[Callable[[], Graphs] | None] = ContextVar("REHEARSED", default=None)
"""Function that creates simulated CUDA graphs; None outside of a simulation."""


@final
class CudaGraphs(Graphs):
    """Recorder of CUDA graphs on the current stream of a GPU, which must not be the default one."""

    def __init__(self, device: torch.device) -> None:
        import torch

        with torch.cuda.device(device):
            # Graphs are replayed one after the other, so they can share one memory pool.
            self._pool = torch.cuda.MemPool()
            self._number = torch.cuda.current_device()

    @contextlib.contextmanager
    def own_memory(self) -> Iterator[None]:
        """Context in which allocations of the stream go to the graphs' memory pool."""
        import torch

        # `torch.cuda.use_mem_pool` affects only the current thread, but autograd runs the backward pass in
        # another one.
        torch._C._cuda_beginAllocateCurrentStreamToPool(self._number, self._pool.id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self._number, self._pool.id)
            torch._C._cuda_releasePool(self._number, self._pool.id)

    def record(self, work: Callable[[], None], *, may_draw: bool = True) -> Callable[[], None]:
        """Record `work` as a CUDA graph and return a function that replays it. Other threads may run
        meanwhile. The garbage collector is off, since it may free memory of another graph.
        """
        import torch

        graph, fault = torch.cuda.CUDAGraph(), None
        drawn = torch.cuda.default_generators[self._number].get_state()
        pool: Any = self._pool.id
        stream = torch.cuda.current_stream()
        try:
            with (
                _without_collector(),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                try:
                    work()
                # Without this, the end of the recording would raise another error and hide this one.
                except Exception as error:
                    fault = error
                    raise
        except Exception as error:
            self._end_recording(drawn)
            reason = fault or error
            if memory_cause(reason):
                raise reason from None
            raise NotRecorded(
                str(reason).splitlines()[0] if str(reason) else type(reason).__name__
            ) from reason
        # Replaying a graph that draws random numbers advances the generator.
        return graph.replay if may_draw else _FirstReplay(graph, torch.cuda.default_generators[self._number])

    def _end_recording(self, drawn: torch.Tensor) -> None:
        """End what torch leaves on if CUDA breaks off a recording: allocations in the pool, and the random
        generator's mode of a recording. `drawn` is the generator's state before it.
        """
        import torch

        with contextlib.suppress(RuntimeError):  # torch has ended them itself
            torch._C._cuda_endAllocateToPool(self._number, self._pool.id)
        generator = torch.Generator(f"cuda:{self._number}")
        generator.set_state(drawn)
        state = generator.graphsafe_get_state()
        torch.cuda.default_generators[self._number].graphsafe_set_state(state)

    def refill(self, batch: dict[str, Any], piece: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Copy a host micro-batch to the CUDA graph's input addresses, asynchronously from pinned memory."""
        import torch

        for name, value in piece.items():
            if isinstance(value, Mapping):
                self.refill(batch[name], value, device)
            elif isinstance(value, torch.Tensor):
                # Data is copied into the batch that the graph reads, because a graph reads fixed addresses.
                batch[name].copy_(value, non_blocking=True)
        return batch


class _FirstReplay:
    """A function that replays a CUDA graph. The first call checks if the graph draws random numbers on the
    device.
    """

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
