"""DeepSpeed's operator for files in a rehearsal: nothing is read or written, and an observer hears of it.

Its swappers run as they are: they keep page-locked buffers on the host, through which weights, gradients and
states go to files and come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snugfit.step.host_link import MetaLink

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.sharded.host_tensors import HostTensors


class FileHandle:
    """Reads and writes files beside the host's work, and is waited for (`csrc/aio`)."""

    def __init__(self, host: HostTensors) -> None:
        self._host = host
        self._pending = 0

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
        """Asks for a file's bytes; 0 says that it went well."""
        self._pending += 1
        if MetaLink.observer is not None:
            MetaLink.observer.swap(buffer.nbytes)
        return 0

    async_pwrite = async_pread

    def wait(self) -> int:
        """How many of them are done."""
        done, self._pending = self._pending, 0
        return done

    def new_cpu_locked_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of page-locked memory of the host."""
        import torch

        tensor = torch.empty(int(numel), dtype=like.dtype, device="cpu")
        self._host.lock(tensor)
        LOCKED.add(tensor.untyped_storage()._cdata)
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> None:
        """Gives such a tensor's memory back."""
        LOCKED.discard(tensor.untyped_storage()._cdata)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is such."""
        return tensor.untyped_storage()._cdata in LOCKED


LOCKED: set[int] = set()
"""Storages of page-locked memory, which all handles of a process know."""


class FileOperator:
    """In the place of DeepSpeed's builder, and of the module that it compiles."""

    def __init__(self, host: HostTensors) -> None:
        self._host = host

    def load(self, verbose: bool = False) -> FileOperator:
        """Itself, in the place of a compiled module."""
        return self

    def aio_handle(self, **settings: Any) -> FileHandle:
        """A handle of these settings, which change no byte."""
        return FileHandle(self._host)
