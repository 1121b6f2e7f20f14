"""Dropout, residual and LayerNorm in one kernel: y = norm(residual + dropout(x + bias)), forward and
backward.

The same kernel serves a model's embeddings. There the residual may have fewer rows, which repeat (positions),
and dropout may come last: y = dropout(norm(x + residual)).

Under autocast the result has autocast's dtype, where torch's norm would return fp32. That suffices for matrix
products, but the next residual would be rounded again in each layer. So `gives_stream` returns the result a
second time in fp32, for the next residual.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from snugfit.features.kernels.operations.column_sums import add_partials, empty_partials
from snugfit.features.kernels.operations.operators import activation_dtype, define, has_kernel
from snugfit.features.kernels.operations.philox import keep_mask, scale, threshold
from snugfit.features.kernels.operations.seeds import SEED_ATTRIBUTE

TILE = 4096
"""Number of elements that one program of the backward kernel processes at a time (chosen)."""

add_norm_forward = define(
    "add_norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor shift, Tensor? bias, Tensor? seed, "
    "int site, int drops, bool drops_last, float eps, *, Tensor(a!) y, Tensor(b!)? stream, "
    "Tensor(c!)? total, Tensor(d!) statistics) -> ()",
    "add_norm",
)

add_norm_backward = define(
    "add_norm_backward(Tensor dy, Tensor? dstream, Tensor? dtotal, Tensor total, Tensor statistics, "
    "Tensor weight, Tensor? seed, int site, int drops, bool drops_last, *, Tensor(a!) dresidual, "
    "Tensor(b!)? dx, Tensor(c!)? partials) -> ()",
    "add_norm",
)


class AddNormSettings(NamedTuple):
    """Settings of one fused addition and norm (`add_norm`)."""

    eps: float
    drops: int = 0
    """Number of the 65,536 equally likely draws with which dropout drops an element."""
    site: int = 0
    drops_last: bool = False
    gives_sum: bool = False
    gives_stream: bool = False
    dtype: torch.dtype = torch.float32
    """Dtype of the normed result and of the sum."""


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.nn.LayerNorm,
    *,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    site: int = 0,
    drops_last: bool = False,
    gives_sum: bool = False,
    gives_stream: bool = False,
) -> Any:
    """Return the norm of `residual` plus `x` with its `bias`, in autocast's dtype or that of `x`: (..., H).

    `dropout` is a probability; its mask follows from `seed` (one int64) and the number of the call site.
    `drops_last` drops elements of the result instead. `x` is (..., H). `residual` is as large, or has the
    last dimensions of `x`, and repeats; with None only `x` is normed. `gives_sum` returns the result and the
    sum before the norm. `gives_stream` returns the result and the same in fp32 or wider, which may be used
    for the next residual only.
    """
    # Without a seed there is no dropout, as in evaluation.
    drops = threshold(dropout) if seed is not None else 0
    form = AddNormSettings(norm.eps, drops, site, drops_last, gives_sum, gives_stream, activation_dtype(x))
    return AddNorm.apply(  # type: ignore[no-untyped-call]
        x, residual, norm.weight, norm.bias, bias, seed if drops else None, form
    )


class OutputGradients(NamedTuple):
    """Incoming gradients of a backward pass of `AddNorm`, one for each output."""

    of_result: torch.Tensor  # (..., H)
    of_stream: torch.Tensor | None  # (..., H)
    of_sum: torch.Tensor | None  # (..., H)


class NeededGradients(NamedTuple):
    """Gradients that a backward pass of `AddNorm` has to compute, as flags."""

    residual_dtype: torch.dtype
    x_dtype: torch.dtype
    has_bias: bool
    has_sums: bool
    """True if the norm's weights or the bias are trained, so that column sums are needed."""


