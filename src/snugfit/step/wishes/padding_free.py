"""A batch without its padding: its sequences one after the other in one row, and attention within each.

Where a model of transformers is given (B, S) tokens with a mask, its forward pass gets (1, N): the N tokens
that are not padding, with the positions that they had, and where each sequence ends (`cu_seq_lens_q`, as
transformers' own `DataCollatorWithFlattening` says it). Everything that looks at one token alone does the
same for fewer of them. Attention looks at others, and stops at the ends: FlashAttention's kernels for
sequences of several lengths, which torch has (`torch.nn.attention.varlen` calls the same operator, without
dropout). No matrix of a mask is made.

A decoder's first token of a sequence would be predicted from the last one of the sequence before, so it
carries no label. In a padded batch nothing predicts it either, unless padding stands on the left.

What a loop reads of the model's output beside the loss has the rows that it gave: logits are spread over
(B, S) again in evaluation, and wherever the loss is computed outside of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from snugfit.errors import RecipeError
from snugfit.job.batch import IGNORED
from snugfit.techniques.setup import PADDING_FREE

if TYPE_CHECKING:
    import torch


def register() -> None:
    """transformers knows this attention by its name. It has no mask among transformers' masks, so models make
    none."""
    from transformers import AttentionInterface

    AttentionInterface.register(PADDING_FREE, attend)


# ---- a batch ---------------------------------------------------------------------------------------------


def drop_padding(model: torch.nn.Module) -> None:
    """From here on this model's forward pass drops the padding of what it is given."""
    if model not in _HOOKS:
        hooks = _PaddingHooks()
        _HOOKS[model] = (
            model.register_forward_pre_hook(hooks.pack, with_kwargs=True),
            model.register_forward_hook(hooks.unpack, with_kwargs=True),
        )


def keep_padding(model: torch.nn.Module) -> None:
    """From here on this model is given its padding again."""
    for hook in _HOOKS.pop(model, ()):
        hook.remove()


_HOOKS: WeakKeyDictionary[torch.nn.Module, tuple[Any, ...]] = WeakKeyDictionary()


