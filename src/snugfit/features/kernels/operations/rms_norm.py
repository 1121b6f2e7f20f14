"""RMSNorm, with the addition of a residual before it: one kernel each for forward and backward, which saves
only the sum.

A decoder adds a branch's output to the stream of its tokens, and norms the sum for the next branch. The sum
is the next stream, so it is in memory anyway; beside it one number a row is saved.

Numbers are those of transformers' modules. Under autocast the stream stays in 32 bits, as there. The normed
tensor has the dtype of the products that take it, to which autocast would cast it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from snugfit.features.kernels.operations.column_sums import add_partials
from snugfit.features.kernels.operations.operators import define, has_kernel
from snugfit.features.kernels.operations.scaling import Scaling

PROGRAMS = 528
"""Number of kernel programs in a backward pass (chosen): four for each multiprocessor of an H100 or H200.
Each writes one row of partial sums.
"""

_SOURCE = "normed_from"
"""Name of a normed tensor's attribute that holds the `Source` from which it can be computed again."""

_RMS_NORM_AGAIN = define(
    "rms_norm_again(Tensor stream, Tensor scale, Tensor roots, int scaling, *, Tensor(a!) normed) -> ()",
    "rms_norm",
)
_RMS_NORM = define(
    "rms_norm(Tensor stream, Tensor scale, float eps, int scaling, *, Tensor(a!) normed, Tensor(b!) roots) "
    "-> ()",
    "rms_norm",
)
_ADD_RMS_NORM = define(
    "add_rms_norm(Tensor branch, Tensor residual, Tensor scale, float eps, int scaling, *, Tensor(a!) "
    "stream, Tensor(b!) normed, Tensor(c!) roots) -> ()",
    "rms_norm",
)
_RMS_NORM_BACKWARD = define(
    "rms_norm_backward(Tensor of_normed, Tensor? of_stream, Tensor stream, Tensor scale, Tensor roots, bool "
    "scaling, *, Tensor(a!) into, Tensor(b!)? into_branch, Tensor(c!)? sums, int programs) -> ()",
    "rms_norm",
)


class Source(NamedTuple):
    """Saved tensors and settings from which a backward pass recomputes an RMSNorm's output."""

    stream: torch.Tensor  # (..., H)
    scale: torch.Tensor  # (H,)
    roots: torch.Tensor  # (T,)
    scaling: int


