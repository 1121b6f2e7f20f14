"""The longest sequence that an architecture accepts, from its config.

Learned (or tabulated) positions are limited: token `max_position_embeddings` has no row. Rotary, relative and
ALiBi positions are not. For those, `max_position_embeddings` is only the sequence length in pretraining.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snugfit.job.inputs import has_sequence, has_target

Limit = tuple[str, int]
"""Type of a limit of the sequence length: the config key, and the longest sequence in tokens."""

OFFSET_BY_PADDING = frozenset({
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod",
    "data2vec-text", "longformer", "mpnet", "ibert", "luke", "esm",
})  # fmt: skip
"""Model types whose position ids begin after the padding token's id. The first rows of their position table
are unused.
"""

WITHOUT_TABLE = frozenset({
    "m2m_100", "nllb-moe", "xglm", "fsmt", "speech_to_text", "jamba", "zamba", "nemotron_h",
})  # fmt: skip
"""Model types without a fixed table of positions: sine positions grow with the sequence, or there are no
positions.
"""


def length_problem(
    config: Mapping[str, Any], task: str, sequence_length: int, target_length: int
) -> str | None:
    """Return a sentence about a length, in tokens, that exceeds this config's number of positions; None if
    all lengths are valid.
    """
    # In a model of several parts, the text model has the positions of tokens.
    text = config.get("text_config") or config
    if has_sequence(task):
        limit = input_limit(text)
        if limit and sequence_length > limit[1]:
            return _complaint("sequence length", sequence_length, limit)
    if has_target(task):
        limit = target_limit(text)
        if limit and target_length > limit[1]:
            return _complaint("target length", target_length, limit)
    return None


def _complaint(field: str, length: int, limit: Limit) -> str:
    key, longest = limit
    return (
        f"{field} {length} is more than the model's {longest} positions (from {key}). Try {longest} or less."
    )


def input_limit(config: Mapping[str, Any]) -> Limit | None:
    """Return the config key that limits an input sequence, and the longest length in tokens; None without a
    limit.
    """
    if _endless(config):
        return None
    for key in ("max_encoder_position_embeddings", "max_position_embeddings", "n_positions"):
        rows = config.get(key)
        if isinstance(rows, int | float) and rows > 0:
            return key, int(rows) - _unused_rows(config)
    return None


def target_limit(config: Mapping[str, Any]) -> Limit | None:
    """Return the config key that limits the decoder's sequence, and the longest length in tokens; None
    without a limit.
    """
    for key in ("max_target_positions", "max_decoder_position_embeddings"):
        rows = config.get(key)
        if isinstance(rows, int | float) and rows > 0:
            return key, int(rows)
    # Most models have one position table for inputs and targets.
    return input_limit(config)


def _endless(config: Mapping[str, Any]) -> bool:
    """Return True if the model computes positions for any sequence length, so that no length is too long."""
    # These prefixes mark rotary positions: `rope_parameters` and keys of older configs.
    computed = ("rope_", "global_rope_", "rotary_pct", "rotary_emb_")
    rotary = any(key.startswith(computed) for key in config)
    # T5's relative positions have no table.
    relative = "relative_attention_num_buckets" in config and "max_position_embeddings" not in config
    # DeBERTa-v2 and later add no positions to their input.
    biased = config.get("position_biased_input") is False
    named = config.get("position_embedding_type") == "rotary" or config.get("model_type") in WITHOUT_TABLE
    return rotary or relative or biased or named or bool(config.get("alibi"))


def _unused_rows(config: Mapping[str, Any]) -> int:
    if config.get("model_type") in OFFSET_BY_PADDING:
        # The rows up to the padding token's id are never used.
        return int(config.get("pad_token_id") or 1) + 1
    return 0