class AddNorm(torch.autograd.Function):
    """Autograd function of `add_norm`: kernels on a GPU, plain torch elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        shift: torch.Tensor,
        bias: torch.Tensor | None,
        seed: torch.Tensor | None,
        form: AddNormSettings,
    ) -> Any:
        """Return the norm, and if requested the sum or the fp32 stream."""
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        if has_kernel(x):
            y = torch.empty_like(x, dtype=form.dtype)
            stream = _empty_stream(y) if form.gives_stream else None
            # If nothing is added or dropped, the sum equals the input.
            alone = residual is None and bias is None and (seed is None or form.drops_last)
            total = None if alone and x.dtype is form.dtype else torch.empty_like(y)
            # Mean and inverse deviation of each row in fp32, from the sum before it is rounded.
            statistics = x.new_empty((2, x.numel() // x.size(-1)), dtype=torch.float32)
            add_norm_forward(
                x, residual, weight, shift, bias, seed, form.site, form.drops, form.drops_last, form.eps,
                y=y, stream=stream, total=total, statistics=statistics,
            )  # fmt: skip
            total = x if total is None else total
        else:
            y, stream, total, statistics = forward_in_torch(x, residual, weight, shift, bias, seed, form)
        # Missing gradients stay None, so that no kernel reads zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, statistics, weight)
        # The next operation finds the seed at this node of the autograd graph (`seeds.py`).
        setattr(ctx, SEED_ATTRIBUTE, seed)
        ctx.form, ctx.x_dtype = form, x.dtype
        ctx.residual = None if residual is None else (residual.shape, residual.dtype)
        if form.gives_stream:
            # Without a wider tensor, the result itself is the residual stream. autograd needs two tensors.
            return y, y.detach() if stream is None else stream
        return (y, total) if form.gives_sum else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, other: torch.Tensor | None = None) -> Any:
        """Return the gradients of `x`, the residual, the norm's weights and the bias."""
        total, statistics, weight = ctx.saved_tensors
        seed, form = getattr(ctx, SEED_ATTRIBUTE), ctx.form
        # Only the residual stream was used, so its gradient is the whole gradient.
        if dy is None and form.gives_stream:
            dy, other = other, None
        slopes = OutputGradients(
            # The kernel needs a gradient of the result, even if only the sum was used.
            torch.zeros_like(total) if dy is None else dy.contiguous(),
            other.contiguous() if other is not None and form.gives_stream else None,
            other.contiguous() if other is not None and form.gives_sum else None,
        )
        needs = ctx.needs_input_grad
        run = _backward_by_kernel if has_kernel(total) else backward_in_torch
        residual_dtype = ctx.x_dtype if ctx.residual is None else ctx.residual[1]
        kinds = NeededGradients(residual_dtype, ctx.x_dtype, has_bias=needs[4], has_sums=any(needs[2:5]))
        slope, dx, sums = run(slopes, total, statistics, weight, seed, form, kinds)
        dresidual = None
        if needs[1]:
            shape, dtype = ctx.residual
            # A residual with fewer rows is repeated over the batch.
            dresidual = repeated_sum(slope, shape, dtype)
        dweight, dshift, dbias = (*sums, None)[:3] if sums is not None else (None, None, None)
        return dx if needs[0] else None, dresidual, dweight, dshift, dbias, None, None


def _empty_stream(y: torch.Tensor) -> torch.Tensor | None:
    """Return an empty fp32 tensor for the residual stream (see `gives_stream`); None if the result has 32
    bits or more.
    """
    return torch.empty_like(y, dtype=torch.float32) if y.element_size() < 4 else None


