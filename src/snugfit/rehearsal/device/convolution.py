"""What cuDNN's convolutions allocate for themselves: copies of their operands with the channels last.

Tensor cores want channels last, and torch's convolutions come with channels first; so cuDNN's heuristics
choose engines that copy input, weight and output into a workspace. Which engine that is, no source says: the
rule was read off one H200 (cuDNN 9.19), from allocator histories of drawn ViTs and Whispers and from the
convolutions of `results/h200-2026-11-22/convolutions.json`.

- Half precision copies. Its sizes are exact in forward; in backward but for a tail of up to 2 KiB.
- Half precision over the three colours of an image, as patch embeddings have it, was read over 136 shapes
  (`results/h200-2026-11-27/patch-embeddings.json`, bf16). Forward, results of up to 384 channels take no
  copy. Backward, a long sum over pictures and patches is made in parts, whose results lie in the workspace in
  fp32; and small pictures' gradient of the weight takes one such part and no copies. Not followed:
  three shapes with 42 million and more numbers of input copied nothing forward; up to 39 million did.
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

FLOAT_BYTES, PARTS_TAIL = 4, 128
"""Bytes of a number of a part, and of a workspace beside its parts."""

LEAST_WORK = {("forward", "tf32"): 0.85e9, ("backward", "tf32"): 0.57e9, ("backward", "ieee"): 1.3e9}
"""Multiplications from which on fp32 copies channels that do not fill whole `CHANNELS`. Copied was at 0.93e9,
0.68e9 and 1.75e9, and not at 0.77e9, 0.45e9 and 0.93e9. What is not named copies none: IEEE's forward, up to
7.7e9."""

NARROW = 384
"""Channels of a result in half precision that is computed from pictures without a copy: 384 and less took
none, 640 and more did."""

SUMMED_IN_PARTS, MANY, MOST_IN_PARTS = 2560, 64, 1 << 16
"""Rows of a sum (samples times patches) from which on it is made in parts; samples from which on in one part
more; and rows that it was no longer made in parts of. 2,560 rows and 64 samples were not there yet, 2,744
and 96 were; 50,176 were still made in parts, 65,536 no longer."""

PIXELS = 16
"""Of a patch, to a multiple of which the one part of so long a sum is filled up."""

FEW_PATCHES, FEW_SAMPLES, FEW_TAIL = 49, 8, 18_448
"""Patches of a picture of which the gradient of the weight takes no copies, where there are more samples than
these (8 took some, 10 did not), and bytes of its workspace beside one result in fp32."""


def forward(arguments: Sequence[Any], out: Any) -> Scratch:
    """Of `convolution(input, weight, ...)`."""
    x, weight = arguments[0], arguments[1]
    if (_is_of_patches(x, weight, out) and out.size(1) <= NARROW) or not _copies(x, weight, out, "forward"):
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
    of_weight = _workspace_of_parts(x, weight, gradient) if _is_of_patches(x, weight, gradient) else workspace
    numbers = [number for number, gradient in enumerate(out[:2]) if gradient is not None]
    gradients = tuple(
        entry for number in numbers for entry in (output(number), *(workspace, of_weight)[number])
    )
    return (*nest(*copies, during=gradients), output(2), *summed)


def _workspace(x: Any, weight: Any, out: Any, *, padded: bool) -> Scratch:
    return nest(Buffer("cuDNN workspace", _bytes_of_copies(x, weight, out, padded=padded)))


def _bytes_of_copies(x: Any, weight: Any, out: Any, *, padded: bool) -> int:
    channels = int(x.size(1))
    wide = _padded_channels(x) if padded else channels
    copied = (x.numel() + weight.numel()) // channels * wide + out.numel()
    return int(copied * x.element_size()) + ALIGNMENT


def _padded_channels(x: Any) -> int:
    item = int(x.element_size())
    return -(-int(x.size(1)) * item // CHANNELS) * CHANNELS // item


def _workspace_of_parts(x: Any, weight: Any, gradient: Any) -> Scratch:
    """Of the weight's gradient from pictures in half precision."""
    samples, patches = x.size(0), gradient[0, 0].numel()
    if patches <= FEW_PATCHES and samples > FEW_SAMPLES:
        return nest(Buffer("cuDNN workspace", weight.numel() * FLOAT_BYTES + FEW_TAIL))
    rows, pixels, parts = samples * patches, weight[0, 0].numel(), 0
    if rows >= MOST_IN_PARTS:
        parts, pixels = 1, -(-pixels // PIXELS) * PIXELS
    elif rows > SUMMED_IN_PARTS:
        parts = 3 + (samples > MANY)
    part = weight.size(0) * pixels * _padded_channels(x) * FLOAT_BYTES
    size = _bytes_of_copies(x, weight, gradient, padded=True) + parts * part + (parts > 0) * PARTS_TAIL
    return nest(Buffer("cuDNN workspace", size))


def _is_of_patches(x: Any, weight: Any, out: Any) -> bool:
    """Whether it is of pictures in colours (B, C, H, W) in half precision, patch by patch."""
    apart = x.dim() == 4 and out.size(2) == x.size(2) // weight.size(2)
    return bool(apart and x.element_size() == 2 and _has_colours(x))


def _has_colours(x: Any) -> bool:
    """Whether an image's channels do not fill whole 16 bytes."""
    return bool(x.size(1) * x.element_size() % CHANNELS)


def _copies(x: Any, weight: Any, out: Any, direction: str) -> bool:
    import torch

    if x.element_size() == 2:
        return True
    if x.dtype != torch.float32:
        return False
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    precision = "tf32" if conv.fp32_precision == "tf32" else "ieee"
    if not _has_colours(x):
        return precision == "tf32"
    work = out.numel() * (weight.numel() // weight.size(0))
    return bool(work >= LEAST_WORK.get((direction, precision), float("inf")))
