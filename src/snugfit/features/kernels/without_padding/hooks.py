"""Forward hooks with which a model drops the padding of its inputs, in any training loop.

Modules that process each token alone do the same for fewer tokens. Attention reads other tokens, and stops at
the ends of sequences (`attention.py`). The head of an encoder that classifies sequences reads their first
tokens, so its layers return these alone.

A batch that is on the device already is converted to a row there. The host then waits to read the number of
tokens.

A loop that reads outputs besides the loss gets them in its own shape. Logits are scattered to (B, S) in
evaluation, and in loops that compute the loss outside of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from snugfit.errors import RecipeError
from snugfit.features.kernels.attentions import PADDING_FREE
from snugfit.features.kernels.without_padding.rows import COUNT, RowRules, without_padding

if TYPE_CHECKING:
    import torch


def drop_padding(model: torch.nn.Module) -> None:
    """Make this model's forward pass drop the padding of its inputs."""
    if model not in _HOOKS:
        rules = RowRules.of(model)
        hooks = _PaddingHooks(rules)
        handles = [
            model.register_forward_pre_hook(hooks.pack, with_kwargs=True),
            model.register_forward_hook(hooks.unpack, with_kwargs=True),
        ]
        # The head only reads first tokens, so the layers return only these.
        if rules.pools_first:
            layers = _layers_of(model)
            handles.append(layers.register_forward_hook(keep_first_tokens, with_kwargs=True))
        _HOOKS[model] = tuple(handles)


def keep_padding(model: torch.nn.Module) -> None:
    """Stop dropping the padding of this model's inputs."""
    for hook in _HOOKS.pop(model, ()):
        hook.remove()


_HOOKS: WeakKeyDictionary[torch.nn.Module, tuple[Any, ...]] = WeakKeyDictionary()


class _PaddingHooks:
    """Forward hooks that drop the padding of one model's inputs and restore its outputs' shape."""

    def __init__(self, rules: RowRules) -> None:
        self._rules = rules
        # Shape of the last batch, to which its logits are restored.
        self._spread: tuple[torch.Size, torch.Tensor | None] | None = None

    def pack(self, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of the model's forward pass, with the batch as one row without padding."""
        import torch

        # After a failed pass, the shape of its batch must not remain.
        self._spread = None
        if keywords.get("cu_seq_lens_q") is not None:  # one row already: from the loop, a collator,
            return args, keywords  # or the hooks of a model's copy
        if args or not torch.is_tensor(keywords.get("input_ids")):
            raise RecipeError(
                f"{PADDING_FREE} takes batches of input_ids by name: model(input_ids=..., "
                "attention_mask=..., labels=...). Take 'sdpa' for others."
            )
        packed, places = without_padding(keywords, self._rules)
        # A loop without labels, or in evaluation, reads logits in the batch's shape.
        whole_logits = not model.training or keywords.get("labels") is None
        if whole_logits and not self._rules.pools_first:
            self._spread = (keywords["input_ids"].shape, places)
        return args, packed

    def unpack(self, model: Any, args: Any, keywords: Any, out: Any) -> Any:
        """Return the model's output, with its logits in the original shape of the batch."""
        spread, self._spread = self._spread, None
        if spread is not None and getattr(out, "logits", None) is not None:
            (batch, length), places = spread
            tokens = out.logits[0]  # (N, V)
            if places is not None:
                # Logits of padding are zeros, which no loss reads.
                tokens = tokens.new_zeros(batch * length, tokens.size(-1)).index_copy(0, places, tokens)
            out.logits = tokens.view(batch, length, -1)
        return out


def _layers_of(model: Any) -> torch.nn.Module:
    """Return the module with all layers of an encoder, by transformers' names for it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    body = getattr(base, base.base_model_prefix)
    layers: torch.nn.Module | None = getattr(body, "encoder", None) or getattr(body, "transformer", None)
    if layers is None:
        raise RecipeError(
            f"{PADDING_FREE} does not find the layers of {type(base).__name__}. Write 'sdpa' in place of "
            f"'{PADDING_FREE}', the recipe's attention."
        )
    return layers


def keep_first_tokens(layers: Any, args: Any, keywords: dict[str, Any], out: Any) -> Any:
    """Replace an encoder's output, a row (1, N, H), by the first token of each sequence, (B, 1, H), for the
    head. It is a forward hook of the layers.
    """
    ends = keywords.get("cu_seq_lens_q")
    tokens = out.last_hidden_state
    if ends is not None and tokens.size(0) == 1:
        # The filling of a captured step's row has sequences that do not belong to the batch.
        count = keywords.get(COUNT, ends.numel() - 1)
        out.last_hidden_state = tokens[0].index_select(0, ends[:count]).unsqueeze(1)
    return out
