"""What cuDNN's convolutions allocate for themselves: copies of their operands with the channels last.

Tensor cores want channels last, and torch's convolutions come with channels first; so cuDNN's heuristics
choose engines that copy input, weight and output into a workspace. Which engine that is, no source says: the
rule was read off one H200 (cuDNN 9.19), from allocator histories of drawn ViTs and Whispers and from the
convolutions of `results/h200-2026-11-22/convolutions.json`.

- Half precision always copies. Its sizes are exact in forward; in backward but for a tail of up to 2 KiB, and
  for one large convolution in fp16 that held three partial results of its weight besides.
- fp32 whose channels fill whole 16 bytes (Whisper's) copies in TF32 only, whatever its size.
- fp32 whose channels do not (the three colours of an image) copies where there is enough to compute, with
  TF32 from less on than without; between `LEAST_WORK` and the nearest smaller convolution that copied nothing
  lies a factor of at most two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snugfit.rehearsal.device.buffers import OUTPUTS, Buffer, Scratch, nest, output

CHANNELS = 16
"""Bytes to which an engine pads each pixel's channels, but for fp32 in forward."""

ALIGNMENT = 16
"""Bytes of a workspace beside its copies."""

LEAST_WORK = {("forward", "tf32"): 0.85e9, ("backward", "tf32"): 0.57e9, ("backward", "ieee"): 1.3e9}
"""Multiplications from which on fp32 copies channels that do not fill whole `CHANNELS`. Copied was at 0.93e9,
0.68e9 and 1.75e9, and not at 0.77e9, 0.45e9 and 0.93e9. What is not named copies none: IEEE's forward, up to
7.7e9."""


def forward(arguments: Sequence[Any], out: Any) -> Scratch:
    """Of `convolution(input, weight, ...)`."""
    x, weight = arguments[0], arguments[1]
    if not _copies(x, weight, out, "forward"):
        return ()
    return (OUTPUTS, *_workspace(x, weight, out, padded=x.element_size() < 4))


def backward(arguments: Sequence[Any], out: Sequence[Any], summed: Scratch = ()) -> Scratch:
    """Of `convolution_backward(grad_output, input, weight, ...)`: a contiguous copy of the gradient where it
    is none, each gradient with its workspace, and when the copy is gone the bias's, which is a sum that takes
    `summed` (`cudnn_convolution_backward`, `native/cudnn/ConvShared.cpp`, and `native/Convolution.cpp`)."""
    gradient, x, weight = arguments[0], arguments[1], arguments[2]
    copy = Buffer("gradient", gradient.numel() * gradient.element_size())
    copies = () if gradient.is_contiguous() else (copy,)
    copied = _copies(x, weight, gradient, "backward")
    workspace = _workspace(x, weight, gradient, padded=True) if copied else ()
    numbers = [number for number, gradient in enumerate(out[:2]) if gradient is not None]
    gradients = tuple(entry for number in numbers for entry in (output(number), *workspace))
    return (*nest(*copies, during=gradients), output(2), *summed)


def _workspace(x: Any, weight: Any, out: Any, *, padded: bool) -> Scratch:
    item = x.element_size()
    channels = x.size(1)
    wide = -(-channels * item // CHANNELS) * CHANNELS // item if padded else channels
    copied = (x.numel() + weight.numel()) // channels * wide + out.numel()
    size = copied * item + ALIGNMENT
    return nest(Buffer("cuDNN workspace", size))


def _copies(x: Any, weight: Any, out: Any, direction: str) -> bool:
    import torch

    if x.element_size() == 2:
        return True
    if x.dtype != torch.float32:
        return False
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    precision = "tf32" if conv.fp32_precision == "tf32" else "ieee"
    if x.size(1) * x.element_size() % CHANNELS == 0:
        return precision == "tf32"
    work = out.numel() * (weight.numel() // weight.size(0))
    return bool(work >= LEAST_WORK.get((direction, precision), float("inf")))
