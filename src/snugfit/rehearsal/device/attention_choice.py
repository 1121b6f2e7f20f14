"""Which attention kernel `scaled_dot_product_attention` runs, decided as torch decides it.

The choice decides the memory of attention: the math path materialises S x S scores, the others do not, and
each fused kernel has its own saved tensors and workspaces. torch asks the device; here the device is a
policy. The conditions are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (torch 2.11 to
2.13), for dense tensors: order flash, efficient, math, cuDNN, with cuDNN first on sm_90 and sm_100 when its
version is above 9.15.0; what code switches off or orders otherwise (`sdpa_kernel`) counts. Held to what
an H200 chose for 3,000 drawn calls (`results/h200-2026-11-22/attention-choices.json`): beside what the
sources say, operands whose last stride is not 1 ran in math (the bias that T5's layers compute is one), and a
mask that learns ran in efficient (the contiguous zeros of T5's attention across, under checkpointing).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

HALVES = ("torch.float16", "torch.bfloat16")


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

    cudnn_first: bool
    """Whether cuDNN's goes first; else it is the last that is asked."""
    flash: bool
    """Whether flash attention and cuDNN's run."""
    cudnn_width: int
    """The widest head of cuDNN's."""
    wide_backward: bool
    """Whether flash attention's backward pass takes heads of more than 192 in any case."""
    efficient_bf16: bool
    """Whether efficient attention runs in bfloat16."""

    @property
    def order(self) -> tuple[str, ...]:
        """In which order torch asks them on this GPU (`priority_order`)."""
        return ("cudnn", "flash", "efficient", "math") if self.cudnn_first else DEFAULT_ORDER


DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
"""Of torch, until a GPU has been asked."""

BACKENDS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
"""By name, the number of each kernel in `torch.nn.attention.SDPBackend`."""


def kernels_on_cuda(capability: tuple[int, int]) -> FusedKernels:
    """The kernels of a GPU of this capability, with a cuDNN after 9.15: below, torch does not prefer it."""
    return FusedKernels(
        cudnn_first=capability in ((9, 0), (10, 0)),
        flash=(8, 0) <= capability <= (12, 1),
        cudnn_width=256 if capability == (9, 0) else 128,
        wide_backward=not ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)),
        efficient_bf16=capability >= (8, 0),
    )


