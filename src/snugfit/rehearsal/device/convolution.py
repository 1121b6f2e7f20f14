"""Workspaces of cuDNN's convolutions: copies of their operands in channels-last layout.

Tensor cores require channels last, and torch's convolutions usually have channels first. So cuDNN's
heuristics choose engines that copy input, weight and output into a workspace. The choice is documented in no
source. The rule was fitted on one H200 (cuDNN 9.19). Its data are allocator histories of drawn ViTs and
Whispers, and the convolutions of `results/h200-2026-11-22/convolutions.json`. Patch embeddings were fitted to
136 shapes (`results/h200-2026-11-27/patch-embeddings.json`, bf16).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snugfit.rehearsal.device.buffers import OUTPUTS, Buffer, Scratch, nest, output

CHANNELS = 16
"""Multiple, in bytes, to which a convolution kernel pads each pixel's channels, except in fp32 forward
passes.
"""

ALIGNMENT = 16
"""Bytes of a convolution's workspace in addition to the operand copies in it."""

FLOAT_BYTES, PARTS_TAIL = 4, 128
"""Size in bytes of one element of a partial sum, and additional bytes of a workspace with partial sums."""

LEAST_WORK = {("forward", "tf32"): 0.85e9, ("backward", "tf32"): 0.57e9, ("backward", "ieee"): 1.3e9}
"""Number of multiplications from which an fp32 convolution copies operands whose channels do not fill a
multiple of `CHANNELS`.

For the three keys, kernels of 0.93e9, 0.68e9 and 1.75e9 multiplications copied; those of 0.77e9, 0.45e9 and
0.93e9 did not. IEEE's forward pass has no entry, since it copied nothing up to 7.7e9.
"""

NARROW = 384
"""Largest number of output channels at which a half-precision convolution copies no operands.

Results of 384 channels and fewer had no copy; those of 640 and more had one.
"""

SUMMED_IN_PARTS, MANY, MOST_IN_PARTS = 2560, 64, 1 << 16
"""Thresholds for partial sums in the weight's gradient: rows (samples times patches), samples, rows.

Above the first threshold, the sum is computed in parts. Above the second, it has one additional part. From
the third on, it has a single part. 2,560 rows and 64 samples were below a threshold, 2,744 and 96 above.
50,176 rows were still in parts, 65,536 no longer.
"""

PIXELS = 16
"""Multiple to which a patch's pixels are padded if the sum has at least `MOST_IN_PARTS` rows."""

FEW_PATCHES, FEW_SAMPLES, FEW_TAIL = 49, 8, 18_448
"""Limits for a weight's gradient without operand copies, and bytes of its workspace besides one fp32 result.

Such a gradient has at most 49 patches per image and more than 8 samples (8 samples copied, 10 did not).
"""


def forward(arguments: Sequence[Any], out: Any) -> Scratch:
    """Return the temporary buffers of `convolution(input, weight, ...)`."""
    x, weight = arguments[0], arguments[1]
    copies = _in_layout(x, weight)
    # With channels last, the kernels read the operands themselves. Three recorded shapes with 42 million or
    # more input elements copied nothing either. No rule here covers them.
    few = _is_of_patches(x, weight, out) and out.size(1) <= NARROW
    if _is_channels_last(x, weight) or few or not _copies(x, weight, out, "forward"):
        return nest(*copies, during=(OUTPUTS,)) if copies else ()
    # This size was exact for every recorded convolution in half precision.
    return nest(*copies, during=(OUTPUTS, *_workspace(x, weight, out, padded=x.element_size() < 4)))


