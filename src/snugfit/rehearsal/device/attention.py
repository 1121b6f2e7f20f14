"""Which attention kernel `scaled_dot_product_attention` runs, decided as torch decides it.

The choice decides the memory of attention: the math path materialises S x S scores, the others do not, and
each fused kernel has its own saved tensors and workspaces. torch asks the device; here the device is a
policy. The conditions are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (torch 2.11 to
2.13), for dense tensors: order flash, efficient, math, with cuDNN first on sm_90 and sm_100 when its
version is above 9.15.0. Observed on an H200 (torch 2.11) beside the sources: operands whose last stride is
not 1 ran in math (the bias that T5's layers compute is one), and a mask that learns ran in efficient (the
contiguous zeros of T5's attention across, under checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

HALVES = ("torch.float16", "torch.bfloat16")

MASK_IN = 8
"""Elements of which a row of efficient attention's mask, and every other stride of it, is a multiple."""


@dataclass(frozen=True)
class Operands:
    """The arguments of `scaled_dot_product_attention`."""

    query: torch.Tensor
    """(B, H, S, D)."""

    key: torch.Tensor
    """(B, H, S, D): D as the query's, H and S of its own."""

    value: torch.Tensor
    """(B, H, S, D): lengths and heads as the key's, D of its own."""

    mask: torch.Tensor | None = None
    """What is added to the scores, or, of booleans, which scores count."""

    dropout: float = 0.0
    """The chance at which a score is dropped."""

    causal: bool = False
    """Whether nothing looks ahead."""

    scale: float | None = None
    """What scores are multiplied by; None is 1 / sqrt(D)."""

    grouped: bool = False
    """Whether each head of key and value serves several of the query."""

    needs_grad: bool = False
    """Whether a backward pass may follow."""


class FusedKernels(NamedTuple):
    """Which fused kernels of attention a GPU may choose from; `efficient` is everywhere."""

    cudnn: bool
    """Whether cuDNN's goes first."""
    flash: bool
    """Whether flash attention runs."""
    efficient_bf16: bool
    """Whether efficient attention runs in bfloat16."""


def kernels_on_cuda(capability: tuple[int, int]) -> FusedKernels:
    """The kernels of a GPU of this capability, with a cuDNN after 9.15: below, torch does not prefer it."""
    return FusedKernels(
        cudnn=capability in ((9, 0), (10, 0)),
        flash=(8, 0) <= capability <= (12, 1),
        efficient_bf16=capability >= (8, 0),
    )


def choose_on_cuda(of: Operands, fused: FusedKernels) -> str:
    """`cudnn`, `flash`, `efficient` or `math`, on a GPU that has these kernels."""
    query, mask = of.query, of.mask
    half = str(query.dtype) in HALVES
    width, value_width = query.size(-1), of.value.size(-1)
    mask_learns = mask is not None and mask.requires_grad
    strided = any(operand.stride(-1) != 1 for operand in (query, of.key, of.value))
    if mask is not None and mask.stride(-1) != 1 and mask.size(-1) != 1:
        strided = True
    if strided:
        return "math"
    if (
        fused.cudnn
        and half
        and not mask_learns
        and width == value_width
        and width % 8 == 0
        and width <= (128 if of.needs_grad else 256)
    ):
        return "cudnn"
    if mask is None and half and fused.flash and width == value_width and width <= 256:
        return "flash"
    aligned = 8 if half else 4
    if (
        (str(query.dtype) != "torch.bfloat16" or fused.efficient_bf16)
        and str(query.dtype) != "torch.float64"
        and width % aligned == 0
        and value_width % aligned == 0
        and not of.grouped
    ):
        return "efficient"
    return "math"


def choose_on_cpu(of: Operands) -> str:
    """`flash_for_cpu` or `math`: `native/transformers/sdp_utils_cpp.cpp`, dense operands."""
    if of.dropout > 0 or of.query.dim() != 4 or (of.mask is not None and of.mask.requires_grad):
        return "math"
    return "flash_for_cpu"


def run_kernel(choice: str, of: Operands) -> torch.Tensor:
    """The concrete operator that torch calls for this choice, with the tensors it saves for backward."""
    out: torch.Tensor = _RUNNERS[choice](of)
    return out