@contextlib.contextmanager
def order_in_force(order: Sequence[str]) -> Iterator[None]:
    """Within it, torch asks its kernels in this order. One that the user has set stays: `sdpa_kernel` and
    `_set_sdp_priority_order` change the process's, and CPUs do not look at it."""
    import torch

    before = torch._C._get_sdp_priority_order()
    usual = [kernels.order for kernels in (kernels_on_cuda((8, 0)), kernels_on_cuda((9, 0)))]
    if before[: len(BACKENDS)] in ([BACKENDS[name] for name in names] for names in usual):
        numbers = [BACKENDS[name] for name in order]
        torch._C._set_sdp_priority_order([*numbers, *(one for one in before if one not in numbers)])
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def choose_on_cuda(of: Operands, fused: FusedKernels) -> str:
    """`cudnn`, `flash`, `efficient` or `math`, on a GPU that has these kernels: the first of the order in
    force that is switched on and takes the operands. Raises torch's `RuntimeError` when there is none."""
    import torch

    enabled = _switched_on()
    names = {number: name for name, number in BACKENDS.items()}
    for number in torch._C._get_sdp_priority_order():
        name = names.get(number, "")
        if enabled.get(name) and _TAKES[name](of, fused):
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _switched_on() -> dict[str, bool]:
    """By `torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_*_sdp`."""
    from torch.backends import cuda

    return {
        "cudnn": cuda.cudnn_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def _fuses(of: Operands, *, one_for_both: bool = True) -> bool:
    """What every fused kernel asks for: four dimensions, one batch, whole groups of heads, no empty sequence:
    `check_tensor_shapes`, `check_batch_size_and_num_heads_dense`, `check_nonzero_sequence_lengths_dense`.
    `one_for_both`: key and value have the same number of heads in any case."""
    query, key, value = of.query, of.key, of.value
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    heads, shared = query.size(1), {key.size(1), value.size(1)}
    if of.grouped:
        groups = all(heads % count == 0 for count in shared) and not (one_for_both and len(shared) > 1)
    else:
        groups = shared == {heads}
    batches = query.size(0) == key.size(0) == value.size(0)
    return batches and groups and bool(query.size(2)) and bool(key.size(2))


def _is_strided(of: Operands, *, of_one: bool) -> bool:
    """Whether a last stride is not 1. `of_one` lets pass operands whose heads are one wide."""
    operands = () if of_one and of.query.size(-1) == 1 else (of.query, of.key, of.value)
    if of.mask is not None and of.mask.stride(-1) != 1:
        return True
    return any(operand.stride(-1) != 1 for operand in operands)


def _flash_takes(of: Operands, fused: FusedKernels) -> bool:
    width = of.query.size(-1)
    if of.mask is not None or not _fuses(of) or _is_strided(of, of_one=True):
        return False
    if of.causal and of.query.size(2) != of.key.size(2):
        return False
    if of.needs_grad and not fused.wide_backward and not (width <= 192 or (width > 224 and not of.dropout)):
        return False
    return fused.flash and _is_half(of) and width == of.value.size(-1) and width <= 256


def _cudnn_takes(of: Operands, fused: FusedKernels) -> bool:
    import torch

    if not (fused.flash and _is_half(of) and _fuses(of, one_for_both=False)):
        return False
    if _is_strided(of, of_one=True):
        return False
    if of.mask is not None and not _is_cudnn_mask(of):
        return False
    if (
        of.key.size(2) == 1
        or (of.dropout and of.query.size(2) == 1)
        or torch.get_deterministic_debug_mode() == 2
    ):
        return False
    widths = of.query.size(-1), of.value.size(-1)
    return widths == (192, 128) or all(width % 8 == 0 and width <= fused.cudnn_width for width in widths)


def _is_cudnn_mask(of: Operands) -> bool:
    """`check_attn_mask_shape`: two or four dimensions, each whole or 1, and nothing to learn."""
    mask = of.mask
    if mask is None or mask.requires_grad or mask.dim() not in (2, 4):
        return False
    whole = (of.query.size(0), of.query.size(1), of.query.size(2), of.key.size(2))
    return all(size in (1, full) for size, full in zip(mask.shape, whole[-mask.dim() :], strict=True))


def _efficient_takes(of: Operands, fused: FusedKernels) -> bool:
    aligned = 8 if _is_half(of) else 4
    return (
        _fuses(of)
        and not of.grouped
        and not _is_strided(of, of_one=False)
        and (str(of.query.dtype) != "torch.bfloat16" or fused.efficient_bf16)
        and str(of.query.dtype) != "torch.float64"
        and of.query.size(-1) % aligned == 0
        and of.value.size(-1) % aligned == 0
    )


def _is_half(of: Operands) -> bool:
    return str(of.query.dtype) in HALVES


_TAKES: dict[str, Callable[[Operands, FusedKernels], bool]] = {
    "cudnn": _cudnn_takes,
    "flash": _flash_takes,
    "efficient": _efficient_takes,
    "math": lambda of, fused: True,
}


def choose_on_cpu(of: Operands) -> str:
    """`flash_for_cpu` or `math`: `native/transformers/sdp_utils_cpp.cpp`, dense operands. Raises torch's
    `RuntimeError` when neither is switched on or takes them."""
    enabled = _switched_on()
    fits = of.dropout == 0 and _fuses(of) and (of.mask is None or _is_cudnn_mask(of))
    strided = any(operand.stride(-1) != 1 for operand in (of.query, of.key, of.value))
    if enabled["flash"] and fits and not strided and of.query.size(-1) == of.value.size(-1):
        return "flash_for_cpu"
    if enabled["math"]:
        return "math"
    raise RuntimeError("No available kernel. Aborting execution.")
