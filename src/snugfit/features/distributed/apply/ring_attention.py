"""Sequences that are split over ranks, and attention across these ranks: torch's own `context_parallel`.

Each rank of a group gets the whole micro-batch. The model's inputs are cut on the device in torch's own
order, which balances the work of a causal mask. There are 2 n pieces. The rank r has number r from the front
and number r from the back. A rank also gets its tokens' positions, which a model otherwise counts itself. It
also gets the labels of the following tokens, which the piece alone does not have.

- `loss`: of a rank: its tokens' losses, times n, by the labels of the whole. Averaged over the ranks of
  a group it is the mean over the whole, for any distribution of the labels
- `kernels`: flash attention, and efficient attention for 32 bits. With cuDNN's, torch's ring attention meets
  an assertion in the backward pass (pytorch/pytorch issue 176915)
- `mask`: none is made: transformers makes masks for the attention that it has by name, and not for this
  one. A job that needs one is refused, when the technique is checked or when a mask comes
- `CPU`: torch's ring supports the three fused kernels of a GPU. On a CPU its other kernel is passed
  to the same function of torch's here
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from snugfit.errors import RecipeError
from snugfit.features.distributed.fields import RING
from snugfit.job.batch import IGNORED

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

HALVES = ("torch.float16", "torch.bfloat16")

NOT_IN_A_RING = ("sliding_window", "position_bias", "softcap", "s_aux")
"""Names of attention arguments that ring attention (sequences cut over ranks) does not support."""

SEQUENCE = 2
"""Sequence dimension of a query (B, H, S, D), which is cut over ranks."""


def register() -> None:
    """Register ring attention (sequences cut over ranks) under a name in transformers. Without a mask
    function of that name, models make no masks. torch's ring is extended to CPUs too.
    """
    import torch
    from torch.distributed.tensor.experimental._context_parallel import _attention as around
    from transformers import AttentionInterface

    AttentionInterface.register(RING, attend)
    aten, handlers = torch.ops.aten, cast("dict[Any, Any]", around.custom_ops)
    handlers[aten._scaled_dot_product_flash_attention_for_cpu.default] = _forward_on_cpu
    handlers[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _backward_on_cpu


# ---- a batch ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cut_batch(mesh: DeviceMesh, model: Any, batch: dict[str, Any]) -> Iterator[None]:
    """Context in which a batch on the device has this rank's part of each sequence. Meanwhile, attention
    passes keys and values around the ranks of the mesh.
    """
    import torch
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _refuse(mesh.size(), batch)
    batch.update(_of_whole(batch, mesh.size()))
    # The mask is all ones here (`_refuse`), and ring attention takes no mask.
    batch.pop("attention_mask", None)
    cut = [batch[name] for name in ("input_ids", "position_ids", "shift_labels") if name in batch]
    plain = torch.nn.functional.scaled_dot_product_attention
    around = context_parallel(mesh, buffers=cut, buffer_seq_dims=[1] * len(cut), no_restore_buffers={*cut})
    _CALLS.append(0)
    try:
        # cuDNN's kernel fails in torch's ring (pytorch issue 176915).
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]), around:
            yield
    finally:
        calls = _CALLS.pop()
        torch.nn.functional.scaled_dot_product_attention = plain  # torch 2.11 does not after an error
    layers = getattr(getattr(getattr(model, "module", model), "config", None), "num_hidden_layers", 1)
    if calls < layers:
        raise RecipeError(
            f"Only {calls} of {layers} layers use ring attention; the others would get a piece of each "
            "sequence. Leave the technique that cuts sequences out."
        )


def _of_whole(batch: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return copies of the batch's tensors for the whole sequences, because torch cuts the originals in
    place.
    """
    import torch

    ids = batch["input_ids"].clone()
    # Without position ids, a model would count each rank's positions from 0.
    places = torch.arange(ids.size(1), device=ids.device)[None]
    given = {"input_ids": ids, "position_ids": places}
    if (labels := batch.get("labels")) is not None:
        # A rank's part of a sequence lacks the label after its last token.
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        given |= {"labels": following, "shift_labels": following}
        # The mean of the ranks' losses is then the mean over the whole sequence.
        given["num_items_in_batch"] = (following != IGNORED).sum() / ranks
    return given


def _refuse(ranks: int, batch: dict[str, Any]) -> None:
    """Raise `RecipeError` for a batch whose sequences cannot be split over the ranks."""
    if (mask := batch.get("attention_mask")) is not None and not bool(mask.all()):
        raise RecipeError(
            f"Sequences are cut over {ranks} GPUs, and a batch has padding, which ring attention does "
            "not support. Fill them to one length (pack: true)."
        )
    length = batch["input_ids"].size(1)
    # Each rank gets two parts of a sequence, which balances the work of a causal mask.
    if length % (2 * ranks):
        raise RecipeError(
            f"Sequences are cut over {ranks} GPUs, two pieces each, and those of a batch have {length} "
            f"tokens. Fill them to a multiple of {2 * ranks} (pack: true)."
        )


# ---- attention -------------------------------------------------------------------------------------------


_CALLS: list[int] = []
"""Numbers of attention layers that called ring attention, one for each active context of `cut_batch`."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, under transformers' attention interface, by torch's `scaled_dot_product_attention`,
    causal and unmasked. Raises `RecipeError` for other attention.
    """
    import torch
    from transformers.integrations.sdpa_attention import repeat_kv

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = [name for name in NOT_IN_A_RING if more.get(name) is not None]
    if attention_mask is not None:
        asked.append("a mask")
    if dropout:
        asked.append("dropout")
    if asked or not causal:
        raise RecipeError(
            f"{type(module).__name__}: ring attention supports plain causal attention, but this one has "
            f"{' and '.join(asked) or 'no such order'}. Leave the technique that cuts sequences out."
        )
    _CALLS[:] = [calls + 1 for calls in _CALLS]
    grouped = key.size(1) != query.size(1)
    if grouped and _dtype_of(query) not in HALVES:  # only flash attention supports grouped keys
        key, value = (repeat_kv(one, query.size(1) // one.size(1)) for one in (key, value))
        grouped = False
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def _dtype_of(query: torch.Tensor) -> str:
    """Return the dtype in which ring attention computes: autocast's dtype if it is on, else that of the
    query.
    """
    import torch

    device = query.device.type
    on = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device) if on else query.dtype)


# ---- CPUs ------------------------------------------------------------------------------------------------


def _forward_on_cpu(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch
    import torch.distributed.tensor.experimental._context_parallel._attention as around

    mesh, placements, given = _local(operator, args, kwargs)
    attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = around._templated_ring_attention(mesh.get_group(), SEQUENCE, attention, **given)
    return _around(mesh, placements, out)


def _backward_on_cpu(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch.distributed.tensor.experimental._context_parallel._attention as around

    mesh, placements, given = _local(operator, args, kwargs)
    out = around._templated_ring_attention_backward(
        mesh.get_group(), SEQUENCE, operator, given.pop("grad_out"), "grad_out", **given
    )
    return _around(mesh, placements, out)


def _local(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the device mesh, the placement of tensors on it, and an operator's arguments by name with local
    shards as tensors.
    """
    from torch.distributed.tensor import DTensor

    names = [argument.name for argument in operator._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    first = next(value for value in named.values() if isinstance(value, DTensor))
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in named.items()}
    return first.device_mesh, first.placements, local


def _around(mesh: Any, placements: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    from torch.distributed.tensor import DTensor

    return tuple(DTensor.from_local(part, mesh, placements, run_check=False) for part in parts)
