"""An accelerator of shapes, by the interface that DeepSpeed gives to makers of devices.

Its tensors are on `meta`. On one GPU streams and events do nothing: with `overlap_comm` off all of
DeepSpeed's own work is in the stream that computes. A rank of several has streams, as `torch.meta` has them
(`device_module.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

if TYPE_CHECKING:
    from snugfit.rehearsal.record.recorder import Recorder
    from snugfit.rehearsal.sharded.device_module import ShapesModule

PLENTY = 1 << 50
"""Bytes of memory that the device is said to have where no GPU was named."""


class NoStream:
    """A stream, or an event of one, of a device that computes nothing."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Any priority and flags will do."""

    def _do_nothing(self, *arguments: Any, **keywords: Any) -> None:
        """What one asks of a stream or an event is done at once."""

    wait_stream = wait_event = record = wait = synchronize = _do_nothing

    def record_event(self, *arguments: Any) -> NoStream:
        """Itself: it has happened."""
        return self

    def query(self) -> bool:
        """Whether all is done."""
        return True


class ShapesAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's device in a rehearsal."""

    def __init__(
        self, recorder: Recorder, pin: Callable[[torch.Tensor], None], memory_bytes: int | None
    ) -> None:
        super().__init__()
        self._communication_backend_name, self._recorder, self._pin = "fake", recorder, pin
        self._memory_bytes = PLENTY if memory_bytes is None else memory_bytes
        waiting = {"synchronize": lambda stream: recorder.wait()}
        self._stream_class: type[NoStream] = type("DeviceStream", (NoStream,), waiting)
        self._stream = self._stream_class()

    def is_synchronized_device(self) -> bool:
        """No: as on a GPU, what is asked for is done later."""
        return False

    def device_name(self, device_index: int | None = None) -> str:
        """Where tensors of shapes are."""
        return "meta"

    def device_count(self) -> int:
        """One; DeepSpeed's CPU would start a program each time it is asked."""
        return 1

    def current_device(self) -> str:
        """The name of the only device there is."""
        return "meta"

    def current_device_name(self) -> str:
        """The name of the only device there is."""
        return "meta"

    def device(self, device_index: int | None = None) -> Any:
        """Nothing has to be entered."""
        return contextlib.nullcontext()

    def synchronize(self, device_index: int | None = None) -> None:
        """The host waits for the device."""
        self._recorder.wait()

    @property
    def Stream(self) -> type[NoStream]:
        """The class of streams, of which all are the one that computes: the host waits for the device."""
        return self._stream_class

    @property
    def Event(self) -> type[NoStream]:
        """The class of events."""
        return NoStream

    def stream(self, stream: Any) -> Any:
        """Nothing has to be entered."""
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> NoStream:
        """The only stream there is."""
        return self._stream

    default_stream = current_stream

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has no data."""
        return tensor.is_meta

    def pin_memory(self, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """The tensor itself, whose bytes are counted as page-locked."""
        self._pin(tensor)
        return tensor

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Does nothing: no memory is locked."""

    def create_op_builder(self, op_name: str) -> None:
        """Gives no builder: nothing is compiled for shapes."""

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free: the second stage joins weights on the device only where there is room."""
        return self._memory_bytes - self._recorder.memory.live_bytes()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that there are in all."""
        return self._memory_bytes

    def empty_cache(self) -> None:
        """The allocator gives back what it keeps for later."""
        self._recorder.empty_cache()

    def _no_memory(self, *arguments: Any) -> int:
        """Nobody asks for it to decide."""
        return 0

    get_rss = reset_rss = memory_allocated = max_memory_allocated = _no_memory
    memory_cached = max_memory_cached = memory_reserved = max_memory_reserved = _no_memory


class RankAccelerator(ShapesAccelerator):
    """The device of one of several ranks, whose streams decide from which pool a block comes."""

    def __init__(
        self,
        recorder: Recorder,
        pin: Callable[[torch.Tensor], None],
        memory_bytes: int | None,
        streams: ShapesModule,
    ) -> None:
        super().__init__(recorder, pin, memory_bytes)
        self._streams = streams

    @property
    def Stream(self) -> Any:
        """What makes a new stream, of whatever priority."""
        return self._streams.Stream

    @property
    def Event(self) -> Any:
        """What makes a new event, with whatever flags."""
        return self._streams.Event

    def stream(self, stream: Any) -> Any:
        """Within it the stream is current."""
        return self._streams.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream in which work is put now."""
        return self._streams.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        """The one that computes."""
        return self._streams.default_stream()
