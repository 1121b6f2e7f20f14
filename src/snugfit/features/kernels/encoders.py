"""Encoders whose modules snugfit's own kernels can compute: BERT, RoBERTa, ELECTRA, DistilBERT, ViT; and
GPT-2.

Each supported module gets a forward pass over the same parameters, bound to the instance. It leaves
unsupported arguments (a cache of keys and values) to the model's own code. A linear layer that an adapter
wraps, or that has a hook, is called as the model would call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from snugfit.features.kernels.attention import attend, without_mask
from snugfit.features.kernels.operations.adapted import FusedForward
from snugfit.features.kernels.operations.add_norm import add_norm
from snugfit.features.kernels.operations.bias_gelu import bias_gelu
from snugfit.features.kernels.operations.joint_linear import is_plain, joint_linear, lay_side_by_side
from snugfit.features.kernels.operations.seeds import Seeds, checkpoint_around

SITE = "fused_site"
"""Name of the attribute that holds a module's `Site`, which gives each dropout call its seed."""

STREAM = "fused_stream"
"""Name of an attribute of a norm's result. It holds the same values in fp32, for the next residual
(`add_norm`). The model's own code passes the result from layer to layer. If that code creates another tensor
from it, that tensor is the residual.
"""

TANH_GELUS = {"GELUActivation": False, "GELU": False, "NewGELUActivation": True, "GELUTanh": True}
"""Class names of GELU activations in transformers; True for the approximation by tanh."""


@dataclass
class Site:
    """A dropout module's position in the model, from which each of its calls gets a seed for snugfit's
    dropout kernels.
    """

    seeds: Seeds
    number: int

    def draw(self, module: Any, probability: float, stream: torch.Tensor) -> dict[str, Any]:
        """Return the seed and other dropout arguments of a kernel call; empty in evaluation.

        `stream` is the incoming residual stream.
        """
        if not module.training or not probability:
            return {}
        return {"dropout": probability, "seed": self.seeds.draw(stream), "site": self.number}


@dataclass(frozen=True)
class Patch:
    """Replacement of the forward pass of one module class of transformers, with a check of the modules that
    it supports.
    """

    forward: Callable[..., Any] | None
    """Replacement of a module's forward pass; None for an encoder that only gets no mask (`attention.py`)."""
    fits: Callable[[Any], bool] = lambda module: True
    """Function that returns True if the replacement supports this module."""
    joins: tuple[str, ...] = ()
    """Names of the module's linear layers that are computed as one matrix product."""


def fuse(model: torch.nn.Module) -> list[str]:
    """Replace the forward passes of this model's supported encoder modules by snugfit's. Return the class
    names of the replaced modules.
    """
    seeds, changed = Seeds(), dict[str, None]()
    # The index of a module identifies its dropout calls, so that each draws other numbers.
    for number, module in enumerate(model.modules()):
        patch = patch_of(type(module))
        if patch is None or not patch.fits(module):
            continue
        if patch.forward is None:
            # A second hook would search for a mask that the first one has replaced.
            if SITE not in vars(module):
                module.register_forward_pre_hook(without_mask, with_kwargs=True)
            setattr(module, SITE, Site(seeds, number))
            continue
        setattr(module, SITE, Site(seeds, number))
        changed[type(module).__name__] = None
        layers = [getattr(module, name) for name in patch.joins]
        if layers and all(map(is_plain, layers)):
            lay_side_by_side([layer.weight for layer in layers])
            if layers[0].bias is not None:
                lay_side_by_side([layer.bias for layer in layers])
        module.forward = FusedForward(patch.forward, module)
    return list(changed)


def patch_of(kind: type[Any]) -> Patch | None:
    """Return the patch for a class of transformers; None for an unsupported one."""
    parts = kind.__module__.split(".")
    # Comparing names imports no model files that the process does not use.
    if parts[:2] != ["transformers", "models"] or len(parts) < 4:
        return None
    return PATCHES.get((parts[2], kind.__name__))


# ---- layers ----------------------------------------------------------------------------------------------


