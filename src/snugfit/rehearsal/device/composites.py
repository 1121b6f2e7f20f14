"""Replace composite operators whose C++ code depends on the device, so that they run as on the simulated
device. torch implements dropout, attention, softmax and rms_norm as compositions that select a fused operator
by their input's device.

torch selects none for `meta`. The replacements call the operator that torch would call on the device of the
policy. So the same tensors are saved for backward. Sources:
`aten/src/ATen/native/{Dropout,SoftMax,layer_norm}.cpp` and `native/transformers/attention.cpp`, torch 2.13.

Other operators write in place on a device, and create new tensors while a dispatch mode such as the recorder
is active. torch composes them in this way so that tensor subclasses see every step (`isTensorSubclassLike`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.device import attention
from snugfit.rehearsal.device.autocast import KEY
from snugfit.rehearsal.device.policy import CudaPolicy

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.notes import PolicyNotes
    from snugfit.rehearsal.device.policy import Policy

RECURRENT_DOUBT = (
    "nn.LSTM, nn.GRU and nn.RNN are simulated step by step, but a GPU runs them in cuDNN. cuDNN's workspace "
    "and reserve are not simulated, so bytes and seconds are a guess: measure them with snugfit measure."
)


def composites(policy: Policy, notes: PolicyNotes) -> dict[str, Callable[..., Any]]:
    """Return replacement kernels for composite operators by operator name; they record chosen attention
    kernels and warnings in `notes`."""
    import torch

    aten = torch.ops.aten

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if train and 0 < p < 1 and input.numel():
            out: torch.Tensor = torch.native_dropout(input, p, train)[0]
            return out
        return input if p == 0 or not train or not input.numel() else input.mul(torch.zeros_like(input[:1]))

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if policy.softmax_saves_input and x.requires_grad and torch.is_grad_enabled():
            x = _keep_for_backward(x)
        return normalise(aten._softmax, x, dim, dtype)

    def log_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return normalise(aten._log_softmax, x, dim, dtype)

    def normalise(kernel: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        upcasts = policy.softmax_upcasts_fp16 and x.dtype == torch.float16 and dtype == torch.float32
        out: torch.Tensor = kernel(x if upcasts or dtype is None else x.to(dtype), dim, upcasts)
        return out

    table: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": attention.attention_by(policy, notes.attention.append),
        "softmax.int": softmax,
        "log_softmax.int": log_softmax,
        "one_hot": _one_hot,
        **_in_place_kernels(),
    }
    if policy.fuses_dropout:
        table["dropout"] = dropout
    if policy.fuses_rms_norm:
        table["rms_norm"] = _rms_norm
    if isinstance(policy, CudaPolicy):
        table |= _recurrent_kernels(notes)
    return table


def _in_place_kernels() -> dict[str, Callable[..., Any]]:
    """Return replacement kernels for operators that write in place on a device and not on `meta`, by operator
    name."""
    import torch

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradMeta)
    kernels = {"linear": _linear, "binary_cross_entropy_with_logits": _with_logits}
    return {
        name: kernel(torch.library.get_kernel(f"aten::{name}", KEY), keys) for name, kernel in kernels.items()
    }


def _recurrent_kernels(notes: PolicyNotes) -> dict[str, Callable[..., Any]]:
    """Return replacement kernels for LSTM, GRU and RNN by operator name. They run torch's step-by-step code
    and add a warning.
    """
    import torch

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradMeta)

    def with_doubt(plain: Any) -> Callable[..., Any]:
        def recurrent(*arguments: Any) -> Any:
            # Without cuDNN, a GPU runs torch's composition of operators too, so the prediction is exact.
            if torch.backends.cudnn.enabled:
                notes.doubt(RECURRENT_DOUBT)
            return plain.call_boxed(keys, *arguments)

        return recurrent

    layers = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    names = [f"{layer}.{form}" for layer in layers for form in ("input", "data")]
    return {name: with_doubt(torch.library.get_kernel(f"aten::{name}", KEY)) for name in names}


def _linear(plain: Any, keys: Any) -> Callable[..., Any]:
    import torch

    forward_mode: Any = torch.autograd.forward_ad

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # In these cases torch fuses the bias into the matrix product, or adds it out of place
        # (`native/Linear.cpp`).
        if bias is None or x.dim() == 2 or x.is_contiguous() or forward_mode._current_level >= 0:
            out: torch.Tensor = plain.call_boxed(keys, x, weight, bias)
            return out
        product = torch.matmul(x, weight.t())
        # On a device, the bias is added in place to the product of a non-contiguous input.
        return product + bias if attention.is_under_a_mode() else product.add_(bias)

    return linear


def _with_logits(plain: Any, keys: Any) -> Callable[..., Any]:
    import torch

    aten = torch.ops.aten

    class _CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
            ctx.save_for_backward(x, *others[:3])
            ctx.reduction = others[3]
            with torch._C._AutoDispatchBelowAutograd():
                return aten.binary_cross_entropy_with_logits(x, *others)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            # `FunctionsManual.cpp` computes the gradient in one tensor (torch 2.11 to 2.13).
            x, target, weight, pos_weight = ctx.saved_tensors
            if pos_weight is None:
                of_x = x.sigmoid().sub_(target)
            else:
                weighted = pos_weight.mul(target)
                of_x = weighted.add(1).sub_(target).mul_(x.sigmoid()).sub_(weighted)
            of_x.mul_(gradient)
            if weight is not None:
                of_x.mul_(weight)
            return (of_x.div_(x.numel()) if ctx.reduction == 1 else of_x, None, None, None, None)

    def cross_entropy(
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        pos_weight: torch.Tensor | None = None,
        reduction: int = 1,
    ) -> torch.Tensor:
        # A gradient of the target needs torch's own formula.
        run: Any = functools.partial(plain.call_boxed, keys) if target.requires_grad else _CrossEntropy.apply
        out: torch.Tensor = run(x, target, weight, pos_weight, reduction)
        return out

    return cross_entropy


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return one-hot rows from zeros and a scatter; `meta` would compare with every class
    (`native/Onehot.cpp`)."""
    classes = int(x.max().item()) + 1 if num_classes == -1 else num_classes
    out: torch.Tensor = x.new_zeros((*x.shape, classes)).scatter_(-1, x.unsqueeze(-1), 1)
    return out


def _keep_for_backward(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, and save it for its backward pass as an autograd function does."""
    import torch

    class _Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            # Autograd needs a separate output tensor, and a view allocates nothing.
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    out: torch.Tensor = _Keeps.apply(x)  # type: ignore[no-untyped-call]
    return out


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    import torch

    if weight is not None and weight.dtype != x.dtype:  # CUDA also composes it of other operators here
        composed: torch.Tensor = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]
        return composed
    return _fused_rms_norm(x, list(shape), weight, eps)


def _fused_rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> torch.Tensor:
    """Run CUDA's kernels for RMS norm, forward and backward, which save one number per row.

    For `meta`, torch would compose both from other operators. Below autograd they reach the recorder, which
    has shape functions for them.
    """
    import torch

    aten = torch.ops.aten

    class _FusedRmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                out, rstd = aten._fused_rms_norm(x, shape, weight, eps)
            ctx.save_for_backward(x, weight, rstd)
            return out  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            x, weight, rstd = ctx.saved_tensors
            needs_grad = list(ctx.needs_input_grad)
            with torch._C._AutoDispatchBelowAutograd():
                return aten._fused_rms_norm_backward(gradient, x, shape, rstd, weight, needs_grad)  # type: ignore[no-any-return]

    normed: torch.Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return normed
