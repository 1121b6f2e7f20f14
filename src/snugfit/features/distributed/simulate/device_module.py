"""A device module with the interface of `torch.cuda`, as `torch.meta`: streams and events.

FSDP2, DTensor and device meshes find the module by the name of the device type. On shapes, a stream runs
nothing. But the current stream determines the allocator's pool for a block, and the kernels for which a
kernel waits. So `StreamOrder` tracks it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.features.distributed.simulate.streams import Moment, StreamOrder
from snugfit.rehearsal.trace.trace import DEFAULT_STREAM

if TYPE_CHECKING:
    import torch


class ShapesModule:
    """A replacement of `torch.cuda` for tensors on `meta`, which simulates `devices` GPUs."""

    def __init__(
        self,
        order: StreamOrder,
        devices: int,
        wait: Callable[[], None],
        empty_cache: Callable[[], None],
    ) -> None:
        self._order, self._devices = order, devices
        self.wait = wait
        """Function that is called when the host waits for the device."""
        self.empty_cache = empty_cache
        """Function that is called when the allocator releases its cached memory."""
        self._streams = {DEFAULT_STREAM: ShapesStream(self, DEFAULT_STREAM)}

    def Stream(self, *arguments: Any, **keywords: Any) -> ShapesStream:
        """Return a new stream; its priority is ignored."""
        # On one GPU, DeepSpeed works in the computing stream (`overlap_comm` is off).
        if self._devices == 1:
            return self.default_stream()
        number = self._order.make()
        self._streams[number] = ShapesStream(self, number)
        return self._streams[number]

    def Event(self, *arguments: Any, **keywords: Any) -> ShapesEvent:
        """Return a new event; its flags are ignored."""
        return ShapesEvent(self)

    @property
    def order(self) -> StreamOrder:
        """The current stream of the simulated device, and the waits between kernels of different streams."""
        return self._order

    def current_stream(self, *device: Any) -> ShapesStream:
        """Return the current simulated CUDA stream."""
        return self._streams[self._order.current]

    def default_stream(self, *device: Any) -> ShapesStream:
        """Return the computing stream, which is current by default."""
        return self._streams[DEFAULT_STREAM]

    def set_stream(self, stream: ShapesStream) -> None:
        """Set the current simulated stream."""
        self._order.use(stream.stream_id)

    def stream(self, stream: ShapesStream | None) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this simulated stream is current; None changes nothing."""
        return contextlib.nullcontext() if stream is None else stream

    def current_device(self) -> None:
        """Return None: a tensor on `meta` has a device without an index."""

    def device_count(self) -> int:
        """Return the number of simulated devices: one per rank."""
        return self._devices

    def is_initialized(self) -> bool:
        """Return True, since a simulated device needs no initialization."""
        return True

    is_available = is_initialized

    def _do_nothing(self, *arguments: Any, **keywords: Any) -> None:
        """Do nothing: a simulated device neither computes nor draws random numbers."""

    set_device = synchronize = manual_seed = manual_seed_all = set_rng_state = _do_nothing

    def get_rng_state(self, *device: Any) -> torch.Tensor:
        """Return a placeholder for the device's random state; the simulated device draws no numbers."""
        import torch

        return torch.zeros(16, dtype=torch.uint8, device="cpu")


class ShapesEvent:
    """Simulated event of a stream, with the interface of `torch.cuda.Event`."""

    def __init__(self, module: ShapesModule) -> None:
        self._module = module
        self.moment: Moment = frozenset()
        """Last kernels of the stream in which the event was recorded, at that time."""

    def record(self, stream: ShapesStream | None = None) -> None:
        """Record the position of a stream; the default is the current one."""
        order = self._module.order
        self.moment = order.moment(order.current if stream is None else stream.stream_id)

    def wait(self, stream: ShapesStream | None = None) -> None:
        """Let a stream wait for the event; the default is the current one."""
        order = self._module.order
        order.wait(order.current if stream is None else stream.stream_id, self.moment)

    def synchronize(self) -> None:
        """Record that the host waits for the event."""
        # With one stream, the host waits where it reads a value.
        if self._module.device_count() > 1:
            self._module.wait()

    def query(self) -> bool:
        """Return True: simulated events have always occurred."""
        return True


class ShapesStream:
    """Simulated stream, with the interface of `torch.cuda.Stream`. A `with` block makes it the current
    one."""

    def __init__(self, module: ShapesModule, number: int) -> None:
        import torch

        self._module, self.stream_id, self.device = module, number, torch.device("meta")
        self._before: list[ShapesStream] = []

    def wait_stream(self, other: ShapesStream) -> None:
        """Let this stream wait for all work that the other stream has now."""
        order = self._module.order
        order.wait(self.stream_id, order.moment(other.stream_id))

    def wait_event(self, event: ShapesEvent) -> None:
        """Let this stream wait for the event."""
        event.wait(self)

    def record_event(self, event: ShapesEvent | None = None) -> ShapesEvent:
        """Return an event that marks the current position of this stream."""
        event = event or ShapesEvent(self._module)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Record that the host waits for the stream. Later work of the computing stream follows after
        that."""
        order = self._module.order
        order.wait(DEFAULT_STREAM, order.moment(self.stream_id))
        self._module.wait()

    def query(self) -> bool:
        """Return True, because the work of a simulated stream is always finished."""
        return True

    def __enter__(self) -> ShapesStream:
        self._before.append(self._module.current_stream())
        self._module.set_stream(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self._module.set_stream(self._before.pop())
