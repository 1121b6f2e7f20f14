"""The package flash-attn in transformers' models (`attn_implementation="flash_attention_2"`), and its
simulation.

A model with a padding mask leaves the padding out around each layer's attention. transformers gathers the
rows of queries, keys and values, calls the kernel for several lengths, and scatters its rows back. A
simulation runs all of that code of transformers. Only the package's functions are replaced by torch's
FlashAttention-2. Its operators have the same outputs, saved tensors and buffers, and run on `meta` tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from snugfit.errors import RecipeError
from snugfit.versions import version_of

if TYPE_CHECKING:
    import torch

FLASH = "flash_attention_2"
"""Name of FlashAttention-2 as an attention function in transformers."""

PACKAGE, OLDEST = "flash-attn", "2.3.3"
"""Name of the package on PyPI, and the oldest version that transformers supports."""


def refuse_without_package(device: torch.device) -> None:
    """Raise `RecipeError` where flash-attn's kernels cannot run: on CPUs, and without the package. Without it
    transformers would download another package's kernels from the hub.
    """
    if device.type == "meta":
        return
    if device.type != "cuda":
        raise RecipeError("flash: flash-attn runs on GPUs alone. Take 'sdpa' on a CPU.")
    if version_of(PACKAGE) is None:
        raise RecipeError(
            f"flash needs {PACKAGE}>={OLDEST}, which is not installed. Try: pip install {PACKAGE} "
            "--no-build-isolation (it is compiled then), or take 'sdpa'."
        )


@contextlib.contextmanager
def on_shapes() -> Iterator[None]:
    """Context in which flash-attn's functions in transformers' models are replaced by simulations on `meta`
    tensors. Earlier imports of transformers from the package are restored afterwards.
    """
    from transformers import modeling_flash_attention_utils as flash

    def functions(*_: Any, **__: Any) -> tuple[Any, ...]:
        return attend, attend_within, None, flash._pad_input, flash._unpad_input

    remembered = [name for name in _REMEMBERED if hasattr(flash, name)]
    with contextlib.ExitStack() as undo:
        for name in remembered:
            undo.enter_context(patch.object(flash, name, None))
        undo.enter_context(patch.object(flash, "_lazy_imports", functions))
        yield


_REMEMBERED = (
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)
"""Names of transformers' module variables that cache the imported attention functions."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Simulate `flash_attn_func`: `q` (B, S, H, D), `k` and `v` (B, K, G, D); the result is shaped as `q`."""
    import torch

    operands, scale = _operands_of(q, k, v, softmax_scale, softcap, deterministic)
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    by_head = [operand.transpose(1, 2) for operand in operands]
    out: torch.Tensor = operator(*by_head, dropout_p, causal, False, scale=scale)[0]
    return out.transpose(1, 2)[..., : q.size(-1)]


def attend_within(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Simulate `flash_attn_varlen_func`: `q` (N, H, D), `k` and `v` (M, G, D); the result is shaped as
    `q`."""
    import torch

    operands, scale = _operands_of(q, k, v, softmax_scale, softcap, deterministic)
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    operator = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = operator(*operands, *lengths, dropout_p, causal, False, scale=scale)[0]
    return out[..., : q.size(-1)]


def _operands_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    softcap: float,
    deterministic: bool,
) -> tuple[list[torch.Tensor], float]:
    """Return padded queries, keys and values, and the scale of the scores: 1/sqrt(D) by default. Raises
    `RecipeError` for arguments that are not simulated."""
    _refuse_others(q, softcap, deterministic)
    return [_fill_heads(operand) for operand in (q, k, v)], q.size(-1) ** -0.5 if scale is None else scale


def _fill_heads(operand: torch.Tensor) -> torch.Tensor:
    """Pad the width of heads to a multiple of 8, as the package does."""
    import torch

    more = -operand.size(-1) % 8
    return torch.nn.functional.pad(operand, (0, more)) if more else operand


def _refuse_others(query: torch.Tensor, softcap: float, deterministic: bool) -> None:
    import torch

    if query.dtype not in (torch.float16, torch.bfloat16) or query.size(-1) > 256:
        raise RecipeError(
            f"flash takes float16 or bfloat16 and heads of up to 256 numbers; here are {query.size(-1)} "
            f"in {str(query.dtype).removeprefix('torch.')}. Take 'sdpa'."
        )
    if softcap or deterministic:
        raise RecipeError(
            "flash with a cap of the scores, or with FLASH_ATTENTION_DETERMINISTIC, is not simulated. Take "
            "'eager' or 'sdpa'."
        )
