"""Substitutes for CUDA streams and host memory, so that transformers' offloaded cache runs in a simulation
and on the CPU.

After a layer has used its keys and values, the cache copies them to pinned memory in the computing stream.
One layer before they are needed again, it copies them back in a stream of its own. All of that is
`Cache.update` of transformers, which runs unchanged.

A simulation writes each copy to its trace. On the CPU, torch's allocator represents the device, and host
memory is outside of it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from snugfit.results.footprint import Kind
from snugfit.step.host_link import MetaLink
from snugfit.step.step import Observer

STREAMS = 32
"""Number of CUDA streams that torch creates on a device. Later ones reuse these (`c10/cuda/CUDAStream.cpp`).
"""

HOST = torch.device("cpu", 0)
"""Device of simulated tensors in host memory. It differs from `torch.device("cpu")`, so that both kinds are
distinguished.
"""


class OffloadedTensor(torch.Tensor):
    """Keys or values of a cache layer in host memory; on `meta` in a simulation."""

    is_simulated: bool
    """True if the device's tensors have no data (`meta`), as in a simulation."""
    is_page_locked: bool
    """True for page-locked memory. False for results of the host's operators, such as the choice between
    beams.
    """

    @classmethod
    def like(cls, tensor: torch.Tensor, *, is_simulated: bool, is_page_locked: bool) -> OffloadedTensor:
        """Return a host tensor with the shape and dtype of another tensor. Its values are not set."""
        if is_simulated:
            # An expanded single element has any shape, and needs no memory.
            data = torch.empty(1, dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        else:
            memory = mmap.mmap(-1, max(tensor.nbytes, tensor.itemsize))
            data = torch.frombuffer(memory, dtype=tensor.dtype)[: tensor.numel()].view(tensor.shape)
        host = data.as_subclass(cls)
        host.is_simulated, host.is_page_locked = is_simulated, is_page_locked
        return host

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function. Copies to the device and selections of beams are replaced by methods of this
        class.
        """
        host = args[0] if args and isinstance(args[0], cls) else None
        with torch._C.DisableTorchFunctionSubclass():
            if host is not None and func is torch.Tensor.to:
                return host._on_device(args[1])
            if host is not None and func is torch.Tensor.index_select:
                return host._select(*args[1:])
            if host is not None and not host.is_simulated and func == torch.Tensor.device.__get__:
                return HOST
            return func(*args, **(kwargs or {}))

    def _on_device(self, device: torch.device) -> torch.Tensor:
        """Return a copy on the device, whose memory belongs to the current stream."""
        data = self.as_subclass(torch.Tensor)
        if not self.is_simulated:
            return torch.empty(data.shape, dtype=data.dtype, device="cpu").copy_(data)
        PrefetchStream.is_pending = True
        if not self.is_page_locked:
            # The recorder treats it as a copy from pageable memory, for which the host waits.
            return data.to(device)
        copy = torch.empty(data.shape, dtype=data.dtype, device=device)
        MetaLink.observer.copy_back(copy.nbytes)
        return copy

    def _select(self, dim: int, index: torch.Tensor) -> OffloadedTensor:
        """Return the rows that an index selects. The host copies them to pageable memory."""
        result = OffloadedTensor.like(self, is_simulated=self.is_simulated, is_page_locked=False)
        if self.is_simulated:
            MetaLink.observer.work_on_host(2 * self.nbytes)
        else:
            plain, out = (tensor.as_subclass(torch.Tensor) for tensor in (self, result))
            torch.index_select(plain, dim, index, out=out)
        return result


COPIES_WARNING = (
    "Each call of generate copies its cache back in a stream with memory of its own. Reserved bytes are for "
    f"two calls, and grow with each further one up to {STREAMS}."
)
"""Warning about the memory of an offloaded key/value cache."""


class PrefetchStream:
    """Substitute for the CUDA stream in which a cache copies keys and values back to the device."""

    is_pending: ClassVar[bool] = False
    """True if a copy to the device was launched, and the default stream has not waited for it yet."""

    def __init__(self, number: int, recorder: Any) -> None:
        self.number, self.recorder = number, recorder

    def __enter__(self) -> PrefetchStream:
        if self.recorder is not None:
            self._before = self.recorder.memory.use_stream(self.number)
            self.recorder.warn(COPIES_WARNING)
        return self

    def __exit__(self, *arguments: Any) -> None:
        if self.recorder is not None:
            self.recorder.memory.use_stream(self._before)

    def wait_stream(self, other: Any) -> None:
        """Do nothing, because a copy in the trace begins after the kernels that were launched before it."""


class DefaultStream:
    """Substitute for the default CUDA stream, in which kernels run."""

    def wait_stream(self, other: PrefetchStream) -> None:
        """Record that this stream waits for the copies of the other one."""
        if PrefetchStream.is_pending:
            MetaLink.observer.await_copy(0)
        PrefetchStream.is_pending = False


class _Copies(TorchFunctionMode):
    """Torch function mode in which copies to the host become `OffloadedTensor`s, which it stores."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer
        self.copied: list[torch.Tensor] = []
        """Tensors that were copied to the host, in order."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function. Copies to the host become `OffloadedTensor`s."""
        if func is not torch.Tensor.to or isinstance(args[0], OffloadedTensor) or args[1] != "cpu":
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        host = OffloadedTensor.like(tensor, is_simulated=tensor.is_meta, is_page_locked=True)
        if tensor.is_meta:
            self._observer.claim(tensor, Kind.KEY_VALUES)
            MetaLink.observer.stage_out(tensor.nbytes)
        else:
            host.as_subclass(torch.Tensor).copy_(tensor)
        self.copied.append(host)
        return host


class HostBlocks:
    """Blocks of host memory in one call of `generate`, computed from the copies of its cache layers."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.last: dict[tuple[int, int], torch.Size] = {}
        """Shape of each copied tensor in the latest forward pass, by layer and number of the tensor."""
        self.itemsize = 0
        self.reordered = False
        """True after the host has reordered the cache for the selected beams."""

    def add(self, layer: int, copied: Sequence[torch.Tensor]) -> None:
        """Add the copies of a layer's keys and values in one forward pass."""
        for number, tensor in enumerate(copied):
            self.last[layer, number], self.itemsize = tensor.shape, tensor.itemsize

    def page_locked(self) -> int:
        """Return the bytes of pinned host memory. torch rounds a block up to a power of two, and does not
        free it.

        A layer that grows leaves the smaller blocks behind (`CachingHostAllocator`). Further blocks whose
        copies have not ended are not counted.
        """
        total = 0
        for shape in self.last.values():
            nbytes = shape.numel() * self.itemsize
            # Keys and values have the tokens in their second to last dimension.
            is_grown = self.prompt and len(shape) == 4
            first = nbytes // shape[-2] * min(self.prompt, shape[-2]) if is_grown else nbytes
            size = _block(first)
            while size <= _block(nbytes):
                total += size
                size *= 2
        return total

    def pageable(self) -> int:
        """Return the bytes of host memory that is not pinned."""
        return sum(tensor.numel() for tensor in self.last.values()) * self.itemsize if self.reordered else 0


def _block(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()


@contextlib.contextmanager
def without_streams(observer: Observer, recorder: Any, call: int, *, prompt: int) -> Iterator[None]:
    """Context in which a call of `generate` with an offloaded cache runs on `meta` or on the CPU, without
    CUDA streams.

    `recorder` records a simulation's copies, or is None. `call` counts the calls from 0. `prompt` is the
    length of the prompt, or 0 for a static cache, which does not grow.
    """
    from transformers.cache_utils import Cache

    offload, reorder = Cache.offload, Cache.reorder_cache
    blocks = HostBlocks(prompt)

    def offload_and_note(cache: Any, layer: int, *arguments: Any, **named: Any) -> None:
        with _Copies(observer) as copies:
            offload(cache, layer, *arguments, **named)
        blocks.add(layer, copies.copied)

    def reorder_and_state(cache: Any, beams: torch.Tensor) -> None:
        # The host reads the indices of the selected beams. Their values do not affect any size.
        observer.state(beams, torch.zeros(beams.shape, dtype=beams.dtype, device="cpu"))
        blocks.reordered = True
        reorder(cache, beams)

    PrefetchStream.is_pending = False
    with (
        patch.object(Cache, "offload", offload_and_note),
        patch.object(Cache, "reorder_cache", reorder_and_state),
        patch.object(torch, "Stream", lambda: PrefetchStream(call % STREAMS + 1, recorder)),
        patch.object(torch.cuda, "default_stream", lambda device=None: DefaultStream()),
    ):
        yield
    MetaLink.observer.hold_on_host(blocks.page_locked() + blocks.pageable(), blocks.page_locked())