def _flash(of: Operands) -> Any:
    import torch

    q, k, v, scale = of.query, of.key, of.value, of.scale
    width = q.size(-1)
    padding = -width % 8  # flash wants a head width that is a multiple of 8
    if padding:
        q, k, v = (torch.constant_pad_nd(operand, (0, padding)) for operand in (q, k, v))
        scale = scale if scale is not None else float(width) ** -0.5
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out = operator(q, k, v, of.dropout, of.causal, False, scale=scale)[0]
    return out[..., :width] if padding else out


def _flash_for_cpu(of: Operands) -> Any:
    import torch

    bias = additive(of.mask, of.query.dtype)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(of.query, of.key, of.value, of.dropout, of.causal, attn_mask=bias, scale=of.scale)[0]


def _cudnn(of: Operands) -> Any:
    import torch

    bias = _expand(additive(of.mask, of.query.dtype), of.query, of.key)
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    return operator(
        of.query, of.key, of.value, bias, of.needs_grad, of.dropout, of.causal, False, scale=of.scale
    )[0]


def _efficient(of: Operands) -> Any:
    import torch

    bias = additive(of.mask, of.query.dtype)
    if bias is not None and not _is_aligned(bias):
        columns = bias.size(-1)
        bias = torch.constant_pad_nd(bias, (0, MASK_IN - columns % MASK_IN))[..., :columns]
    bias = _expand(bias, of.query, of.key)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(of.query, of.key, of.value, bias, of.needs_grad, of.dropout, of.causal, scale=of.scale)[0]


def _is_aligned(mask: torch.Tensor) -> bool:
    """Whether efficient attention takes this mask as it lies: `preprocess_mask`,
    `native/transformers/attention.cpp`. On an H200, one of 216 columns was taken, and its padding to 224 was
    the first difference between a history and a rehearsal that padded to sixteens."""
    return mask.stride(-1) == 1 and not any(stride % MASK_IN for stride in mask.stride()[:-1])


def _math(of: Operands) -> Any:
    """`_scaled_dot_product_attention_math`, written out because torch's own adds the mask out of place while
    a dispatch mode is active (`areAnyTensorSubclassLike`), one matrix of scores more than on a device."""
    import torch

    q, k, v, scale = of.query, of.key, of.value, of.scale
    dtype, bias = q.dtype, additive(of.mask, q.dtype)
    if str(dtype) in HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        q, k, v = (operand.to(torch.float32) for operand in (q, k, v))
    root = (abs(scale) if scale is not None else float(q.size(-1)) ** -0.5) ** 0.5
    scaled = q * (-root if scale is not None and scale < 0 else root)
    if of.causal:
        triangle = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
        bias = additive(triangle, q.dtype)
        del triangle
    if of.grouped:
        heads = q.size(-3)
        k, v = (operand.repeat_interleave(heads // operand.size(-3), -3) for operand in (k, v))
    scores = torch.matmul(scaled, k.transpose(-2, -1) * root)
    if bias is not None:
        scores.add_(bias)
    scores = torch.ops.aten._safe_softmax(scores, -1)
    if of.dropout > 0:
        scores = torch.dropout(scores, of.dropout, True)
    weights = scores.to(dtype)  # the second result, which C++ evaluates first
    out = torch.matmul(scores, v).to(dtype)
    del weights
    return out


_RUNNERS: dict[str, Callable[[Operands], Any]] = {
    "flash": _flash,
    "flash_for_cpu": _flash_for_cpu,
    "cudnn": _cudnn,
    "efficient": _efficient,
    "math": _math,
}


def additive(mask: Any, dtype: torch.dtype) -> Any:
    """A boolean mask as one that is added, in the query's dtype, chosen between two scalars on the device
    (`convert_boolean_attn_mask_`, `native/transformers/attention.cpp`)."""
    import torch

    if mask is None or mask.dtype != torch.bool:
        return mask
    hidden = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), hidden)


def _expand(mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    if mask is None:
        return None
    return mask.expand(query.size(0), query.size(1), query.size(-2), key.size(-2))
