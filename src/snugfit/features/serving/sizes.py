"""Dimensions of a model that determine the memory of an inference server, from its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snugfit.errors import ModelError, one_line
from snugfit.features.serving.architecture import served_config
from snugfit.job.model import Model

ATTENTION = ("full_attention", "attention", "hybrid")
SLIDING = ("sliding_attention", "chunked_attention")
STATEFUL = ("linear_attention", "mamba", "conv", "hybrid", "recurrent")
"""Parts of the names in transformers' `layer_types` of layers with a state. Other kinds, such as `mlp`, have
no cache.
"""

DEFAULT_LENGTH = 2048
"""Default sequence length in tokens in vLLM and sglang for a config without positions (vllm 0.19,
`_get_and_verify_max_len` of `config/model.py`; sglang 0.5.9, `get_context_length`).
"""

FAST_LENGTHS = ("linear", "dynamic")
"""Types of rotary scaling for which `max_position_embeddings` is the length before scaling."""


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Elements in one layer's key-value cache on one rank. Their bytes follow from the cache's dtype."""

    token_numbers: int = 0
    """Cached elements per token: keys and values, or MLA's latent vector; 0 for a layer with a state only."""

    window: int | None = None
    """Number of tokens that the layer attends to (sliding window); None for all."""

    state_numbers: int = 0
    """Cached elements per sequence, independent of its length: states of Mamba, convolutions or linear
    attention.
    """


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Dimensions of a model that determine its memory on one rank, such as widths and numbers of heads."""

    hidden: int
    """Width of the hidden states."""

    vocabulary: int
    """Number of words in the vocabulary, the width of the logits."""

    intermediate: int
    """Width of the largest dense MLP, before it is divided over ranks."""

    heads: int
    """Number of query heads over all ranks; 0 for a model without attention."""

    key_heads: int
    """Number of key heads over all ranks; 0 for MLA and for a model without attention."""

    longest: int | None
    """Largest sequence length in tokens by the config; None without a limit."""

    experts_per_token: int
    """Number of experts that compute each token; 0 without experts."""

    expert_width: int
    """Width of one expert's MLP, before it is divided over ranks."""

    multimodal: bool
    """True if the model has an encoder for images or sound."""

    position_numbers: int
    """Number of elements in the tables of rotary positions, which an engine computes at its start."""

    absorbed_numbers: int
    """Number of elements in the second copies of MLA's projections, which an engine derives from the weights.
    """

    layers: tuple[LayerCache, ...]
    """Cache sizes of the layers that have a cache."""


def read_sizes(model: Model, tensor_parallel: int) -> ModelSizes:
    """Return the dimensions of a model on one of `tensor_parallel` ranks. Raises `ModelError` for a model
    without a decoder.
    """
    config = served_config(model)
    try:
        return _sizes_of(config, tensor_parallel)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, OverflowError) as fault:
        raise ModelError(
            f"{model.name}: the sizes of its cache cannot be read from its config: {one_line(fault, 200)}. "
            "Correct the config.json, or name another model."
        ) from None


