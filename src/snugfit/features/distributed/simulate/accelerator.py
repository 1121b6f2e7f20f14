"""An accelerator for tensors without data, with DeepSpeed's interface for device vendors.

Its tensors are on `meta`, and its streams are those of `torch.meta` (`device_module.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

if TYPE_CHECKING:
    from snugfit.features.distributed.simulate.device_module import ShapesModule
    from snugfit.rehearsal.record.recorder import Recorder

PLENTY = 1 << 50
"""Memory of the simulated device in bytes if no GPU is given: more than any model needs."""


class ShapesAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's accelerator interface for a simulated device."""

    def __init__(
        self,
        recorder: Recorder,
        pin: Callable[[torch.Tensor], None],
        memory_bytes: int | None,
        streams: ShapesModule,
    ) -> None:
        super().__init__()
        # DeepSpeed reads the name of the backend from this attribute.
        self._communication_backend_name, self._recorder, self._pin = "fake", recorder, pin
        self._memory_bytes = PLENTY if memory_bytes is None else memory_bytes
        self._streams = streams
        self.stream, self.empty_cache = streams.stream, streams.empty_cache
        self.current_stream, self.default_stream = streams.current_stream, streams.default_stream

    def is_synchronized_device(self) -> bool:
        """Return False, as for a GPU: the device runs kernels asynchronously to the host."""
        return False

    def device_name(self, device_index: int | None = None) -> str:
        """Return the device type of tensors without data, which is also the name of the only device."""
        return "meta"

    current_device = current_device_name = device_name

    def device_count(self) -> int:
        """Return 1, the number of simulated devices. DeepSpeed's own CPU class would start a program per
        call.
        """
        return 1

    def device(self, device_index: int | None = None) -> Any:
        """Return an empty context, since there is only one device."""
        return contextlib.nullcontext()

    def synchronize(self, device_index: int | None = None) -> None:
        """Record that the host waits for the device."""
        self._recorder.wait()

    @property
    def Stream(self) -> Any:
        """Return the constructor of streams; it ignores priorities."""
        return self._streams.Stream

    @property
    def Event(self) -> Any:
        """Return the constructor of events; it ignores flags."""
        return self._streams.Event

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is on the simulated device (`meta`)."""
        return tensor.is_meta

    def pin_memory(self, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Return the tensor itself; its bytes count as page-locked."""
        self._pin(tensor)
        return tensor

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Do nothing: simulated memory is not really page-locked."""

    def create_op_builder(self, op_name: str) -> None:
        """Return None, because no operator is compiled for tensors without data."""

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes of the simulated device. ZeRO-2 joins weights on the device only if
        they fit.
        """
        return self._memory_bytes - self._recorder.memory.live_bytes()

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory of the whole simulated device."""
        return self._memory_bytes

    def _no_memory(self, *arguments: Any) -> int:
        """Return 0 for DeepSpeed's memory statistics, on which no decision depends."""
        return 0

    get_rss = reset_rss = memory_allocated = max_memory_allocated = _no_memory
    memory_cached = max_memory_cached = memory_reserved = max_memory_reserved = _no_memory
