"""Attention with the signature of transformers' attention functions, and attention of padded encoders by
FlashAttention without a mask matrix.

Each row of a batch is up to three sections: padding, tokens, padding. FlashAttention's kernels for sequences
of several lengths attend within each section, so tokens get the result of a mask. Results at padding differ
from those under a mask, and no result at a token depends on them.

Padding is still computed (`padding_free` drops it), but tokens do not attend to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.features.kernels.decoders import sinks
from snugfit.features.kernels.operations.operators import activation_dtype, has_kernel

if TYPE_CHECKING:
    import torch

HALVES = ("torch.bfloat16", "torch.float16")
"""Dtypes of queries, keys and values that snugfit's attention kernels support."""

GAPS = "fused: a mask has gaps among its tokens. Take 'torch_kernels'."


def attend(
    module: Any,
    heads: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    keywords: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention of queries, keys and values (B, heads, S, width) as (B, S, heads * width), and its
    scores.

    The scores are None where the implementation returns none. The model's config names the implementation.
    `keywords` are those of the module's call.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    dropout = dropout if module.training else 0.0
    implementation = module.config._attn_implementation
    if implementation == "sdpa" and keywords.get("cu_seq_lens_q") is not None:
        return attend_in_stretches(module, heads, dropout, scaling, keywords), None
    # The model itself would call the eager function of its own file.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    run = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    query, key, value = heads
    if keywords.get("s_aux") is not None and implementation == "eager":
        out = sinks.attend(module, heads, mask, dropout, scaling, keywords)
        if out is not None:
            return out, None
    mask = sinks.mask_of(query, mask, keywords)
    out, scores = run(module, query, key, value, mask, dropout=dropout, scaling=scaling, **keywords)
    return out.reshape(*out.shape[:-2], -1), scores


def without_mask(model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Forward pre-hook of an encoder: replace a padding mask (B, S) by the offsets at which tokens and
    padding begin. Unsupported calls keep their mask, and so do all calls on a CPU, which has no such kernels.
    """
    mask = keywords.get("attention_mask")
    if mask is None or mask.dim() != 2 or not model.training or len(arguments) > 1:
        return None
    # A row without padding has sequence boundaries of its own (`padding_free`).
    if keywords.get("cu_seq_lens_q") is not None or not has_kernel(mask) or not takes(model):
        return None
    ends = {"cu_seq_lens_q": stretches(mask), "max_length_q": mask.size(1)}
    return arguments, {**keywords, "attention_mask": None, **ends}


def takes(model: Any) -> bool:
    """Return True if FlashAttention's kernels for padded batches support this encoder. They need 16 bits, no
    decoder, and a head size within their limit.
    """
    from snugfit.features.kernels.without_padding.attention import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE

    config = model.config
    width = config.hidden_size // config.num_attention_heads
    dtype = activation_dtype(next(model.parameters()))
    # A decoder's mask is also causal, which sequence boundaries cannot express.
    known = config._attn_implementation == "sdpa" and not getattr(config, "is_decoder", False)
    return known and str(dtype) in HALVES and width <= MAX_HEAD_SIZE and width % HEAD_SIZE_MULTIPLE == 0


def stretches(mask: torch.Tensor) -> torch.Tensor:
    """Return the offsets at which the tokens and the padding of each sequence begin in the flattened batch,
    and its end: (3 B + 1,), int32.

    `mask` is (B, S) of zeros and ones. A mask with gaps between its ones raises an error on its device.
    """
    import torch

    rows, length = mask.shape
    tokens = mask.ne(0).to(torch.int32)
    count = tokens.sum(1, dtype=torch.int32)  # (B,)
    # More than two changes between padding and tokens mean a gap in a sequence.
    changes = tokens.diff(dim=1).abs().sum(1) + tokens[:, 0] + tokens[:, -1]
    # An assertion on the device does not make the host wait.
    torch._assert_async((changes <= 2).all(), GAPS)
    first = tokens.argmax(1).to(torch.int32)
    begin = torch.arange(0, rows * length, length, dtype=torch.int32, device=mask.device)
    # Every row gets three sequences (padding, tokens, padding), even if empty. So a captured step accepts any
    # padding.
    ends = torch.stack([begin + first, begin + first + count, begin + length], dim=1).flatten()
    return torch.nn.functional.pad(ends, (1, 0))


def attend_in_stretches(
    module: Any, heads: Sequence[torch.Tensor], dropout: float, scaling: float, keywords: dict[str, Any]
) -> torch.Tensor:
    """Return attention of queries, keys and values (B, heads, S, width) as (B, S, H). The tokens of a
    sequence attend only to each other, and so does its padding.
    """
    from snugfit.features.kernels.without_padding.attention import attend as attend_in_pieces

    batch, _, length, _ = heads[0].shape
    # The kernels take all sequences as one row.
    query, key, value = (
        tensor.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for tensor in heads
    )
    out, _ = attend_in_pieces(
        module, query, key, value, dropout=dropout, scaling=scaling, is_causal=False,
        cu_seq_lens_q=keywords["cu_seq_lens_q"], max_length_q=keywords["max_length_q"],
    )  # fmt: skip
    return out.reshape(batch, length, -1)