def _sizes_of(config: Any, tensor_parallel: int) -> ModelSizes:
    text = config.get_text_config()
    heads = _first(text, "num_attention_heads", "n_head", "n_heads")
    experts = _first(text, "num_local_experts", "n_routed_experts", "num_experts")
    per_token = _first(text, "num_experts_per_tok", "moe_topk", "top_k_experts") if experts else 0
    intermediate = _first(text, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    hidden = _first(text, "hidden_size", "n_embd", "d_model")
    return ModelSizes(
        hidden=hidden,
        vocabulary=_first(text, "vocab_size"),
        # For architectures without the key, the MLP is four times as wide (GPT-2, Falcon, BLOOM).
        intermediate=intermediate or 4 * hidden,
        heads=heads,
        key_heads=0 if getattr(text, "kv_lora_rank", None) else _key_heads(text),
        longest=_first(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length") or None,
        experts_per_token=per_token,
        expert_width=_first(text, "moe_intermediate_size", "intermediate_size") if per_token else 0,
        multimodal=any(hasattr(config, key) for key in ("vision_config", "audio_config")),
        position_numbers=_position_numbers(text),
        absorbed_numbers=_absorbed_numbers(text) // tensor_parallel,
        layers=layer_caches(text, tensor_parallel),
    )


def layer_caches(config: Any, tensor_parallel: int) -> tuple[LayerCache, ...]:
    """Return the key-value cache sizes of each layer of a text config, on one of `tensor_parallel` ranks."""
    count = _first(config, "num_hidden_layers", "n_layer", "n_layers")
    kinds: Sequence[str] = getattr(config, "layer_types", None) or _kinds_without_list(config, count)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    attention = _attention_numbers(config, tensor_parallel)
    caches = []
    for kind in kinds:
        attends = kind in ATTENTION or kind in SLIDING
        state = _state_numbers(config, kind) // tensor_parallel if kind in STATEFUL else 0
        if attends or state:
            caches.append(
                LayerCache(
                    token_numbers=attention if attends else 0,
                    window=window if kind in SLIDING else None,
                    state_numbers=state,
                )
            )
    return tuple(caches)


def _kinds_without_list(config: Any, count: int) -> list[str]:
    """Return the type of each layer (attention, window, Mamba, ...) of an architecture whose config does not
    list them.
    """
    # Mistral and Phi-3 have one window for all layers. Mixtral's config has the key without a value.
    return ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * count


def _attention_numbers(config: Any, tensor_parallel: int) -> int:
    """Return the number of elements that one token adds to an attention layer's cache on one rank.

    MLA caches one latent vector and one rotary key for all heads, on every rank (DeepSeek-V2,
    arXiv:2405.04434, section 2.1). Otherwise the cache has the key and value heads, divided over the ranks,
    each rank at least one.
    """
    if latent := getattr(config, "kv_lora_rank", None):
        return int(latent) + int(config.qk_rope_head_dim)
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    if not heads:
        return 0
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    width = _first(config, "head_dim", "attention_head_dim") or hidden // heads
    return 2 * max(1, _key_heads(config) // tensor_parallel) * width


def _key_heads(config: Any) -> int:
    """Return the number of key and value heads over all ranks. Without one in the config, it is that of query
    heads.
    """
    # Older configs set a single key head by a switch, which Falcon's newer architecture ignores.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return _first(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head", "n_heads")


def _state_numbers(config: Any, kind: str) -> int:
    """Return the number of elements in one layer's recurrent state for one sequence, over all ranks.

    Mamba keeps a window of its convolution and a state per channel (arXiv:2312.00752, section 3.4), Mamba 2 a
    matrix per head (arXiv:2405.21060, section 7). Gated linear attention keeps keys times values per head
    (arXiv:2412.06464). LFM2 keeps the window of its convolution only.
    """
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    if window := _first(config, "conv_L_cache"):
        return hidden * (window - 1)
    if heads := _first(config, "linear_num_value_heads"):
        keys, width = (
            int(config.linear_num_key_heads) * int(config.linear_key_head_dim),
            int(config.linear_value_head_dim),
        )
        channels = 2 * keys + heads * width
        matrix = heads * int(config.linear_key_head_dim) * width
        return channels * (int(config.linear_conv_kernel_dim) - 1) + matrix
    state = _first(config, "mamba_d_state", "ssm_state_size", "state_size")
    window = _first(config, "mamba_d_conv", "conv_kernel")
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    width = _first(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim") or (
        _first(config, "head_dim") if hasattr(config, "num_heads") else 0
    )
    if heads and width:
        inner = heads * width
        groups = _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
        return (inner + 2 * groups * state) * (window - 1) + inner * state
    if state:
        inner = _first(config, "mamba_expand", "expand") * hidden
        return inner * (window - 1) + inner * state
    raise ModelError(
        f"Layers of kind {kind!r} of {config.model_type} keep a state whose size is unknown here. Allowed "
        "are Mamba, Mamba 2, gated linear attention and LFM2. Try another model."
    )


def _position_numbers(config: Any) -> int:
    """Return the number of elements in the tables of rotary positions: cosines and sines of each distinct
    rotation.

    vLLM's `RotaryEmbeddingBase` computes them for `max_position_embeddings`; linear and dynamic scaling
    multiply this length by the factor (vllm 0.19, `base.py`, `linear_scaling_rope.py` and
    `dynamic_ntk_scaling_rope.py` in `model_executor/layers/rotary_embedding`). The second table of longrope,
    of the original length, is not counted.
    """
    given = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in given.values() if isinstance(entry, dict)]
    longest = _first(config, "max_position_embeddings")
    heads = _first(config, "num_attention_heads", "n_head") or 1
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    width = _first(config, "qk_rope_head_dim", "head_dim") or hidden // heads
    tables = {}
    for rope in nested or [given] * bool(given):
        factor = rope.get("factor") or 1.0
        length = int(longest * factor) if rope.get("rope_type") in FAST_LENGTHS else longest
        rotated = int(width * (rope.get("partial_rotary_factor") or 1.0))
        tables[(rope.get("rope_theta"), rope.get("rope_type"), factor)] = length * rotated
    return sum(tables.values())


def _absorbed_numbers(config: Any) -> int:
    """Return the number of elements of MLA's projections of which vLLM keeps a second, transposed copy for
    decoding.

    Source: vllm 0.19, `MLAAttention.process_weights_after_loading` of
    `model_executor/layers/attention/mla_attention.py`, which keeps `W_UV` and `W_UK_T`. For quantized weights
    they are copies. For 16-bit weights they are views in the source. But the published weights of
    DeepSeek-V2-Lite are larger than without a copy.
    """
    if not (latent := getattr(config, "kv_lora_rank", None)):
        return 0
    per_head = int(config.qk_nope_head_dim) + int(config.v_head_dim)
    return int(config.num_hidden_layers) * int(config.num_attention_heads) * per_head * int(latent)


def _first(config: Any, *names: str) -> int:
    """Return the first integer that a config has under one of these keys; 0 if there is none."""
    for name in names:
        value = getattr(config, name, None)
        # Some configs have a size for each layer. The largest one decides the memory.
        if isinstance(value, list | tuple) and value and all(isinstance(token, int) for token in value):
            return int(max(value))
        if isinstance(value, int) and not isinstance(value, bool) and value:
            return value
    return 0
