"""Modules of decoders that snugfit's kernels can compute, each with the names in which its copies differ.

One description covers all classes of transformers with that code (`same_code.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from snugfit.features.kernels.decoders.same_code import parts_of
from snugfit.features.kernels.operations.scaling import Scaling

SLIDING, CAPPED, SINKS = "sliding_window", "attn_logit_softcapping", "sinks"

THREE = ("q_proj", "k_proj", "v_proj")


class AttentionForm(NamedTuple):
    """Properties in which attention modules differ."""

    extras: tuple[str, ...] = ()
    """Attributes of the module, or of its config, that it passes to the attention function."""
    layers: tuple[str, ...] = THREE
    """Names of the linear layers whose results are queries, keys and values in turn."""
    rotates: str = ""
    """Name of the attribute that is true in layers with rotation; empty if all layers rotate."""
    norms_heads: bool = False
    """True if queries and keys of each head are normed before the rotation, in modules with such norms."""
    interleaved: bool = False
    """True if neighbouring columns of a head are rotated into each other, and not its halves."""
    shared_angles: bool = False
    """True if the rotary angles have one column for two columns of a head."""
    gated: bool = False
    """True if a gate follows each query head, whose sigmoid multiplies the head's output."""
    dropout: str = ""
    """Name of the attribute with the probability that an element of the output is dropped; empty without."""


class MLPForm(NamedTuple):
    """Names of a gated MLP's parts."""

    layers: tuple[str, ...]
    """Names of the linear layers whose results are gate and up in turn."""
    activation: str


class LayerForm(NamedTuple):
    """Names of a decoder layer's norms and other modules around attention and MLP; empty where none is."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    dropouts: tuple[str, str] = ("", "")
    """Names of the modules that drop elements of the outputs of attention and MLP."""
    multiplier: str = ""
    """Name of the attribute by which both outputs are multiplied."""


ATTENTIONS: Mapping[str, AttentionForm] = {
    "llama.LlamaAttention": AttentionForm(),
    "qwen2.Qwen2Attention": AttentionForm((SLIDING,)),
    "qwen3.Qwen3Attention": AttentionForm((SLIDING,), norms_heads=True),
    "mistral.MistralAttention": AttentionForm((SLIDING,)),
    "gemma2.Gemma2Attention": AttentionForm((SLIDING, CAPPED)),
    "gemma3.Gemma3Attention": AttentionForm((SLIDING,), norms_heads=True),
    "phi3.Phi3Attention": AttentionForm((SLIDING,), ("qkv_proj",)),
    "smollm3.SmolLM3Attention": AttentionForm((SLIDING,), rotates="use_rope"),
    "glm4.Glm4Attention": AttentionForm(interleaved=True),
    "helium.HeliumAttention": AttentionForm(interleaved=True),
    "ernie4_5.Ernie4_5Attention": AttentionForm(interleaved=True),
    "nemotron.NemotronAttention": AttentionForm(),
    "apertus.ApertusAttention": AttentionForm(norms_heads=True),
    "qwen3_5.Qwen3_5Attention": AttentionForm(norms_heads=True, gated=True),
    "gpt_oss.GptOssAttention": AttentionForm((SLIDING, SINKS), shared_angles=True),
    "granite_swa.GraniteSWAAttention": AttentionForm((SLIDING, SINKS)),
    "exaone4.Exaone4Attention": AttentionForm((SLIDING,), rotates="is_sliding", norms_heads=True),
    "glm4_moe.Glm4MoeAttention": AttentionForm(norms_heads=True),
    "seed_oss.SeedOssAttention": AttentionForm(dropout="residual_dropout"),
    "starcoder2.Starcoder2Attention": AttentionForm((SLIDING,), dropout="residual_dropout"),
}
"""Supported attention modules of transformers by file and class."""

MLPS: Mapping[str, MLPForm] = {
    "llama.LlamaMLP": MLPForm(("gate_proj", "up_proj"), "act_fn"),
    "phi3.Phi3MLP": MLPForm(("gate_up_proj",), "activation_fn"),
}
"""Supported gated MLPs of transformers by file and class."""

LAYERS: Mapping[str, LayerForm] = {
    "llama.LlamaDecoderLayer": LayerForm(),
    "mixtral.MixtralDecoderLayer": LayerForm(),
    "phi3.Phi3DecoderLayer": LayerForm(dropouts=("resid_attn_dropout", "resid_mlp_dropout")),
    "granite.GraniteDecoderLayer": LayerForm(multiplier="residual_multiplier"),
    "gemma2.Gemma2DecoderLayer": LayerForm(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    "glm4.Glm4DecoderLayer": LayerForm(
        after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
    ),
    "olmo2.Olmo2DecoderLayer": LayerForm("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
}
"""Supported decoder layers of transformers by file and class."""

RMS_NORMS: Mapping[str, Scaling] = {
    "llama.LlamaRMSNorm": Scaling.ROUNDED,
    "gemma.GemmaRMSNorm": Scaling.FROM_ONE,
    "olmo2.Olmo2RMSNorm": Scaling.UNROUNDED,
    "gemma4.Gemma4RMSNorm": Scaling.UNROUNDED,
}
"""Supported norms of transformers by file and class."""

FORMS: Mapping[str, Mapping[str, Any]] = {
    "Attention": ATTENTIONS, "MLP": MLPS, "DecoderLayer": LAYERS, "RMSNorm": RMS_NORMS,
}  # fmt: skip
"""Supported modules by the end of their class names."""


def fused_parts(model_type: str) -> frozenset[str]:
    """Return the parts of a model type's decoder layers that have kernels, as ends of class names; empty if
    there are only norms. `Experts` is one of them if the file has experts.
    """
    parts = parts_of(model_type, FORMS)
    return parts if parts & {"Attention", "MLP", "DecoderLayer"} else frozenset()
