"""A small device tensor that the host overwrites in each step without waiting.

The host writes into page-locked memory, from which the device copies later; until then the host must not
write there again. So the host uses a few such buffers in turn, and waits only when it is that many writes
ahead. The tensor on the device keeps its address, so a CUDA graph that reads it gets the last written values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

RING = 4
"""Number of host buffers in rotation (chosen). The host is at most one step ahead, and a step writes once."""


class DeviceCopy:
    """A tensor on the device, and the page-locked buffers from which it is written."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        # Only copies from page-locked memory do not block the host.
        on_gpu = device.type == "cuda"
        self.value = torch.zeros(shape, dtype=dtype, device=device)
        """The tensor on the device, whose address never changes."""
        self._buffers = [
            torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=on_gpu)
            for _ in range(RING if on_gpu else 1)
        ]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() for _ in self._buffers] if on_gpu else None
        self._turn = 0

    def write(self, rows: Sequence[object]) -> None:
        """Copy rows of the host buffer to the device tensor, on the current stream; further rows keep their
        values.
        """
        self._turn = turn = (self._turn + 1) % len(self._buffers)
        if self._copied is not None:
            # The copy of four writes ago may still read the buffer.
            self._copied[turn].synchronize()
        self._arrays[turn][: len(rows)] = rows
        self.value.copy_(self._buffers[turn], non_blocking=True)
        if self._copied is not None:
            self._copied[turn].record()
