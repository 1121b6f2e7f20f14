"""`nn.LSTM`, `nn.GRU` and `nn.RNN` as cuDNN runs them, where torch would compose them on `meta`.

On a GPU the whole network is one operator, `_cudnn_rnn`, which keeps one reserve for its backward pass where
the composition would keep the states of every step. torch chooses it for CUDA tensors while cuDNN is enabled
(`native/RNN.cpp`); under autocast it casts input and weights to fp16, whatever autocast's dtype, the weights
into one buffer (`cudnn/AutocastRNN.cpp`). What it allocates, and in which order, is that of
`native/cudnn/RNN.cpp`, held to the histories of an H200 (`recurrent_scratch.py`, `recurrent_sizes.py`).

Weights of fp32, fp64 and fp16 lie in one buffer from the moment at which a module is on a GPU
(`flatten_parameters`). Weights in bfloat16 do not: each call then copies them into a buffer of its own, which
lives until the backward pass has passed there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.rehearsal.device.autocast import KEY, SWITCH
from snugfit.rehearsal.device.recurrent_sizes import MODES, RecurrentShape
from snugfit.results.footprint import Kind

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.notes import PolicyNotes
    from snugfit.rehearsal.device.policy import CudaPolicy

DOUBT = (
    "Recurrent layers: cuDNN chooses the size of its workspaces. They are predicted as on an H200 with "
    "cuDNN 9.19 (within 1 % for nine of ten measured layers, 30 % at worst). Their seconds are a lower "
    "bound."
)

BYTES_PER_THREAD = 24
"""Of dropout's random state: a generator for each thread that a GPU can hold (6,488,064 bytes on an H200)."""

_FLATTENED = ("torch.float32", "torch.float64", "torch.float16")
"""Which dtypes torch moves into one buffer (`CUDNN_TENSOR_DTYPES`)."""


def recurrent_kernels(policy: CudaPolicy, notes: PolicyNotes) -> dict[str, Callable[..., Any]]:
    """By name, the operators of recurrent networks, run by cuDNN's."""
    import torch

    dropout_states: list[torch.Tensor] = []  # one for the process, made when it is first needed

    def run(mode: str, batch_sizes: list[int], *arguments: Any) -> Any:
        notes.doubt(DOUBT)
        dropout, train = arguments[5:7]
        if dropout and train and not dropout_states:
            state = torch.empty(policy.resident_threads * BYTES_PER_THREAD, dtype=torch.uint8, device="meta")
            notes.claim(state, Kind.WORKSPACES)
            dropout_states.append(state)
        return _run(mode, batch_sizes, *arguments)

    def kernels_of(name: str, mode: str) -> dict[str, Callable[..., Any]]:
        composed = {form: torch.library.get_kernel(f"aten::{name}.{form}", KEY) for form in ("input", "data")}

        def of_sequences(*arguments: Any) -> Any:
            if not torch.backends.cudnn.enabled:
                return composed["input"].call_boxed(_keys(), *arguments)
            return run(mode, [], *arguments)

        def of_packed(*arguments: Any) -> Any:
            if not torch.backends.cudnn.enabled:
                return composed["data"].call_boxed(_keys(), *arguments)
            x, batch_sizes, *settings = arguments
            return run(mode, batch_sizes.tolist(), x, *settings, False)

        return {f"{name}.input": of_sequences, f"{name}.data": of_packed}

    names = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN_TANH", "rnn_relu": "RNN_RELU"}
    return {key: kernel for name, mode in names.items() for key, kernel in kernels_of(name, mode).items()}


def _keys() -> Any:
    import torch

    return torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradMeta)


def _run(
    mode: str,
    batch_sizes: list[int],
    x: torch.Tensor,
    states: Any,
    weights: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> Any:
    """Output and states of a network; `states` is a list for LSTM."""
    import torch

    hidden, cell = states if mode == "LSTM" else (states, None)
    width = (cell if cell is not None else hidden).size(2)
    projected = hidden.size(2) if hidden.size(2) != width else 0
    per_layer = (4 if biases else 2) + bool(projected)
    if torch.is_autocast_enabled(SWITCH) and x.dtype != torch.float64:
        shape = RecurrentShape(
            kind=mode, steps=1, batch=1, inputs=x.size(-1), hidden=width, projected=projected, layers=layers,
            directions=1 + both, dtype=torch.float16,
        )  # fmt: skip
        if weights[0].dtype != torch.float16:
            weights = _in_one_buffer(shape, weights)
        cell = cell.to(torch.float16) if cell is not None else None
        hidden, x = hidden.to(torch.float16), x.to(torch.float16)
    storages = {weight.untyped_storage()._cdata for weight in weights}
    flat = torch.empty(0, dtype=x.dtype, device="meta") if len(storages) == 1 else None
    drops = dropout if layers > 1 else 0.0
    out, *ends = torch.ops.aten._cudnn_rnn(
        x, weights, per_layer, flat, hidden, cell, MODES.index(mode), width, projected, layers, batch_first,
        drops, train, both, batch_sizes, None,
    )  # fmt: skip
    return (out, *ends[: 2 if mode == "LSTM" else 1])


def _in_one_buffer(shape: RecurrentShape, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """fp16 copies of these weights in one buffer, whose gradients come back in the weights' dtypes."""
    import torch
    from torch._utils import _unflatten_dense_tensors

    class _Reflatten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.dtypes = [weight.dtype for weight in weights]
            flat = torch.zeros(shape.weight_elements(), dtype=torch.float16, device="meta")
            copies: tuple[torch.Tensor, ...] = _unflatten_dense_tensors(flat, weights)
            for copied, weight in zip(copies, weights, strict=True):
                copied.copy_(weight)
            return copies

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
            pairs = list(zip(gradients, ctx.dtypes, strict=True))
            return tuple(gradient.to(dtype) for gradient, dtype in reversed(pairs))[::-1]

    copies: Sequence[torch.Tensor] = _Reflatten.apply(*weights)  # type: ignore[no-untyped-call]
    return copies


@contextlib.contextmanager
def flattened_weights() -> Iterator[None]:
    """Within it, a recurrent module's weights on `meta` move into one buffer, as they do on a GPU."""
    import torch
    from torch._utils import _unflatten_dense_tensors

    plain = torch.nn.RNNBase.flatten_parameters

    def flatten_parameters(module: Any) -> None:
        weights = module._flat_weights
        if len(weights) != len(module._flat_weights_names) or not all(
            isinstance(weight, torch.Tensor) and weight.is_meta and str(weight.dtype) in _FLATTENED
            for weight in weights
        ):
            plain(module)
            return
        if not torch.backends.cudnn.enabled or len({weight.dtype for weight in weights}) > 1:
            return
        shape = RecurrentShape(
            kind=module.mode, steps=1, batch=1, inputs=module.input_size, hidden=module.hidden_size,
            projected=module.proj_size, layers=module.num_layers, directions=1 + module.bidirectional,
            dtype=weights[0].dtype,
        )  # fmt: skip
        with torch.no_grad():
            flat = torch.zeros(shape.weight_elements(), dtype=shape.dtype, device="meta")
            for weight, view in zip(weights, _unflatten_dense_tensors(flat, weights), strict=True):
                weight.data = view

    with patch.object(torch.nn.RNNBase, "flatten_parameters", flatten_parameters):
        yield