def product_of(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a linear layer's output without its bias, and the bias if a kernel can add it later (otherwise
    None).
    """
    if is_plain(layer):
        return torch.nn.functional.linear(x, layer.weight), layer.bias
    # GPT-2's layers are transformers' Conv1D, whose weight is transposed.
    if type(layer).__name__ == "Conv1D" and "forward" not in vars(layer):
        return torch.matmul(x, layer.weight), layer.bias
    return layer(x), None


def activate(layer: Any, activation: Any, x: torch.Tensor) -> torch.Tensor:
    """Return GELU, or another activation, of a linear layer's output."""
    product, bias = product_of(layer, x)
    by_tanh = TANH_GELUS.get(type(activation).__name__)
    # Without a bias and a GELU, the kernel has nothing to fuse.
    if by_tanh is None or bias is None:
        y: torch.Tensor = activation(product if bias is None else product + bias)
        return y
    return bias_gelu(product, bias, by_tanh=by_tanh)


def norm_with_stream(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.nn.LayerNorm, **options: Any
) -> torch.Tensor:
    """Return the norm of a residual plus a sublayer's output, (B, S, H).

    If the previous norm stored its result in fp32 (`STREAM`), that is the residual. It is removed when read,
    because the rounded result stays alive until the backward pass. Within activation checkpointing no norm
    stores one, because the checkpoint keeps a layer's input with all its attributes. It does not read one
    from a norm outside either, because the recomputed layer would not find it.
    """
    exact = vars(residual).pop(STREAM, residual)
    if checkpoint_around():
        rounded: torch.Tensor = add_norm(x, residual, norm, **options)
        return rounded
    normed: torch.Tensor
    normed, stream = add_norm(x, exact, norm, gives_stream=True, **options)
    setattr(normed, STREAM, stream)
    return normed


def is_layer_norm(*names: str) -> Callable[[Any], bool]:
    """Return a check that submodules with these names are torch's LayerNorm over the last dimension, with
    weight and bias.
    """

    def fits(module: Any) -> bool:
        norms = [getattr(module, name) for name in names]
        return all(
            type(norm) is torch.nn.LayerNorm and len(norm.normalized_shape) == 1 and norm.bias is not None
            for norm in norms
        )

    return fits


# ---- BERT and models with its structure ------------------------------------------------------------------


def embed_bert(
    self: Any,
    input_ids: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    past_key_values_length: int = 0,
) -> torch.Tensor:
    """Return the normed sum (B, S, H) of embedded words, positions and token types; draw a dropout seed."""
    words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    # RoBERTa counts positions from its padding token.
    if position_ids is None and hasattr(self, "create_position_ids_from_input_ids"):
        position_ids = (
            self.create_position_ids_from_inputs_embeds(words, self.padding_idx)
            if input_ids is None
            else self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_key_values_length)
        )
    types = self.token_type_embeddings
    if token_type_ids is not None:
        words = words + types(token_type_ids)
    places = embed_positions(self, words, position_ids, past_key_values_length)
    # All tokens have type 0, so its embedding is added to those of the positions, which are fewer.
    if token_type_ids is None:
        places = places + types.weight[0]
    return norm_embeddings(self, words, places)


