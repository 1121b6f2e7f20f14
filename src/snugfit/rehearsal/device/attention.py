"""Run attention on `meta` with the kernel that torch would choose.

For `scaled_dot_product_attention`, `attention_choice.py` chooses the kernel. This module runs the operator
with the tensors that it saves for backward, or the math path with S x S scores. It also simulates compiled
`flex_attention`, by `torch/_inductor/kernel/flex/flex_attention.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.device.attention_choice import HALVES, Operands

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy

MASK_IN = 8
"""Alignment, in elements, that efficient attention requires of the strides of its mask, except the last
one."""


def run_kernel(choice: str, operands: Operands) -> torch.Tensor:
    """Run on `meta` the attention operator that torch calls for the chosen kernel (a result of
    `choose_on_cuda`).
    """
    out: torch.Tensor = _RUNNERS[choice](operands)
    return out


def attention_by(
    policy: Policy, note: Callable[[str], object] = str, *, trains: bool = False
) -> Callable[..., torch.Tensor]:
    """Return a replacement for `scaled_dot_product_attention`. It runs on `meta` the kernel that the
    simulated device would run.

    `note` is called with the name of each chosen kernel. With `trains`, a backward pass always follows, even
    if no operand requires a gradient.
    """
    import torch

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        # A compiled backward pass follows even if no operand requires a gradient.
        needs_grad = torch.is_grad_enabled() and any(operand.requires_grad for operand in (query, key, value))
        # Keys and values with as many heads as the query need no groups.
        grouped = enable_gqa and {query.size(-3)} != {key.size(-3), value.size(-3)}
        operands = Operands(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            grouped,
            needs_grad=trains or needs_grad,
        )
        choice = policy.choose_attention(operands)
        note(choice)
        return run_kernel(choice, operands)

    return scaled_dot_product_attention


def _flash(operands: Operands) -> Any:
    import torch

    q, k, v, scale = operands.query, operands.key, operands.value, operands.scale
    width = q.size(-1)
    padding = -width % 8  # flash requires a head width that is a multiple of 8
    if padding:
        q, k, v = (torch.constant_pad_nd(operand, (0, padding)) for operand in (q, k, v))
        # The default scale follows from the width before the padding.
        scale = scale if scale is not None else float(width) ** -0.5
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out = operator(q, k, v, operands.dropout, operands.causal, False, scale=scale)[0]
    return out[..., :width] if padding else out


def _flash_for_cpu(operands: Operands) -> Any:
    import torch

    bias = additive(operands.mask, operands.query.dtype)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(
        operands.query,
        operands.key,
        operands.value,
        operands.dropout,
        operands.causal,
        attn_mask=bias,
        scale=operands.scale,
    )[0]


def _cudnn(operands: Operands) -> Any:
    import torch

    bias = _expand(additive(operands.mask, operands.query.dtype), operands.query, operands.key)
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    return operator(
        operands.query,
        operands.key,
        operands.value,
        bias,
        operands.needs_grad,
        operands.dropout,
        operands.causal,
        False,
        scale=operands.scale,
    )[0]


def _efficient(operands: Operands) -> Any:
    import torch

    # The kernels accept additive masks only.
    bias = additive(operands.mask, operands.query.dtype)
    if bias is not None and not _is_aligned(bias):
        columns = bias.size(-1)
        # torch's `pad_bias` adds one more multiple if the width is a multiple already.
        bias = torch.constant_pad_nd(bias, (0, MASK_IN - columns % MASK_IN))[..., :columns]
    bias = _expand(bias, operands.query, operands.key)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    return operator(
        operands.query,
        operands.key,
        operands.value,
        bias,
        operands.needs_grad,
        operands.dropout,
        operands.causal,
        scale=operands.scale,
    )[0]


def _is_aligned(mask: torch.Tensor) -> bool:
    """Return True if efficient attention accepts this mask without a copy.

    The source is `preprocess_mask` in `native/transformers/attention.cpp`. On an H200, a mask of 216 columns
    was accepted. A simulation that padded to multiples of 16 had 224 columns, the first difference from the
    recorded allocations.
    """
    return mask.stride(-1) == 1 and not any(stride % MASK_IN for stride in mask.stride()[:-1])


def _math(operands: Operands) -> Any:
    """Simulate unfused attention (torch's math path), which stores the S x S scores, on `meta`. It repeats
    `_scaled_dot_product_attention_math`. While the recorder is active, torch's own code adds the mask out of
    place (`areAnyTensorSubclassLike`). That needs one matrix of scores more than on a device.
    """
    import torch

    q, k, v, scale = operands.query, operands.key, operands.value, operands.scale
    dtype, bias = q.dtype, additive(operands.mask, q.dtype)
    # torch computes half precision in fp32 here unless its switch allows otherwise, so the scores need twice
    # the bytes.
    if str(dtype) in HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        q, k, v = (operand.to(torch.float32) for operand in (q, k, v))
    # The root of the scale multiplies both operands, which keeps half precision from overflowing.
    root = (abs(scale) if scale is not None else float(q.size(-1)) ** -0.5) ** 0.5
    scaled = q * (-root if scale is not None and scale < 0 else root)
    if operands.causal:
        triangle = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
        bias = additive(triangle, q.dtype)
        # C++ frees the triangular mask before the product, so it must not live longer here.
        del triangle
    if operands.grouped:
        heads = q.size(-3)
        k, v = (operand.repeat_interleave(heads // operand.size(-3), -3) for operand in (k, v))
    scores = torch.matmul(scaled, k.transpose(-2, -1) * root)
    if bias is not None:
        # Under a second dispatch mode, torch adds out of place on a device too.
        scores = scores + bias if is_under_a_mode() else scores.add_(bias)
    scores = torch.ops.aten._safe_softmax(scores, -1)
    if operands.dropout > 0:
        scores = torch.dropout(scores, operands.dropout, True)
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
    """Return a boolean mask as an additive mask in the query's dtype.

    Its values are selected from two scalars on the device (`convert_boolean_attn_mask_`,
    `native/transformers/attention.cpp`).
    """
    import torch

    if mask is None or mask.dtype != torch.bool:
        return mask
    hidden = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), hidden)


RECORDING_MODES = 1
"""Number of dispatch modes (`TorchDispatchMode`) that a simulation itself activates.

This mode is the recorder. Another mode is active if host memory is simulated too
(`Feature.simulation_overrides`).
"""


def is_under_a_mode() -> bool:
    """Return True if the step itself runs under a dispatch mode besides the recorder.

    Layers with selective checkpointing do so. Then torch creates new tensors on a device too.
    """
    import torch

    return torch._C._len_torch_dispatch_stack() > RECORDING_MODES


def _expand(mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    if mask is None:
        return None
    return mask.expand(query.size(0), query.size(1), query.size(-2), key.size(-2))


# ---- flex attention --------------------------------------------------------------------------------------


def run_flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Simulate flex attention: return its output, log-sum-exp and largest score per row.

    The output has shape (B, H, S, D) with D of the value. The other two have shape (B, H, S).
    """
    import torch

    # The compiled kernel has no autocast of its own, so its operands are cast first.
    if torch.is_autocast_enabled("meta"):
        dtype = torch.get_autocast_dtype("meta")
        query, key, value = (operand.to(dtype) for operand in (query, key, value))
    out: tuple[torch.Tensor, ...] = _flex_function().apply(query, key, value)
    return out


@functools.cache
def _flex_function() -> Any:
    """Return an autograd function that simulates `flex_attention`'s kernels. It saves operands, output and
    log-sum-exp for backward.
    """
    import torch
    from torch.utils.flop_counter import register_flop_formula

    library = torch.library.Library("snugfit", "DEF")
    _LIBRARIES.append(library)
    library.define("flex_attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)")
    library.define(
        "flex_attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o, Tensor l, Tensor d)"
        " -> (Tensor, Tensor, Tensor)"
    )

    def shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        row = [query.new_empty(query.shape[:-1], dtype=torch.float32) for _ in range(2)]
        if value.size(-1) != query.size(-1):
            return query.new_empty((*query.shape[:-1], value.size(-1))), *row
        return torch.empty_like(query), *row

    def shapes_backward(gradient: torch.Tensor, *operands: torch.Tensor) -> Any:
        return tuple(torch.empty_like(operand) for operand in operands[:3])

    library.impl("flex_attention", shapes, "Meta")
    library.impl("flex_attention_backward", shapes_backward, "Meta")
    operators = torch.ops.snugfit

    def products(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        batch, heads, rows, width = query
        return int(2 * batch * heads * rows * key[2] * (width + value[3]))

    def products_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        batch, heads, rows, width = query
        return int(2 * batch * heads * rows * key[2] * (3 * width + 2 * value[3]))

    register_flop_formula(operators.flex_attention)(products)
    register_flop_formula(operators.flex_attention_backward)(products_backward)

    class FlexAttention(torch.autograd.Function):
        """Simulated forward and backward of `flex_attention` on `meta` tensors."""

        @staticmethod
        def forward(context: Any, query: Any, key: Any, value: Any) -> Any:
            """Return output and statistics per row; save everything except the largest scores for
            backward."""
            out, logsumexp, largest = operators.flex_attention(query, key, value)
            context.save_for_backward(query, key, value, out, logsumexp)
            context.mark_non_differentiable(logsumexp, largest)
            return out, logsumexp, largest

        @staticmethod
        def backward(context: Any, gradient: Any, *_: Any) -> Any:
            """Return the gradients of query, key and value; one number per row is allocated in addition."""
            query, key, value, out, logsumexp = context.saved_tensors
            delta = logsumexp.new_empty(logsumexp.shape)
            return operators.flex_attention_backward(gradient, query, key, value, out, logsumexp, delta)

    return FlexAttention


_LIBRARIES: list[Any] = []
"""The `torch.library` objects of the registered operators. The list keeps them alive, since operators vanish
with their library."""
