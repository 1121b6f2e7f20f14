"""What cuDNN's convolutions allocate for themselves: copies of their operands with the channels last.

Tensor cores want channels last, and torch's convolutions come with channels first; so cuDNN's heuristics
choose engines that copy input, weight and output into a workspace. Which engine that is, no source says: the
rule was read off allocator histories of one H200 (cuDNN 9.19; ViT with 32 x 32 patches in fp16 and tf32,
Whisper's two convolutions in tf32). It is exact for ViT but for the last 131 bytes of backward, and for
Whisper within half of what an engine takes. fp32 without TF32 took no workspace at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snugfit.rehearsal.buffers import OUTPUTS, Scratch, held

CHANNELS = 16
"""Bytes to which an engine pads each pixel's channels, but for fp32 in forward."""

ALIGNMENT = 16
"""Bytes of a workspace beside its copies."""


def forward(arguments: Sequence[Any], out: Any) -> Scratch:
    """Of `convolution(input, weight, ...)`."""
    x, weight = arguments[0], arguments[1]
    return (OUTPUTS, *_workspace(x, weight, out, padded=x.element_size() < 4))


def backward(arguments: Sequence[Any], out: Sequence[Any]) -> Scratch:
    """Of `convolution_backward(grad_output, input, weight, ...)`: a contiguous copy of the gradient where it
    is none (`cudnn_convolution_backward`, `native/cudnn/ConvShared.cpp`), a workspace for each gradient."""
    gradient, x, weight = arguments[0], arguments[1], arguments[2]
    copies = () if gradient.is_contiguous() else (("gradient", gradient.numel() * gradient.element_size()),)
    each = _workspace(x, weight, gradient, padded=True)
    return held(copies, (OUTPUTS, *(each * sum(one is not None for one in out[:2]))))


def _workspace(x: Any, weight: Any, out: Any, *, padded: bool) -> Scratch:
    if not _on_tensor_cores(x):
        return ()
    item = x.element_size()
    channels = x.size(1)
    wide = -(-channels * item // CHANNELS) * CHANNELS // item if padded else channels
    copied = (x.numel() + weight.numel()) // channels * wide + out.numel()
    size = copied * item + ALIGNMENT
    return (("cuDNN workspace", size), ("cuDNN workspace", -size))


def _on_tensor_cores(x: Any) -> bool:
    import torch

    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return bool(x.element_size() == 2 or (x.dtype == torch.float32 and conv.fp32_precision == "tf32"))
