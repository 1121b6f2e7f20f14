"""Small models of several families, for laws that compare one rehearsal with another."""

from __future__ import annotations

from typing import Any

from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model

_WIDE = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}

FAMILIES: dict[str, tuple[dict[str, Any], Task, tuple[str, ...]]] = {
    "bert": (
        {**_WIDE, "intermediate_size": 128, "max_position_embeddings": 32},
        Task.SEQUENCE_CLASSIFICATION,
        ("num_hidden_layers",),
    ),
    "gpt2": (
        {
            "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 96, "bos_token_id": 0,
            "eos_token_id": 0,
        },
        Task.CAUSAL_LM,
        ("n_layer",),
    ),
    "llama": (
        {**_WIDE, "intermediate_size": 112, "num_key_value_heads": 2},
        Task.CAUSAL_LM,
        ("num_hidden_layers",),
    ),
    "t5": (
        {
            "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 96,
            "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        },
        Task.SEQ2SEQ_LM,
        ("num_layers", "num_decoder_layers"),
    ),
    "vit": (
        {
            "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
            "patch_size": 8,
        },
        "image-classification",
        ("num_hidden_layers",),
    ),
    "mixtral": (
        {**_WIDE, "intermediate_size": 96, "num_key_value_heads": 2, "num_local_experts": 4},
        Task.CAUSAL_LM,
        ("num_hidden_layers",),
    ),
    "gemma2": (
        {
            **_WIDE, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
        },
        Task.CAUSAL_LM,
        ("num_hidden_layers",),
    ),
    "modernbert": (
        {
            **_WIDE, "intermediate_size": 96, "global_attn_every_n_layers": 3, "local_attention": 8,
            "pad_token_id": 0, "max_position_embeddings": 32, "cls_token_id": 1, "sep_token_id": 2,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        Task.MASKED_LM,
        ("num_hidden_layers",),
    ),
    "qwen2": (
        {**_WIDE, "intermediate_size": 96, "num_key_value_heads": 2},
        Task.CAUSAL_LM,
        ("num_hidden_layers",),
    ),
}  # fmt: skip
"""Config, task, and the keys for the number of layers, by transformers' name."""


def small_job(family: str, layers: int = 4, facts: dict[str, Any] | None = None, **changes: Any) -> Job:
    """Return a job on a small model of this family with this many layers."""
    config, task, keys = FAMILIES[family]
    whole = {"model_type": family, **config, **dict.fromkeys(keys, layers), **(facts or {})}
    model = Model.from_config(check_facts(whole, where=family), name=family)
    given: dict[str, Any] = {"batch_size": 4, "sequence_length": 16, "target_length": 8} | changes
    return Job(model=model, task=task, **given)