def _backward_by_kernel(
    slopes: OutputGradients,
    total: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor,
    seed: torch.Tensor | None,
    form: AddNormSettings,
    kinds: NeededGradients,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    drops_first = seed is not None and not form.drops_last
    # One tensor is both gradients, unless dropout or a dtype makes them different.
    has_own_slope = drops_first or kinds.residual_dtype is not kinds.x_dtype
    dresidual = torch.empty_like(total, dtype=kinds.residual_dtype)
    dx = torch.empty_like(total, dtype=kinds.x_dtype) if has_own_slope else None
    partials = None
    if kinds.has_sums:
        partials = empty_partials(total, 3 if kinds.has_bias else 2, rows_at_once(total.size(-1)))
    add_norm_backward(
        *slopes, total, statistics, weight, seed, form.site, form.drops, form.drops_last,
        dresidual=dresidual, dx=dx, partials=partials,
    )  # fmt: skip
    sums = None if partials is None else add_partials(partials, weight.dtype)
    return dresidual, dresidual if dx is None else dx, sums


def rows_at_once(columns: int) -> int:
    """Return the number of rows with this many columns that fit into one tile of the backward kernel."""
    # A tile consists of whole rows, whose width is rounded up to a power of two.
    return max(1, TILE // (1 << max(columns - 1, 1).bit_length()))


def repeated_sum(gradient: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of a tensor that repeats along the first dimensions: (..., H) summed to this
    shape."""
    if gradient.shape == shape:
        return gradient.to(dtype)
    return gradient.view(-1, *shape).sum(0, dtype=dtype)


# ---- plain torch -----------------------------------------------------------------------------------------


# Half precision is computed in fp32. fp64 stays fp64 for exact tests.
def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _mask(seed: torch.Tensor, form: AddNormSettings, like: torch.Tensor) -> torch.Tensor:
    """Return dropout's factors (rows, columns): zero for dropped elements, the scale for others."""
    rows, columns = like.shape
    return keep_mask(seed, form.site, rows, columns, form.drops).to(like.dtype) * scale(form.drops)


def forward_in_torch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    shift: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    form: AddNormSettings,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Compute the forward pass in plain torch: the norm, the stream, the sum, and statistics (2, rows): means
    and inverse deviations.

    The first three are shaped as `x`. The stream is None where it is the result.
    """
    wide, columns = _wide(x.dtype), x.size(-1)
    value = x.reshape(-1, columns).to(wide)
    value = value if bias is None else value + bias.to(wide)
    if seed is not None and not form.drops_last:
        value = value * _mask(seed, form, value)
    if residual is not None:
        other = residual.reshape(-1, columns).to(wide)
        value = value + other.repeat(value.size(0) // other.size(0), 1)
    total = value.to(form.dtype).view(x.shape)
    mean = value.mean(1, keepdim=True)
    inverse = ((value - mean).square().mean(1, keepdim=True) + form.eps).rsqrt()
    y = (value - mean) * inverse * weight.to(wide) + shift.to(wide)
    if seed is not None and form.drops_last:
        y = y * _mask(seed, form, y)
    y = y.view(x.shape)
    stream = y if form.gives_stream and y.dtype is not form.dtype else None
    return y.to(form.dtype), stream, total, torch.cat([mean, inverse], 1).t().contiguous()


def backward_in_torch(
    slopes: OutputGradients,
    total: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor,
    seed: torch.Tensor | None,
    form: AddNormSettings,
    kinds: NeededGradients,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the backward pass in plain torch: gradients of the residual, of `x`, and of weight, shift and
    bias (2 or 3, columns).

    The first two have the shape of `x`. That of the residual is not yet summed where the residual repeats.
    """
    wide, columns = _wide(total.dtype), total.size(-1)
    mean, inverse = statistics.to(wide).unsqueeze(-1)
    slope, value = (tensor.reshape(-1, columns).to(wide) for tensor in (slopes.of_result, total))
    if slopes.of_stream is not None:
        slope = slope + slopes.of_stream.reshape(-1, columns).to(wide)
    if seed is not None and form.drops_last:
        slope = slope * _mask(seed, form, slope)
    normed = (value - mean) * inverse
    inner = slope * weight.to(wide)
    # Gradient through a norm: two means of the row are subtracted.
    shared = inner.mean(1, keepdim=True) + normed * (inner * normed).mean(1, keepdim=True)
    through = (inner - shared) * inverse
    if slopes.of_sum is not None:
        through = through + slopes.of_sum.reshape(-1, columns).to(wide)
    dx = through * _mask(seed, form, through) if seed is not None and not form.drops_last else through
    sums = None
    if kinds.has_sums:
        terms = [slope * normed, slope, dx][: 3 if kinds.has_bias else 2]
        sums = torch.stack([term.sum(0) for term in terms]).to(weight.dtype)
    shape = total.shape
    return through.to(kinds.residual_dtype).view(shape), dx.to(kinds.x_dtype).view(shape), sums