def embed_distilbert(
    self: Any,
    input_ids: torch.Tensor,
    inputs_embeds: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the normed sum (B, S, H) of embedded words and positions; draw the pass's dropout seed."""
    words = inputs_embeds if input_ids is None else self.word_embeddings(input_ids)
    assert words is not None
    return norm_embeddings(self, words, embed_positions(self, words, position_ids))


def embed_positions(
    module: Any, words: torch.Tensor, position_ids: torch.Tensor | None, first: int = 0
) -> torch.Tensor:
    """Return a model's position embeddings: (S, H) if all sequences share them, else (B, S, H)."""
    table = module.position_embeddings
    if position_ids is None:
        weight: torch.Tensor = table.weight[first : first + words.size(1)]
        return weight
    places: torch.Tensor = table(position_ids)
    # Position embeddings that are equal for all samples are repeated by the kernel.
    return places[0] if places.size(0) == 1 else places


def embeds_plainly(module: Any) -> bool:
    """Return True if an embeddings module has only an unmodified `LayerNorm` and unmodified
    `torch.nn.Embedding` tables.
    """
    tables = [table for name, table in module.named_children() if name.endswith("_embeddings")]
    return is_layer_norm("LayerNorm")(module) and all(type(table) is torch.nn.Embedding for table in tables)


def norm_embeddings(module: Any, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return dropout of the norm of words plus positions: (B, S, H)."""
    site: Site = getattr(module, SITE)
    # The embedding is the first module of a forward pass, so a new seed is drawn here.
    site.seeds.begin()
    drop = site.draw(module, module.dropout.p, words)
    return norm_with_stream(words, places, module.LayerNorm, drops_last=True, **drop)


def attend_bert(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **keywords: Any,
) -> Any:
    """Compute BERT's self-attention (B, S, H), with queries, keys and values from one matrix product."""
    # Caches are for generation, which runs the model's own code.
    if past_key_values is not None:
        return type(self).forward(
            self, hidden_states, attention_mask, past_key_values=past_key_values, **keywords
        )
    heads = project((self.query, self.key, self.value), hidden_states, self.attention_head_size)
    return attend(self, heads, attention_mask, self.dropout.p, self.scaling, keywords)


def project(layers: Sequence[Any], x: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Return queries, keys and values (B, heads, S, width) of linear layers over (B, S, H).

    They come from one matrix product if all layers are torch's own.
    """
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    # A joint bias requires a bias in every layer.
    if not all(map(is_plain, layers)) or len(biases) not in (0, len(layers)):
        results: Iterable[torch.Tensor] = [layer(x) for layer in layers]
    else:
        results = joint_linear(x, [layer.weight for layer in layers], biases)
    return [result.view(*x.shape[:-1], -1, width).transpose(1, 2) for result in results]


def close_bert(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    """Compute the end of a BERT sublayer: the norm of the residual plus a linear layer's output after
    dropout.
    """
    product, bias = product_of(self.dense, hidden_states)
    drop = getattr(self, SITE).draw(self, self.dropout.p, input_tensor)
    return norm_with_stream(product, input_tensor, self.LayerNorm, bias=bias, **drop)


def widen_bert(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the activated output (B, S, I) of BERT's first feed-forward layer."""
    return activate(self.dense, self.intermediate_act_fn, hidden_states)


# ---- DistilBERT ------------------------------------------------------------------------------------------


def attend_distilbert(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **keywords: Any
) -> Any:
    """Compute DistilBERT's attention (B, S, H), with queries, keys and values from one matrix product."""
    heads = project((self.q_lin, self.k_lin, self.v_lin), hidden_states, self.attention_head_size)
    out, scores = attend(self, heads, attention_mask, self.dropout.p, self.scaling, keywords)
    return self.out_lin(out), scores


def run_distilbert_layer(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **keywords: Any
) -> torch.Tensor:
    """Run a DistilBERT layer over (B, S, H): attention and feed-forward, each with a fused residual and
    norm."""
    attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **keywords)
    hidden = norm_with_stream(attended, hidden_states, self.sa_layer_norm)
    ffn = self.ffn
    product, bias = product_of(ffn.lin2, activate(ffn.lin1, ffn.activation, hidden))
    drop = getattr(self, SITE).draw(self, ffn.dropout.p, hidden_states)
    return norm_with_stream(product, hidden, self.output_layer_norm, bias=bias, **drop)


# ---- models that norm before a layer: ViT, GPT-2 ---------------------------------------------------------


def embed_vit(self: Any, *arguments: Any, **keywords: Any) -> Any:
    """Run the ViT model's own embeddings of an image, and draw the seed of the pass's dropout."""
    getattr(self, SITE).seeds.begin()
    return type(self).forward(self, *arguments, **keywords)


def attend_vit(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **keywords: Any
) -> Any:
    """Compute ViT's attention (B, S, H), with queries, keys and values from one matrix product."""
    heads = project((self.q_proj, self.k_proj, self.v_proj), hidden_states, self.head_dim)
    out, scores = attend(self, heads, attention_mask, self.attention_dropout, self.scaling, keywords)
    return self.o_proj(out), scores


def run_vit_layer(
    self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **keywords: Any
) -> torch.Tensor:
    """Run a ViT layer over (B, S, H); the second norm is fused with the first residual."""
    normed = add_norm(hidden_states, None, self.layernorm_before)
    attended, _ = self.attention(normed, attention_mask, **keywords)
    drop = getattr(self, SITE).draw(self, self.dropout.p, hidden_states)
    normed, hidden = add_norm(attended, hidden_states, self.layernorm_after, gives_sum=True, **drop)
    # The second residual is added before the norm of the next layer, which is in another module.
    closed: torch.Tensor = self.dropout(self.mlp(normed)) + hidden
    return closed


def run_vit_mlp(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return a ViT layer's feed-forward output (B, S, H), before dropout and residual."""
    closed: torch.Tensor = self.fc2(activate(self.fc1, self.activation_fn, hidden_states))
    return closed


def run_gpt2_layer(
    self: Any,
    hidden_states: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    use_cache: bool | None = False,
    **keywords: Any,
) -> torch.Tensor:
    """Run a GPT-2 layer without cross-attention over (B, S, H); the second norm is fused with the first
    residual."""
    normed = add_norm(hidden_states, None, self.ln_1)
    attended, _ = self.attn(
        normed,
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        use_cache=use_cache,
        **keywords,
    )
    normed, hidden = add_norm(attended, hidden_states, self.ln_2, gives_sum=True)
    closed: torch.Tensor = hidden + self.mlp(normed)
    return closed


def run_gpt2_mlp(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return a GPT-2 layer's feed-forward output (B, S, H), before dropout and residual."""
    closed: torch.Tensor = self.dropout(self.c_proj(activate(self.c_fc, self.act, hidden_states)))
    return closed


def _like_bert(family: str, prefix: str) -> dict[tuple[str, str], Patch]:
    normed = is_layer_norm("LayerNorm")
    return {
        (family, f"{prefix}Model"): Patch(None),
        (family, f"{prefix}Embeddings"): Patch(embed_bert, embeds_plainly),
        (family, f"{prefix}SelfAttention"): Patch(attend_bert, joins=("query", "key", "value")),
        (family, f"{prefix}SelfOutput"): Patch(close_bert, normed),
        (family, f"{prefix}Intermediate"): Patch(widen_bert),
        (family, f"{prefix}Output"): Patch(close_bert, normed),
    }


PATCHES: dict[tuple[str, str], Patch] = {
    **_like_bert("bert", "Bert"),
    **_like_bert("roberta", "Roberta"),
    **_like_bert("electra", "Electra"),
    ("distilbert", "DistilBertModel"): Patch(None),
    ("distilbert", "Embeddings"): Patch(embed_distilbert, embeds_plainly),
    ("distilbert", "DistilBertSelfAttention"): Patch(attend_distilbert, joins=("q_lin", "k_lin", "v_lin")),
    ("distilbert", "TransformerBlock"): Patch(
        run_distilbert_layer, is_layer_norm("sa_layer_norm", "output_layer_norm")
    ),
    ("vit", "ViTEmbeddings"): Patch(embed_vit),
    ("vit", "ViTAttention"): Patch(attend_vit, joins=("q_proj", "k_proj", "v_proj")),
    ("vit", "ViTLayer"): Patch(run_vit_layer, is_layer_norm("layernorm_before", "layernorm_after")),
    ("vit", "ViTMLP"): Patch(run_vit_mlp),
    ("gpt2", "GPT2Block"): Patch(
        run_gpt2_layer, lambda one: not hasattr(one, "crossattention") and is_layer_norm("ln_1", "ln_2")(one)
    ),
    ("gpt2", "GPT2MLP"): Patch(run_gpt2_mlp),
}
"""Replacements of forward passes, by folder and class name in transformers."""
