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
    if implementation == "eager" and takes_sinks(module, heads, mask, dropout, keywords):
        assert mask is not None
        return attend_with_sinks(heads, keywords["s_aux"], mask, scaling), None
    query, key, value = heads
    out, scores = run(module, query, key, value, mask, dropout=dropout, scaling=scaling, **keywords)
    return out.reshape(*out.shape[:-2], -1), scores


def takes_sinks(
    module: Any, heads: Sequence[torch.Tensor], mask: torch.Tensor | None, dropout: float, keywords: Any
) -> bool:
    """Return True if `attend_with_sinks` supports this call of an attention with a sink for each head."""
    return (
        keywords.get("s_aux") is not None
        and module.training
        and dropout == 0.0
        and mask is not None
        and mask.is_floating_point()
        and mask.shape[-2:] == (heads[0].size(2), heads[1].size(2))
        and not getattr(module.config, "output_attentions", False)
    )


SINK_COLUMNS = 8
"""Keys and columns of a head that are added for a sink. The attention kernels need multiples of 8."""

SINK_PARTS = 3
"""Numbers of 16 bits whose sum is one of 32 bits."""


def attend_with_sinks(
    heads: Sequence[torch.Tensor], sinks: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return attention of queries (B, H, S, D) to keys and values (B, H / g, T, D), as (B, S, H * D). Each
    head attends also to a sink of the score `sinks` (H,) and the value 0.

    The sink is one more key. It is 1 in the columns after D, and 0 in all others. The queries have
    s / scaling there, in parts whose sum is exact. So torch's kernels compute the softmax over tokens and
    sink, and no tensor (S, T) of scores is written. `mask` (B, 1, S, T) is added to the scores of tokens.
    """
    import torch
    from torch.nn.functional import pad

    query, key, value = heads
    tokens, width, groups = key.size(2), key.size(3), query.size(1) // key.size(1)
    columns = pad(
        _parts(sinks.to(torch.promote_types(sinks.dtype, torch.float32)) / scaling, query.dtype)[
            None, :, None
        ],
        (0, SINK_COLUMNS - SINK_PARTS),
    )
    query = torch.cat([query, columns.expand(*query.shape[:3], -1)], dim=-1)
    # The number of keys is a multiple of 8, so that rows of the mask are aligned.
    added = (0, SINK_COLUMNS, 0, SINK_COLUMNS - tokens % SINK_COLUMNS)
    key, value = (pad(tensor, added).repeat_interleave(groups, dim=1) for tensor in (key, value))
    with torch.no_grad():
        key[:, :, tokens, width : width + SINK_PARTS] = 1.0
    bias = pad(mask.to(query.dtype), (0, added[-1]), value=-torch.inf)
    bias[..., tokens] = 0.0
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return out[..., :width].transpose(1, 2).flatten(2)


def _parts(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of this dtype (H, 3) whose sum is the values (H,), with the gradient at the first."""
    import torch

    first = values.to(dtype)
    parts, rest = (
        [first],
        values.detach().to(torch.promote_types(values.dtype, torch.float32)) - first.detach(),
    )
    while len(parts) < SINK_PARTS:
        parts.append(rest.to(dtype))
        rest = rest - parts[-1]
    return torch.stack(parts, dim=-1)


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
