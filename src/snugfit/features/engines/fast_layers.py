"""Forward passes of transformers' encoder layers, such as BERT's, by one operator of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PADDING_MASK = 1
"""Value of the mask type in `torch._transformer_encoder_layer_fwd` for a padding mask with one row per
sample."""


def use_fast_layers(model: Any) -> int:
    """Replace the forward pass of each encoder layer like BERT's by one operator. Return the number of
    replaced layers.

    The weights of query, key and value become views of one matrix, so that they take no additional memory.
    Padding at the end of samples is left out. The first layer makes a nested tensor of the samples, and the
    last one pads it with zeros.
    """
    activation = getattr(model.config, "hidden_act", "")
    if activation not in ("gelu", "relu") or getattr(model.config, "is_decoder", False):
        return 0
    layers = [module for module in model.modules() if _is_like_bert(module)]
    for layer in layers:
        layer.forward = _fast_forward(layer, layers, use_gelu=activation == "gelu")
    return len(layers)


def _is_like_bert(module: Any) -> bool:
    """Return True if a layer has the parts of `BertLayer`: attention, its output, and an MLP."""
    names = (
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
        "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
    )  # fmt: skip
    # The model above a layer is no match, because only a layer has the attention as a direct child.
    return all(_part(module, name) is not None for name in names) and not hasattr(module, "crossattention")


def _part(module: Any, name: str) -> Any:
    for step in name.split("."):
        module = getattr(module, step, None)
    return module


def _fast_forward(layer: Any, layers: Sequence[Any], *, use_gelu: bool) -> Any:
    """Return a forward pass that computes these layers by torch's operator."""
    import torch

    attention, first, second = layer.attention.self, layer.attention.output, layer.output
    weight, bias = _join_weights(attention, "weight"), _join_weights(attention, "bias")
    heads = attention.num_attention_heads

    def forward(
        hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *_: Any, **__: Any
    ) -> torch.Tensor:
        mask = _padding_of(attention_mask)
        if mask is not None and layer is layers[0] and _is_at_the_end(hidden_states, mask, heads):
            hidden_states = torch._nested_tensor_from_mask(hidden_states, ~mask, mask_check=False)
        shape = None if mask is None else (*mask.shape, weight.shape[1])
        if hidden_states.is_nested:
            mask = None
        out: torch.Tensor = torch._transformer_encoder_layer_fwd(
            hidden_states, weight.shape[1], heads, weight, bias,
            first.dense.weight, first.dense.bias, use_gelu, False, first.LayerNorm.eps,
            first.LayerNorm.weight, first.LayerNorm.bias, second.LayerNorm.weight, second.LayerNorm.bias,
            layer.intermediate.dense.weight, layer.intermediate.dense.bias,
            second.dense.weight, second.dense.bias,
            mask, None if mask is None else PADDING_MASK,
        )  # fmt: skip
        if out.is_nested and layer is layers[-1]:
            out = torch.nested.to_padded_tensor(out, 0.0, shape)
        return out

    return forward


def _is_at_the_end(hidden: torch.Tensor, padding: torch.Tensor, heads: int) -> bool:
    """Return True if the padding follows the tokens of each sample; torch also needs an even number of
    heads.
    """
    import torch

    return heads % 2 == 0 and torch._nested_tensor_from_mask_left_aligned(hidden, ~padding)


def _join_weights(attention: Any, kind: str) -> torch.Tensor:
    """Join the weights or biases of query, key and value in one tensor and return it; the originals become
    views of it.
    """
    import torch

    parts = [getattr(getattr(attention, name), kind) for name in ("query", "key", "value")]
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.chunk(3), strict=True):
        part.data = view
    return whole


def _padding_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Convert transformers' attention mask to one with True for each padded key; None without a mask."""
    import torch

    if mask is None:
        return None
    # All queries of an encoder have the same mask of keys, so one row contains all of it.
    row = mask[:, 0, -1]
    return ~row if row.dtype is torch.bool else row < 0
