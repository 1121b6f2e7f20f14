"""RMSNorm in Triton, with the addition before it: one program for each row, in one pass over memory.

A backward program processes every `PROGRAMS`-th row and keeps the sum of the scale's gradient in registers.
So only `PROGRAMS` rows of sums are written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def norm_row(  # type: ignore[no-untyped-def]
    branch, residual, scale, stream, normed, roots, columns, eps,
    ADDS: tl.constexpr, AGAIN: tl.constexpr, SCALING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write one row's RMSNorm and its inverse root mean square. With `ADDS`, first add a
    sublayer's output to the residual stream, and write the sum. With `AGAIN` the root is loaded instead of
    computed. `SCALING` is a number of `Scaling`.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    begin = row * columns
    branch_value = tl.load(branch + begin + at, mask=mask, other=0.0)
    value = branch_value.to(tl.float32)
    if ADDS:
        value += tl.load(residual + begin + at, mask=mask, other=0.0).to(tl.float32)
        # The norm is computed from the stored stream, which is rounded as in transformers.
        rounded = value.to(stream.dtype.element_ty)
        tl.store(stream + begin + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if AGAIN:
        root = tl.load(roots + row)
    else:
        # The root is rounded correctly, because an approximate one may differ in the last bits.
        root = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / columns + eps)
        tl.store(roots + row, root)
    factor = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
    value = value * root
    if SCALING == 1:
        value = value * (1.0 + factor)
    elif SCALING == 2:
        value = value * factor
    elif ADDS:
        # Llama rounds the normed value before it multiplies by the scale.
        value = value.to(stream.dtype.element_ty).to(tl.float32) * factor
    else:
        value = value.to(branch.dtype.element_ty).to(tl.float32) * factor
    tl.store(normed + begin + at, value.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def norm_rows_backward(  # type: ignore[no-untyped-def]
    of_normed, of_stream, stream, scale, roots, into, into_branch, sums, rows, columns,
    ADDS: tl.constexpr, TWICE: tl.constexpr, SCALES: tl.constexpr, SCALING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write the gradient of the residual stream for some rows.

    With `ADDS`, the stream's own gradient is added. With `TWICE`, the result is also written in the branch's
    dtype. With `SCALES`, a row of sums for the gradient of the scale is written.
    """
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    factor = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
    if SCALING == 1:
        factor += 1.0
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    programs = tl.num_programs(0)
    # Programs process every n-th row, and keep their part of the scale's gradient in registers.
    for index in range(tl.cdiv(rows - program, programs)):
        row = (program + index * programs).to(tl.int64)
        begin = row * columns
        slope = tl.load(of_normed + begin + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(stream + begin + at, mask=mask, other=0.0).to(tl.float32)
        root = tl.load(roots + row)
        value = value * root
        if SCALES:
            total += slope * value
        slope = slope * factor
        share = tl.sum(slope * value, 0) / columns
        # Gradient through an RMS norm: only its projection on the normed row is subtracted.
        slope = (slope - value * share) * root
        if ADDS:
            slope += tl.load(of_stream + begin + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(into + begin + at, slope.to(into.dtype.element_ty), mask=mask)
        if TWICE:
            tl.store(into_branch + begin + at, slope.to(into_branch.dtype.element_ty), mask=mask)
    if SCALES:
        tl.store(sums + program.to(tl.int64) * columns + at, total, mask=mask)


def rms_norm(
    stream: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    scaling: int,
    *,
    normed: torch.Tensor,
    roots: torch.Tensor,
) -> None:
    """Write the RMSNorm of contiguous rows (T, H), and the inverse root (T,) of each row's mean square."""
    tensors = stream, stream, scale, stream, normed, roots
    _launch(tensors, eps, ADDS=False, AGAIN=False, SCALING=int(scaling))


def rms_norm_again(
    stream: torch.Tensor, scale: torch.Tensor, roots: torch.Tensor, scaling: int, *, normed: torch.Tensor
) -> None:
    """Write the RMSNorm of rows (T, H) from their saved inverse roots (T,)."""
    tensors = stream, stream, scale, stream, normed, roots
    _launch(tensors, 0.0, ADDS=False, AGAIN=True, SCALING=int(scaling))


def add_rms_norm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    scaling: int,
    *,
    stream: torch.Tensor,
    normed: torch.Tensor,
    roots: torch.Tensor,
) -> None:
    """Write the sum of two tensors of contiguous rows (T, H), its RMSNorm and the inverse roots (T,)."""
    tensors = branch, residual, scale, stream, normed, roots
    _launch(tensors, eps, ADDS=True, AGAIN=False, SCALING=int(scaling))


def _launch(tensors: Sequence[torch.Tensor], eps: float, **switches: int) -> None:
    rows, columns = tensors[0].shape
    block = triton.next_power_of_2(columns)
    norm_row[(rows,)](*tensors, columns, eps, BLOCK=block, num_warps=warps_of(block), **switches)


def rms_norm_backward(
    of_normed: torch.Tensor,
    of_stream: torch.Tensor | None,
    stream: torch.Tensor,
    scale: torch.Tensor,
    roots: torch.Tensor,
    scaling: int,
    *,
    into: torch.Tensor,
    into_branch: torch.Tensor | None,
    sums: torch.Tensor | None,
    programs: int,
) -> None:
    """Write the gradients of the residual stream and of the sublayer's output (T, H). Each Triton program
    also writes one row of `sums`, its partial sum of the scale's gradient.
    """
    rows, columns = stream.shape
    block = triton.next_power_of_2(columns)
    norm_rows_backward[(programs,)](
        # Pointers that the kernel does not use must still be valid arguments.
        of_normed, stream if of_stream is None else of_stream, stream, scale, roots, into,
        into if into_branch is None else into_branch, roots if sums is None else sums, rows, columns,
        ADDS=of_stream is not None, TWICE=into_branch is not None, SCALES=sums is not None,
        SCALING=int(scaling), BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def warps_of(block: int) -> int:
    """Return the number of warps for a row, with about eight elements for each thread."""
    return min(max(block // 256, 1), 16)