class _PaddingHooks:
    """The hooks of one model."""

    def __init__(self) -> None:

        self._spread: tuple[torch.Size, torch.Tensor | None] | None = None

    def pack(self, model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of the forward pass: one row without padding."""
        import torch

        self._spread = None
        if (
            given.get("cu_seq_lens_q") is not None
        ):  # one row already: a collator of the user's, or a copy's hooks
            return args, given
        if args or not torch.is_tensor(given.get("input_ids")):
            raise RecipeError(
                f"{PADDING_FREE} takes batches of input_ids by name: model(input_ids=..., "
                "attention_mask=..., labels=...). Take 'sdpa' for others."
            )
        packed, places = without_padding(given, shifts=_predicts_the_next(model))
        whole_logits = not model.training or given.get("labels") is None
        self._spread = (given["input_ids"].shape, places) if whole_logits else None
        return args, packed

    def unpack(self, model: Any, args: Any, given: Any, out: Any) -> Any:
        """The output, its logits as the batch lay."""
        spread, self._spread = self._spread, None
        if spread is not None and getattr(out, "logits", None) is not None:
            (batch, length), places = spread
            tokens = out.logits[0]  # (N, V)
            if places is not None:
                tokens = tokens.new_zeros(batch * length, tokens.size(-1)).index_copy(0, places, tokens)
            out.logits = tokens.view(batch, length, -1)
        return out


OF_ITS_OWN_TOKEN = ("ForMaskedLM", "ForTokenClassification")
"""Ends of the names of models whose logits are compared with the label of the same token."""


def _predicts_the_next(model: Any) -> bool:
    """Whether logits are compared with the label of the next token."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return not type(base).__name__.endswith(OF_ITS_OWN_TOKEN)


def without_padding(batch: Mapping[str, Any], *, shifts: bool) -> tuple[dict[str, Any], torch.Tensor | None]:
    """A padded batch (B, S) as one row (1, N), with what attention must know of it; and which of the B * S
    places its tokens had, None where there is no padding. `shifts`: logits are compared with the label of the
    next token. Raises `RecipeError` for a mask that is not (B, S)."""
    import torch

    shape = batch["input_ids"].shape
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != shape:
        raise RecipeError(
            f"{PADDING_FREE} takes a mask of the shape of input_ids, {tuple(shape)}, and was given "
            f"{tuple(mask.shape)}. Take 'sdpa' for such masks."
        )
    tokens = {
        name: value
        for name, value in batch.items()
        if name != "attention_mask" and torch.is_tensor(value) and value.shape[:2] == shape
    }
    if shifts and "labels" in tokens:
        tokens["labels"] = _unlabel_first(tokens["labels"], mask)
    places = None if mask is None else mask.flatten().nonzero().flatten()  # (N,)
    rows = {name: _row(value, places) for name, value in tokens.items()}
    ends, longest = _ends(shape, mask, batch["input_ids"].device)
    if "position_ids" not in rows:
        rows["position_ids"] = _positions(shape, places, ends.device)
    extra = {name: value for name, value in batch.items() if name not in tokens and name != "attention_mask"}
    said = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {**extra, **rows, **said}, places


def _row(value: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """(B, S, ...) as (1, N, ...)."""
    flat = value.flatten(0, 1)
    return (flat if places is None else flat[places]).unsqueeze(0)


def _unlabel_first(labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Labels (B, S) but for the first token of each sequence, which nothing may predict."""
    import torch

    if mask is None:
        first = torch.zeros_like(labels, dtype=torch.bool)
        first[:, :1].fill_(True)
    else:
        first = (mask.cumsum(1) == 1) & mask.bool()
    return labels.masked_fill(first, IGNORED)


def _ends(shape: torch.Size, mask: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, int]:
    """Where each sequence begins and the last ends (B + 1,) int32, and the tokens of the longest."""
    import torch

    batch, length = shape
    if mask is None:
        steps = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
        return steps, length
    lengths = mask.sum(1, dtype=torch.int32)  # (B,)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())


def _positions(shape: torch.Size, places: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """(1, N): the places that tokens had in their sequences."""
    import torch

    batch, length = shape
    if places is not None:
        return places.remainder(length).unsqueeze(0)
    return torch.arange(length, device=device).repeat(batch).unsqueeze(0)


WIDEST = 256
"""Numbers of the widest head that the kernels take."""

WIDTH_IN = 8
"""What the width of a head is a multiple of."""


# ---- attention -------------------------------------------------------------------------------------------


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each sequence of one row, as transformers' attention functions are called.

    `query` is (1, H, N, D), `key` and `value` (1, G, N, D), where H is a multiple of G; the result is
    (1, N, H, D). Raises `RecipeError` where a model says no ends, or asks for what the kernels do not know.
    """
    import torch

    _refuse_unknown(module, query, attention_mask, cu_seq_lens_q, extra)
    assert cu_seq_lens_q is not None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    longest = query.size(2) if max_length_q is None else int(max_length_q)
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    dtype = _dtype(value)
    query, key, value = (operand.to(dtype) for operand in (query, key, value))
    if query.device.type == "cpu" or (query.is_meta and _ON_CPU):
        out = _one_by_one(query, key, value, cu_seq_lens_q, dropout, scaling, causal, window)
        return out.transpose(1, 2), None
    width = query.size(-1)
    if dtype not in (torch.bfloat16, torch.float16) or width > WIDEST or width % WIDTH_IN:
        raise RecipeError(
            f"{PADDING_FREE} takes bfloat16 or float16 and heads of up to {WIDEST} numbers, a multiple of "
            f"{WIDTH_IN}. {type(module).__name__} gives heads of {width} numbers in {dtype}. Take 'sdpa'."
        )
    rows = [operand.transpose(1, 2)[0] for operand in (query, key, value)]  # (N, H or G, D)
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": window - 1}
    if window is not None and causal:
        sides["window_size_right"] = 0
    operator = torch.ops.aten._flash_attention_forward
    packed = operator(
        *rows, cu_seq_lens_q, cu_seq_lens_q, longest, longest, dropout, causal, False, scale=scaling, **sides
    )[0]
    return packed.unsqueeze(0), None


def _dtype(value: torch.Tensor) -> torch.dtype:
    """What attention computes in: autocast's, as torch's own attention, or that of the values."""
    import torch

    kind = value.device.type
    if value.dtype is torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return value.dtype


def _refuse_unknown(
    module: Any, query: torch.Tensor, mask: Any, ends: torch.Tensor | None, extra: Mapping[str, Any]
) -> None:
    name = type(module).__name__
    if ends is None or query.size(0) != 1:
        raise RecipeError(
            f"{name} does not know where sequences of a batch end, so {PADDING_FREE} would mix them. Take "
            "'sdpa' for this model; for generation, model.set_attn_implementation('sdpa')."
        )
    asked = [what for what in ("softcap", "s_aux", "position_bias") if extra.get(what) is not None]
    if mask is not None:
        asked.append("a mask of its own")
    if asked:
        raise RecipeError(
            f"{name} asks {PADDING_FREE} for {', '.join(asked)}, which it does not have. Take 'sdpa'."
        )


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    dropout: float,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """The same on a CPU, which has no such kernel: (1, H, N, D), a sequence at a time."""
    import torch

    bounds = ends.tolist()
    grouped = query.size(1) != key.size(1)
    parts = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        one, mask = slice(start, end), None
        if window is not None and window < end - start:
            mask = _window(end - start, window, causal, query.device)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, one].to(value.dtype), key[:, :, one].to(value.dtype), value[:, :, one],
                attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scaling,
                enable_gqa=grouped,
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2)


def _window(length: int, window: int, causal: bool, device: torch.device) -> torch.Tensor:
    """(S, S): which keys each query sees."""
    import torch

    places = torch.arange(length, device=device)
    apart = places[:, None] - places[None, :]
    return (apart < window) & (apart >= (0 if causal else 1 - window))


_ON_CPU: list[bool] = []


@contextlib.contextmanager
def rehearsed_on_the_cpu() -> Iterator[None]:
    """Within it, shapes go the way of a CPU."""
    _ON_CPU.append(True)
    try:
        yield
    finally:
        _ON_CPU.pop()
