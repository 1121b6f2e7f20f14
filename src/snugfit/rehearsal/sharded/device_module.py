"""What torch's distributed code asks a device's module for (`torch.cuda`, here `torch.meta`): streams and
events.

FSDP2, DTensor and device meshes look the module up by the name of the device type. On shapes a stream runs
nothing, but which one is current decides from which of the allocator's pools a block comes and what a kernel
waits for, so that is kept (`StreamOrder`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.sharded.streams import Moment, StreamOrder
from snugfit.rehearsal.trace.trace import DEFAULT_STREAM

if TYPE_CHECKING:
    import torch


class ShapesModule:
    """`torch.meta`, in the place of `torch.cuda`, on a machine of so many devices."""

    def __init__(
        self,
        order: StreamOrder,
        devices: int,
        wait: Callable[[], None],
        empty_cache: Callable[[], None],
    ) -> None:
        self._order, self._devices = order, devices
        self.wait = wait
        """Called where the host waits for the device."""
        self.empty_cache = empty_cache
        """Called where the allocator gives back what it keeps."""
        self._streams = {DEFAULT_STREAM: ShapesStream(self, DEFAULT_STREAM)}

    def Stream(self, *arguments: Any, **keywords: Any) -> ShapesStream:
        """A new stream, of whatever priority."""
        number = self._order.make()
        self._streams[number] = ShapesStream(self, number)
        return self._streams[number]

    def Event(self, *arguments: Any, **keywords: Any) -> ShapesEvent:
        """A new event, with whatever flags."""
        return ShapesEvent(self)

    @property
    def order(self) -> StreamOrder:
        """Which stream is current, and which kernels wait for which."""
        return self._order

    def current_stream(self, *device: Any) -> ShapesStream:
        """The stream in which work is put now."""
        return self._streams[self._order.current]

    def default_stream(self, *device: Any) -> ShapesStream:
        """The one that is current where no other is named."""
        return self._streams[DEFAULT_STREAM]

    def set_stream(self, stream: ShapesStream) -> None:
        """Puts what follows into this stream."""
        self._order.use(stream.stream_id)

    def stream(self, stream: ShapesStream | None) -> contextlib.AbstractContextManager[Any]:
        """Within it the stream is current; None changes nothing."""
        return contextlib.nullcontext() if stream is None else stream

    def current_device(self) -> None:
        """Tensors of shapes have a device without a number."""

    def device_count(self) -> int:
        """One for each rank."""
        return self._devices

    def is_initialized(self) -> bool:
        """Yes: there is nothing to begin."""
        return True

    is_available = is_initialized

    def _do_nothing(self, *arguments: Any, **keywords: Any) -> None:
        """There is one device, which computes nothing and draws no numbers."""

    set_device = synchronize = manual_seed = manual_seed_all = set_rng_state = _do_nothing

    def get_rng_state(self, *device: Any) -> torch.Tensor:
        """The state of a generator that draws nothing."""
        import torch

        return torch.zeros(16, dtype=torch.uint8, device="cpu")


class ShapesEvent:
    """A moment of a stream."""

    def __init__(self, module: ShapesModule) -> None:
        self._module = module
        self.moment: Moment = frozenset()
        """What the stream that recorded it had come to."""

    def record(self, stream: ShapesStream | None = None) -> None:
        """Marks how far a stream has come; by default the current one."""
        order = self._module.order
        self.moment = order.moment(order.current if stream is None else stream.stream_id)

    def wait(self, stream: ShapesStream | None = None) -> None:
        """A stream waits until then; by default the current one."""
        order = self._module.order
        order.wait(order.current if stream is None else stream.stream_id, self.moment)

    def synchronize(self) -> None:
        """The host waits for it."""
        self._module.wait()

    def query(self) -> bool:
        """Whether it has happened."""
        return True


class ShapesStream:
    """A stream that runs nothing. As a context it is the current one within it."""

    def __init__(self, module: ShapesModule, number: int) -> None:
        import torch

        self._module, self.stream_id, self.device = module, number, torch.device("meta")
        self._before: list[ShapesStream] = []

    def wait_stream(self, other: ShapesStream) -> None:
        """Runs nothing further before all that the other has to do now."""
        order = self._module.order
        order.wait(self.stream_id, order.moment(other.stream_id))

    def wait_event(self, event: ShapesEvent) -> None:
        """Runs nothing further before the event."""
        event.wait(self)

    def record_event(self, event: ShapesEvent | None = None) -> ShapesEvent:
        """An event of this moment."""
        event = event or ShapesEvent(self._module)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for it, and asks for nothing of the stream that computes before that."""
        order = self._module.order
        order.wait(DEFAULT_STREAM, order.moment(self.stream_id))
        self._module.wait()

    def query(self) -> bool:
        """Whether all is done."""
        return True

    def __enter__(self) -> ShapesStream:
        self._before.append(self._module.current_stream())
        self._module.set_stream(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self._module.set_stream(self._before.pop())