def add_rms_norm(
    branch: torch.Tensor,
    residual: torch.Tensor | None,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    scaling: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual stream (residual + branch), and its norm in `dtype`, both (..., H).

    Without a residual the branch is the stream. The normed tensor carries its `Source`.
    """
    stream, normed, roots = AddRMSNorm.apply(  # type: ignore[no-untyped-call]
        branch, residual, scale, eps, dtype, scaling
    )
    # The next product saves the source instead of the normed tensor.
    setattr(normed, _SOURCE, Source(stream, scale, roots, scaling))
    return stream, normed


def rows_to_keep(hidden: torch.Tensor, rows: torch.Tensor, *, needs_it: bool) -> Sequence[Any]:
    """Return the tensors that a linear layer saves, from which the gradient of its weight is computed.

    They are the source of its input, or the input's rows (T, H); nothing where no weight needs a gradient.
    """
    source: Source | None = getattr(hidden, _SOURCE, None)
    if not needs_it:
        return (None,) * 4
    # Without a source, another module computed the input, and it is saved itself.
    return (rows, None, None, None) if source is None else source


def rows_again(source: Sequence[torch.Tensor], scaling: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the input rows (T, H) of a linear layer in its backward pass, recomputed from its saved tensors.

    `scaling` is a number of `Scaling`; None means that the rows themselves were saved.
    """
    if scaling is None:
        return source[0]
    stream, scale, roots = source
    stream = _rows(stream)
    if not has_kernel(stream):
        return _scale_rows(stream, scale, roots, scaling, dtype)
    # Norming again costs one read and one write, and saves memory.
    normed = torch.empty_like(stream, dtype=dtype)
    _RMS_NORM_AGAIN(stream, scale, roots, scaling, normed=normed)
    return normed


class AddRMSNorm(torch.autograd.Function):
    """Autograd function of `add_rms_norm`: its backward pass returns one gradient for both summands."""

    @staticmethod
    def forward(
        ctx: Any,
        branch: torch.Tensor,
        residual: torch.Tensor | None,
        scale: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        scaling: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the residual stream, its norm, and the inverse root of each row's mean square; save the
        first and last.
        """
        rows = _rows(branch)
        if residual is None:
            stream = branch
            normed, roots = _norm(rows, scale, eps, dtype, scaling)
        else:
            summed, normed, roots = _add_and_norm(rows, _rows(residual), scale, eps, dtype, scaling)
            stream = summed.view(branch.shape)
        ctx.save_for_backward(stream, scale, roots)
        ctx.scaling, ctx.branch_dtype = scaling, branch.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        # Missing gradients stay None, so that the kernel reads no zeros.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(roots)
        return stream, normed.view(branch.shape), roots

    @staticmethod
    def backward(
        ctx: Any, of_stream: torch.Tensor | None, of_normed: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of branch, residual and scale, by one kernel and a sum over its programs."""
        stream, scale, roots = ctx.saved_tensors
        of_scale = None
        gradient, of_branch = of_stream, None
        # If no branch used the normed tensor, the stream's gradient passes through unchanged.
        if of_normed is not None:
            gradient, of_branch, of_scale = _norm_backward(
                _rows(of_normed), None if of_stream is None else _rows(of_stream), _rows(stream), scale,
                roots, ctx.scaling, ctx.branch_dtype, ctx.needs_input_grad[2],
            )  # fmt: skip
            gradient = gradient.view(stream.shape)
        if gradient is None:
            return (None,) * 6
        of_residual = None if ctx.residual_dtype is None else gradient.to(ctx.residual_dtype)
        # The kernel rounds the gradient of a 16-bit branch once.
        of_branch = gradient.to(ctx.branch_dtype) if of_branch is None else of_branch.view(stream.shape)
        return of_branch, of_residual, of_scale, None, None, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.size(-1)).contiguous()


# ---- one operator each way ------------------------------------------------------------------------------


def _norm(
    stream: torch.Tensor, scale: torch.Tensor, eps: float, dtype: torch.dtype, scaling: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of rows (T, H) in `dtype`, and the inverse roots (T,) of their mean squares."""
    if has_kernel(stream):
        normed = torch.empty_like(stream, dtype=dtype)
        roots = stream.new_empty(len(stream), dtype=torch.float32)
        _RMS_NORM(stream, scale, eps, scaling, normed=normed, roots=roots)
        return normed, roots
    return reference(stream, scale, eps, dtype, scaling)


def _add_and_norm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    scaling: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of two tensors of rows (T, H), its norm and the inverse roots (T,)."""
    if has_kernel(branch):
        # Under autocast, the residual stream stays in fp32 while branches have 16 bits.
        stream = torch.empty_like(branch, dtype=torch.promote_types(branch.dtype, residual.dtype))
        normed = torch.empty_like(branch, dtype=dtype)
        roots = branch.new_empty(len(branch), dtype=torch.float32)
        _ADD_RMS_NORM(branch, residual, scale, eps, scaling, stream=stream, normed=normed, roots=roots)
        return stream, normed, roots
    stream = residual + branch
    return stream, *reference(stream, scale, eps, dtype, scaling)


def _norm_backward(
    of_normed: torch.Tensor,
    of_stream: torch.Tensor | None,
    stream: torch.Tensor,
    scale: torch.Tensor,
    roots: torch.Tensor,
    scaling: int,
    branch_dtype: torch.dtype,
    scales: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute RMSNorm's backward pass: the gradients of the residual stream, of the sublayer's output if its
    dtype differs, and of the scale if requested.
    """
    if not has_kernel(stream):
        gradient, of_scale = reference_backward(of_normed, of_stream, stream, scale, roots, scaling)
        return gradient, None, of_scale if scales else None
    programs = min(len(stream), PROGRAMS)
    into = torch.empty_like(stream)
    # A second result is written only if the first would be cast afterwards.
    into_branch = None if branch_dtype == stream.dtype else torch.empty_like(stream, dtype=branch_dtype)
    sums = stream.new_empty((programs, stream.size(1)), dtype=torch.float32) if scales else None
    _RMS_NORM_BACKWARD(
        of_normed, of_stream, stream, scale, roots, scaling, into=into, into_branch=into_branch, sums=sums,
        programs=programs,
    )  # fmt: skip
    return into, into_branch, None if sums is None else add_partials(sums[None], scale.dtype)[0]


def reference(
    stream: torch.Tensor, scale: torch.Tensor, eps: float, dtype: torch.dtype, scaling: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of rows (T, H) and their inverse roots (T,), in plain torch."""
    wide = torch.promote_types(stream.dtype, torch.float32)
    roots = torch.rsqrt(stream.to(wide).square().mean(-1) + eps)
    return _scale_rows(stream, scale, roots, scaling, dtype), roots


def _scale_rows(
    stream: torch.Tensor, scale: torch.Tensor, roots: torch.Tensor, scaling: int, dtype: torch.dtype
) -> torch.Tensor:
    wide = roots.dtype
    value = stream.to(wide) * roots[:, None]
    if scaling == Scaling.ROUNDED:
        value = value.to(stream.dtype).to(wide)
    return (value * _factor(scale, wide, scaling)).to(dtype)


def _factor(scale: torch.Tensor, dtype: torch.dtype, scaling: int) -> torch.Tensor:
    """Return the factor (H,) of normed values."""
    return 1.0 + scale.to(dtype) if scaling == Scaling.FROM_ONE else scale.to(dtype)


def reference_backward(
    of_normed: torch.Tensor,
    of_stream: torch.Tensor | None,
    stream: torch.Tensor,
    scale: torch.Tensor,
    roots: torch.Tensor,
    scaling: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of residual stream (T, H) and scale (H,), in plain torch."""
    wide = roots.dtype
    value = stream.to(wide) * roots[:, None]
    slope = of_normed.to(wide)
    of_scale = (slope * value).sum(0).to(scale.dtype)
    slope = slope * _factor(scale, wide, scaling)
    slope = (slope - value * (slope * value).mean(-1, keepdim=True)) * roots[:, None]
    return (slope if of_stream is None else slope + of_stream.to(wide)).to(stream.dtype), of_scale