def backward(arguments: Sequence[Any], out: Sequence[Any], summed: Scratch = ()) -> Scratch:
    """Return the temporary buffers of `convolution_backward(grad_output, input, weight, ...)`.

    They are contiguous copies of `grad_output` and the input if needed, and a workspace for each computed
    gradient. After the copies are freed, the bias's gradient follows, a sum with the temporary buffers
    `summed`. Sources: `cudnn_convolution_backward` (`native/cudnn/ConvShared.cpp`) and
    `native/Convolution.cpp`.
    """
    gradient, x, weight = arguments[0], arguments[1], arguments[2]
    copies = _in_layout(x, weight, gradient)
    copied = not _is_channels_last(x, weight) and _copies(x, weight, gradient, "backward")
    # This size was exact in half precision, except for up to 2 KiB at the end.
    workspace = _workspace(x, weight, gradient, padded=True) if copied else ()
    of_patches = _is_of_patches(x, weight, gradient)
    of_weight = _workspace_of_parts(x, weight, gradient) if copied and of_patches else workspace
    numbers = [number for number, gradient in enumerate(out[:2]) if gradient is not None]
    gradients = tuple(
        entry for number in numbers for entry in (output(number), *(workspace, of_weight)[number])
    )
    return (*nest(*copies, during=gradients), output(2), *summed)


def _is_channels_last(x: Any, weight: Any) -> bool:
    import torch

    from snugfit.rehearsal.device.shapes import layout_of_convolution

    return layout_of_convolution(x, weight) is not torch.contiguous_format


def _in_layout(x: Any, weight: Any, gradient: Any = None) -> list[Buffer]:
    """Return the copies of operands that do not have the convolution's layout.

    An input (B, C, S) is copied to channels first (`convolution`, `native/Convolution.cpp`). Tensors of
    pictures (B, C, H, W) have the layout that input or weight suggests.
    """
    from snugfit.rehearsal.device.shapes import layout_of_convolution

    layout = layout_of_convolution(x, weight)
    operands = {"gradient": gradient, "input": x, "weight": weight}
    return [
        Buffer(f"{name} in layout", operand.numel() * operand.element_size())
        for name, operand in operands.items()
        if operand is not None and not operand.is_contiguous(memory_format=layout)
    ]


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
    """Return the temporary buffer for the weight's gradient of a patch embedding in half precision."""
    samples, patches = x.size(0), gradient[0, 0].numel()
    # The weight's gradient from small images needs one fp32 result and no copies.
    if patches <= FEW_PATCHES and samples > FEW_SAMPLES:
        return nest(Buffer("cuDNN workspace", weight.numel() * FLOAT_BYTES + FEW_TAIL))
    rows, pixels, parts = samples * patches, weight[0, 0].numel(), 0
    if rows >= MOST_IN_PARTS:
        parts, pixels = 1, -(-pixels // PIXELS) * PIXELS
    # A long sum over images and patches is computed in parts, with fp32 results in the workspace.
    elif rows > SUMMED_IN_PARTS:
        parts = 3 + (samples > MANY)
    part = weight.size(0) * pixels * _padded_channels(x) * FLOAT_BYTES
    size = _bytes_of_copies(x, weight, gradient, padded=True) + parts * part + (parts > 0) * PARTS_TAIL
    return nest(Buffer("cuDNN workspace", size))


def _is_of_patches(x: Any, weight: Any, out: Any) -> bool:
    """Return True for a patch embedding in half precision: a convolution of images (B, C, H, W) whose stride
    equals its kernel size."""
    no_overlap = x.dim() == 4 and out.size(2) == x.size(2) // weight.size(2)
    return bool(no_overlap and x.element_size() == 2 and _has_colours(x))


def _has_colours(x: Any) -> bool:
    """Return True if the bytes of an image's channels (such as 3 colours) are not a multiple of 16, as tensor
    cores require.
    """
    return bool(x.size(1) * x.element_size() % CHANNELS)


def _copies(x: Any, weight: Any, out: Any, direction: str) -> bool:
    import torch

    # Half precision runs on tensor cores, so it always copies.
    if x.element_size() == 2:
        return True
    if x.dtype != torch.float32:
        return False
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    precision = "tf32" if conv.fp32_precision == "tf32" else "ieee"
    if not _has_colours(x):
        # Channels that fill multiples of 16 bytes (Whisper's) are copied in TF32 only, at any size.
        return precision == "tf32"
    # Other channels (the three colours of an image) are copied above an amount of work.
    work = out.numel() * (weight.numel() // weight.size(0))
    return bool(work >= LEAST_WORK.get((direction, precision), float("inf")))
