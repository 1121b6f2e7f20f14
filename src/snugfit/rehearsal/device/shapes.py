"""Shape functions for operators whose `meta` implementation differs between builds of torch, or rejects a
GPU's operands.

A simulation must give the same result on every build of torch, with CUDA or without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty tensor for the result of `_grouped_mm`, with rows padded to 16 bytes.

    The source is `create_grouped_gemm_output_tensor` in `native/GroupedMMUtils.h`. `first` is (M, K) or (G,
    M, K), `second` (K, N) or (G, K, N). If one of them has no group dimension, `offs` has the ends of the G
    groups.
    """
    dtype = out_dtype or first.dtype
    columns = second.size(-1)
    if first.dim() == second.dim():
        groups = first.size(0) if first.dim() == 3 else _groups(offs)
        shape = [groups, first.size(-2), columns]
    else:
        shape = [first.size(-2), columns]
    # A CUDA build pads the rows, a CPU build does not; torch 2.11 rejects dtypes of CUDA's fallback.
    align = 16 // dtype.itemsize
    padded = -(-columns // align) * align
    stride = [padded, 1] if len(shape) == 2 else [shape[1] * padded, padded, 1]
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _groups(offs: torch.Tensor | None) -> int:
    return offs.size(0) if offs is not None else 1


def fused_rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for the result of RMS norm and one number per row for backward (fp32 for half
    precision).
    """
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    # The kernel computes statistics in fp32 (`_fused_rms_norm_cuda`); elsewhere torch composes the norm.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=wide)


def fused_rms_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    needs_grad: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return empty tensors for the requested gradients of RMS norm's input and weight."""
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_grad[0] else None
    return of_x, torch.empty_like(weight) if needs_grad[1] and weight is not None else None


def ctc_loss_backward(gradient: torch.Tensor, log_probs: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return an empty tensor for the gradient of CTC loss, in the shape of the log-probabilities
    (`native/LossCTC.cpp`).
    """
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def softmax_backward(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """Return an empty tensor for the gradient of softmax's input, always contiguous
    (`native/cuda/SoftMax.cu`).
    """
    return torch.empty_like(gradient, dtype=input_dtype, memory_format=torch.contiguous_format)


def shrunk_loss(first: torch.Tensor, second: torch.Tensor, reduction: int = 1, *_: Any) -> torch.Tensor:
    """Return an empty tensor for the result of a loss. It has all elements, or one number in a buffer of
    their size.

    The sources are `TORCH_META_FUNC(mse_loss)` and `(smooth_l1_loss)` in `native/BinaryOps.cpp`.
    """
    shape, dtype = torch.broadcast_shapes(first.shape, second.shape), torch.result_type(first, second)
    elements = torch.empty(shape, dtype=dtype, device="meta")
    # torch stores one number in a buffer of all elements, which its own shape functions for `meta` hide.
    return elements.resize_(()) if reduction else elements


def binary_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1
) -> torch.Tensor:
    """Return an empty tensor for the loss: the input's shape, or one number in a buffer of that size
    (`native/Loss.cpp` and `native/cuda/Loss.cu`).
    """
    return shrunk_loss(x, x, reduction)


def batch_norm(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors for the result of batch norm and its statistics.

    The result of sequences (B, C, S) is contiguous, also for a transposed input (`batch_norm_cpu` in
    `native/Normalization.cpp`; cuDNN takes a contiguous input).
    """
    out, mean, rstd = torch.ops.aten.native_batch_norm.default(x, *others)
    return _contiguous_if_sequences(out), mean, rstd


def batch_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, *others: Any
) -> Sequence[torch.Tensor | None]:
    """Return empty tensors for the gradients of batch norm's input, weight and bias, as in `batch_norm`."""
    of_x, *rest = torch.ops.aten.native_batch_norm_backward.default(gradient, x, *others)
    return (_contiguous_if_sequences(of_x), *rest)


def _contiguous_if_sequences(tensor: torch.Tensor) -> torch.Tensor:
    is_sequence = tensor.dim() == 3
    return torch.empty_like(tensor, memory_format=torch.contiguous_format) if is_sequence else tensor


def margin_backward(gradient: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty tensor for the gradient of a margin loss with respect to its input
    (`native/cuda/MultiMarginLoss.cu` and `MultiLabelMarginCriterion.cu`).
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def layout_of_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return the memory layout of a convolution's results. Input and weight alone determine it
    (`determine_backend_memory_format`, `native/Convolution.cpp`).
    """
    layouts = [torch._prims_common.suggest_memory_format(operand) for operand in (x, weight)]
    return layouts[0] if layouts[0] is not torch.contiguous_format else layouts[1]


def convolution(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return an empty tensor for the result of a convolution. On `meta`, its channels are never the last
    dimension in memory.
    """
    out = torch.ops.aten.convolution.default(x, weight, *others)
    return torch.empty_like(out, memory_format=layout_of_convolution(x, weight))


def convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    *options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Return empty tensors for the requested gradients of a convolution's input, weight and bias."""
    # Releases differ in this memory layout. Accumulation copies a gradient whose layout differs from its
    # weight's.
    layout = layout_of_convolution(x, weight)

    def like(operand: torch.Tensor) -> torch.Tensor:
        return torch.empty(operand.shape, dtype=gradient.dtype, device="meta", memory_format=layout)

    of_x, of_weight, of_bias = options[-1]  # the last argument: the requested gradients
    return (
        like(x) if of_x else None,
        like(weight) if of_weight else None,
        gradient.new_empty(bias_sizes or ()) if of_bias else None,
    )


def addmm_in(
    added: torch.Tensor, first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype, **_: Any
) -> torch.Tensor:
    """Return an empty tensor for a 16-bit matrix product plus an fp32 matrix, in `dtype`
    (`_addmm_dtype_cuda`, `native/cuda/Blas.cpp`).
    """
    # torch 2.11 confuses the precision argument with a factor.
    return torch.empty(first.size(0), second.size(1), dtype=dtype, device="meta")


def addmm_in_place(*operands: Any, out: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return `out`, the tensor into which a compiled `addmm` writes its result."""
    return out


def scaled_mm_in_place(*operands: Any, out: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Return `out`, into which a compiled program's product of 8-bit floats writes; `meta` does not support
    it."""
    return out


SHAPE_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: grouped_mm,
    torch.ops.aten._fused_rms_norm.default: fused_rms_norm,
    torch.ops.aten._fused_rms_norm_backward.default: fused_rms_norm_backward,
    torch.ops.aten._ctc_loss_backward.Tensor: ctc_loss_backward,
    torch.ops.aten._log_softmax_backward_data.default: softmax_backward,
    torch.ops.aten._softmax_backward_data.default: softmax_backward,
    torch.ops.aten.native_batch_norm.default: batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: batch_norm_backward,
    torch.ops.aten.mse_loss.default: shrunk_loss,
    torch.ops.aten.smooth_l1_loss.default: shrunk_loss,
    torch.ops.aten.soft_margin_loss.default: shrunk_loss,
    torch.ops.aten.binary_cross_entropy.default: binary_cross_entropy,
    torch.ops.aten.multi_margin_loss_backward.default: margin_backward,
    torch.ops.aten.multilabel_margin_loss_backward.default: margin_backward,
    torch.ops.aten.convolution.default: convolution,
    torch.ops.aten.convolution_backward.default: convolution_backward,
    torch.ops.aten.addmm.dtype: addmm_in,
    torch.ops.aten.addmm.dtype_out: addmm_in_place,
    torch.ops.aten._scaled_mm.out: scaled_mm_in_place,
}
"""Functions that compute an operator's output shapes, by operator."""
