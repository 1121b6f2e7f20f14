"""Small models that generate text: one for each kind of cache and of layer."""

from __future__ import annotations

from typing import Any

from small_models import FAMILIES
from snugfit.job.config import check_facts
from snugfit.job.job import Job
from snugfit.job.model import Model

_WIDE = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 96}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
_ENCODER = {
    "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 96, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, **_HEADS,
}  # fmt: skip

GENERATING: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({**FAMILIES["gpt2"][0], "n_layer": 2, "n_positions": 512}, "causal-lm"),
    "llama": ({**_GROUPED, "num_hidden_layers": 2}, "causal-lm"),
    # With short prompts, the window is full after some new tokens.
    "mistral": ({**_GROUPED, "num_hidden_layers": 2, "sliding_window": 32}, "causal-lm"),
    "gemma3_text": (
        {
            **_GROUPED, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "causal-lm",
    ),
    "lfm2": ({**_GROUPED, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "causal-lm"),
    "mamba2": (
        {
            "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1,
            "vocab_size": 96, "num_hidden_layers": 2, "chunk_size": 16,
        },
        "causal-lm",
    ),
    "qwen3_next": (
        {
            **_GROUPED, "num_hidden_layers": 2, "head_dim": 16, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
        },
        "causal-lm",
    ),
    "mixtral": ({**_GROUPED, "num_hidden_layers": 2, "num_local_experts": 4}, "causal-lm"),
    "deepseek_v3": (
        {
            **_WIDE, "num_hidden_layers": 2, "num_key_value_heads": 4, "moe_intermediate_size": 32,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
        },
        "causal-lm",
    ),
    "t5": ({**FAMILIES["t5"][0], "num_layers": 2, "num_decoder_layers": 2}, "seq2seq-lm"),
    "bart": (
        {**_ENCODER, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 256},
        "seq2seq-lm",
    ),
    "whisper": (
        {
            **_ENCODER, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16,
            "max_source_positions": 24, "max_target_positions": 128,
        },
        "speech-to-text",
    ),
}  # fmt: skip
"""Config and task of small models that generate, by transformers' model type."""

ENCODED = ("t5", "bart", "whisper")
"""Model types with an encoder."""


def generating_job(
    family: str,
    *,
    prompt: int = 12,
    batch_size: int = 3,
    facts: dict[str, Any] | None = None,
    **settings: Any,
) -> Job:
    """Return a job that generates with a small model of this family."""
    config, task = GENERATING[family]
    checked = check_facts({"model_type": family, **config, **(facts or {})}, where=family)
    return Job(
        model=Model.from_config(checked, name=family),
        task=task,  # type: ignore[arg-type]
        phase="generate",  # type: ignore[arg-type]
        phase_settings={"new_tokens": 6, **settings},
        batch_size=batch_size,
        sequence_length=prompt,
    )
