"""Choose the attention kernel of `scaled_dot_product_attention` by torch's rules.

The choice determines the memory of attention. Only the math path materialises S x S scores. Each fused kernel
has its own saved tensors and workspaces. torch reads the device's properties; here a policy replaces the
device. The conditions are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (torch 2.11 to
2.13), for dense tensors. `sdpa_kernel` can disable or reorder kernels.

The rules were compared with the choices of an H200 for 3,000 drawn calls
(`results/h200-2026-11-22/attention-choices.json`).
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
    """Arguments of one call of `scaled_dot_product_attention`, from which its kernel is chosen."""

    query: torch.Tensor
    """Query tensor, of shape (batch B, heads H, sequence S, width D)."""

    key: torch.Tensor
    """Key tensor, of shape (B, H, S, D). D is the query's; H and S may differ from the query's."""

    value: torch.Tensor
    """Value tensor, of shape (B, H, S, D). H and S are the key's; D may differ from the key's."""

    mask: torch.Tensor | None = None
    """Additive mask for the scores, or a boolean mask that is True for used scores."""

    dropout: float = 0.0
    """Probability from 0 to 1 that an attention score is dropped."""

    causal: bool = False
    """True for a causal mask, under which a position attends only to itself and earlier positions."""

    scale: float | None = None
    """Factor of the scores; None is 1 / sqrt(D)."""

    grouped: bool = False
    """True if each head of key and value serves several heads of the query."""

    needs_grad: bool = False
    """True if a backward pass may follow."""


class FusedKernels(NamedTuple):
    """The fused attention kernels of a GPU; `efficient` is available on all."""

    cudnn_first: bool
    """True if cuDNN's kernel has the first priority; otherwise it has the last."""
    flash: bool
    """True if the GPU can run flash attention and cuDNN's attention."""
    cudnn_width: int
    """Largest head width that cuDNN's kernel supports."""
    wide_backward: bool
    """True if flash attention's backward pass always supports heads wider than 192."""
    efficient_bf16: bool
    """True if efficient attention runs in bfloat16."""

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the kernels in the order in which torch tries them on this GPU (`priority_order`)."""
        # torch puts cuDNN first on these GPUs only if its version is above 9.15.0.
        return ("cudnn", "flash", "efficient", "math") if self.cudnn_first else DEFAULT_ORDER


DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
"""Order in which torch tries its attention kernels before a GPU is initialized."""

BACKENDS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
"""Number of each attention kernel in `torch.nn.attention.SDPBackend`, by kernel name."""


def kernels_on_cuda(capability: tuple[int, int]) -> FusedKernels:
    """Return the attention kernels of a GPU of this compute capability, with cuDNN after 9.15: torch does not
    prefer earlier versions.
    """
    return FusedKernels(
        cudnn_first=capability in ((9, 0), (10, 0)),
        flash=(8, 0) <= capability <= (12, 1),
        cudnn_width=256 if capability == (9, 0) else 128,
        wide_backward=not ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)),
        efficient_bf16=capability >= (8, 0),
    )


@contextlib.contextmanager
def order_in_force(order: Sequence[str]) -> Iterator[None]:
    """Context in which torch tries attention kernels in this GPU's order, unless the user has set another.

    `sdpa_kernel` and `_set_sdp_priority_order` change the process's priority, which CPUs ignore.
    """
    import torch

    before = torch._C._get_sdp_priority_order()
    # A process with a GPU has that GPU's order, and another process the default. In both cases the user has
    # set none.
    usual = [kernels.order for kernels in (kernels_on_cuda((8, 0)), kernels_on_cuda((9, 0)))]
    if before[: len(BACKENDS)] in ([BACKENDS[name] for name in names] for names in usual):
        numbers = [BACKENDS[name] for name in order]
        # Other attention kernels of torch follow in their previous order.
        torch._C._set_sdp_priority_order(
            [*numbers, *(backend for backend in before if backend not in numbers)]
        )
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def choose_on_cuda(operands: Operands, fused: FusedKernels) -> str:
    """Return the name of the attention kernel that torch chooses on a GPU: `cudnn`, `flash`, `efficient` or
    `math`.

    The result is the first kernel in the active order that is enabled and supports the operands. Raise
    torch's `RuntimeError` if there is none.
    """
    import torch

    enabled = _switched_on()
    names = {number: name for name, number in BACKENDS.items()}
    for number in torch._C._get_sdp_priority_order():
        name = names.get(number, "")
        if enabled.get(name) and _SUPPORTS[name](operands, fused):
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _switched_on() -> dict[str, bool]:
    """Return, for each attention kernel, True if the user has it enabled (`torch.nn.attention.sdpa_kernel` or
    `torch.backends.cuda.enable_*_sdp`).
    """
    from torch.backends import cuda

    return {
        "cudnn": cuda.cudnn_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def _fuses(operands: Operands, *, one_for_both: bool = True) -> bool:
    """Return True if attention's operands meet the conditions of every fused kernel (flash, efficient,
    cuDNN). The conditions are four dimensions, one batch size, whole groups of heads, and no empty sequence.
    The sources are `check_tensor_shapes`, `check_batch_size_and_num_heads_dense` and
    `check_nonzero_sequence_lengths_dense`. With `one_for_both`, key and value must have the same number of
    heads.
    """
    query, key, value = operands.query, operands.key, operands.value
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    heads, shared = query.size(1), {key.size(1), value.size(1)}
    if operands.grouped:
        groups = all(heads % count == 0 for count in shared) and not (one_for_both and len(shared) > 1)
    else:
        groups = shared == {heads}
    batches = query.size(0) == key.size(0) == value.size(0)
    return batches and groups and bool(query.size(2)) and bool(key.size(2))


def _is_strided(attention: Operands, *, of_one: bool) -> bool:
    """Return True if the last stride of query, key or value is not 1. With `of_one`, operands with heads of
    width 1 are ignored."""
    operands = (
        () if of_one and attention.query.size(-1) == 1 else (attention.query, attention.key, attention.value)
    )
    # The rule is not in torch's sources: such operands ran in the math kernel on an H200. T5's layers compute
    # such a bias.
    if attention.mask is not None and attention.mask.stride(-1) != 1:
        return True
    return any(operand.stride(-1) != 1 for operand in operands)


def _flash_supports(operands: Operands, fused: FusedKernels) -> bool:
    width = operands.query.size(-1)
    if operands.mask is not None or not _fuses(operands) or _is_strided(operands, of_one=True):
        return False
    # Flash aligns a causal mask at the lower right, torch at the upper left. Both differ for unequal lengths.
    if operands.causal and operands.query.size(2) != operands.key.size(2):
        return False
    # Wide heads need more shared memory in backward than GPUs of these architectures have.
    if (
        operands.needs_grad
        and not fused.wide_backward
        and not (width <= 192 or (width > 224 and not operands.dropout))
    ):
        return False
    return fused.flash and _is_half(operands) and width == operands.value.size(-1) and width <= 256


def _cudnn_supports(operands: Operands, fused: FusedKernels) -> bool:
    import torch

    if not (fused.flash and _is_half(operands) and _fuses(operands, one_for_both=False)):
        return False
    if _is_strided(operands, of_one=True):
        return False
    if operands.mask is not None and not _is_cudnn_mask(operands):
        return False
    if (
        operands.key.size(2) == 1
        or (operands.dropout and operands.query.size(2) == 1)
        # torch excludes cuDNN in deterministic mode, since its backward is not deterministic.
        or torch.get_deterministic_debug_mode() == 2
    ):
        return False
    widths = operands.query.size(-1), operands.value.size(-1)
    # 192 and 128 are the head widths of latent attention (DeepSeek-V3), an exception of torch.
    return widths == (192, 128) or all(width % 8 == 0 and width <= fused.cudnn_width for width in widths)


def _is_cudnn_mask(operands: Operands) -> bool:
    """Return True if cuDNN attention accepts the mask's shape (`check_attn_mask_shape`).

    It must have two or four dimensions, each full or 1, and require no gradient.
    """
    mask = operands.mask
    # A mask that requires a gradient ran in the efficient kernel on an H200: T5's with checkpointing
    # (contiguous zeros).
    if mask is None or mask.requires_grad or mask.dim() not in (2, 4):
        return False
    whole = (operands.query.size(0), operands.query.size(1), operands.query.size(2), operands.key.size(2))
    return all(size in (1, full) for size, full in zip(mask.shape, whole[-mask.dim() :], strict=True))


def _efficient_supports(operands: Operands, fused: FusedKernels) -> bool:
    # A row of a head must fill multiples of 16 bytes (`minimum_gemm_alignment`).
    aligned = 8 if _is_half(operands) else 4
    return (
        _fuses(operands)
        and not operands.grouped
        and not _is_strided(operands, of_one=False)
        and (str(operands.query.dtype) != "torch.bfloat16" or fused.efficient_bf16)
        and str(operands.query.dtype) != "torch.float64"
        and operands.query.size(-1) % aligned == 0
        and operands.value.size(-1) % aligned == 0
    )


def _is_half(operands: Operands) -> bool:
    return str(operands.query.dtype) in HALVES


_SUPPORTS: dict[str, Callable[[Operands, FusedKernels], bool]] = {
    "cudnn": _cudnn_supports,
    "flash": _flash_supports,
    "efficient": _efficient_supports,
    "math": lambda of, fused: True,
}


def choose_on_cpu(operands: Operands) -> str:
    """Return the name of the attention kernel that torch chooses on a CPU, `flash_for_cpu` or `math`, by
    `native/transformers/sdp_utils_cpp.cpp` for dense operands.

    Raise torch's `RuntimeError` if no enabled kernel supports the operands.
    """
    enabled = _switched_on()
    fits = operands.dropout == 0 and _fuses(operands) and (operands.mask is None or _is_cudnn_mask(operands))
    strided = any(operand.stride(-1) != 1 for operand in (operands.query, operands.key, operands.value))
    if enabled["flash"] and fits and not strided and operands.query.size(-1) == operands.value.size(-1):
        return "flash_for_cpu"
    if enabled["math"]:
        return "math"
    raise RuntimeError("No available kernel. Aborting execution.")
