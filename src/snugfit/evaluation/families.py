"""Model families that jobs are drawn from: for each a bundled preset, and which of its sizes may be drawn.

Everything else (activation, norms, biases, dropout, soft caps, sliding windows, tied weights) stays as the
preset has it, so a drawn model is one that its authors might have trained in another size.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from snugfit.job.job import Task

TEXT_HEADS = (Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
ENCODER = (*TEXT_HEADS, Task.MASKED_LM)
DECODER = (*TEXT_HEADS, Task.CAUSAL_LM)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture, with the config keys of its sizes and the range of each."""

    name: str
    """As the draw calls it."""

    preset: str
    """The bundled preset that is resized."""

    tasks: tuple[Task, ...]
    """Heads that may be drawn."""

    depth: tuple[int, int]
    """Fewest and most layers."""

    width: tuple[int, int]
    """Narrowest and widest hidden state."""

    head_widths: tuple[int, ...] = (64,)
    """Widths of one attention head; the hidden width is a multiple of one."""

    longest: int = 2048
    """Longest sequence that is drawn; at most what the positions allow."""

    keys: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("depth", ("num_hidden_layers",)),
        ("width", ("hidden_size",)),
        ("heads", ("num_attention_heads",)),
        ("inner", ("intermediate_size",)),
    )
    """For each drawn size, the keys of the config that it is written to."""

    choices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Further keys, each with the values it may take."""

    grouped: bool = False
    """Whether queries may share keys and values, several heads to one."""

    free_heads: str = ""
    """The key of one head's width, where heads together may be wider or narrower than the hidden state."""

    vocabulary: str = "vocab_size"
    """The key of the vocabulary's size; empty without one."""


_SPEECH = (
    ("depth", ("encoder_layers", "decoder_layers", "num_hidden_layers")),
    ("width", ("d_model",)),
    ("heads", ("encoder_attention_heads", "decoder_attention_heads")),
    ("inner", ("encoder_ffn_dim", "decoder_ffn_dim")),
)
_T5 = (("depth", ("num_layers",)), ("width", ("d_model",)), ("heads", ("num_heads",)), ("inner", ("d_ff",)))
_GPT2 = (("depth", ("n_layer",)), ("width", ("n_embd",)), ("heads", ("n_head",)), ("inner", ("n_inner",)))

FAMILIES = (
    Family(
        name="bert", preset="google-bert/bert-large-uncased", tasks=ENCODER, depth=(4, 28), width=(256, 1536),
        longest=512,
    ),
    Family(
        name="roberta", preset="FacebookAI/roberta-large", tasks=ENCODER, depth=(4, 28), width=(256, 1536),
        longest=512,
    ),
    Family(
        name="modernbert", preset="answerdotai/ModernBERT-base", tasks=ENCODER, depth=(4, 28),
        width=(384, 1280), choices=(("local_attention", (64, 128, 256)),),
    ),
    Family(
        name="gpt2", preset="openai-community/gpt2-medium", tasks=DECODER, depth=(4, 36), width=(256, 1600),
        longest=1024, keys=_GPT2,
    ),
    Family(
        name="t5", preset="google-t5/t5-large", tasks=(Task.SEQ2SEQ_LM,), depth=(3, 16), width=(256, 1280),
        longest=1024, keys=_T5, free_heads="d_kv",
    ),
    Family(
        name="llama", preset="meta-llama/Llama-3.2-1B", tasks=DECODER, depth=(2, 20), width=(512, 2560),
        head_widths=(64, 80, 128), grouped=True,
    ),
    Family(
        name="qwen2", preset="Qwen/Qwen2.5-0.5B", tasks=DECODER, depth=(4, 24), width=(512, 2048),
        head_widths=(64, 128), grouped=True,
    ),
    Family(
        name="mistral", preset="mistralai/Mistral-7B-v0.3", tasks=DECODER, depth=(2, 16), width=(512, 2560),
        head_widths=(64, 128), grouped=True, choices=(("sliding_window", (256, 4096)),),
    ),
    Family(
        name="mixtral", preset="mistralai/Mixtral-8x7B-v0.1", tasks=DECODER, depth=(2, 6), width=(512, 1280),
        head_widths=(64, 128), grouped=True,
        choices=(("num_local_experts", (4, 8)), ("num_experts_per_tok", (1, 2))),
    ),
    Family(
        name="gemma2", preset="google/gemma-2-2b", tasks=DECODER, depth=(2, 14), width=(512, 2304),
        head_widths=(64, 128, 256), grouped=True, free_heads="head_dim",
        choices=(("sliding_window", (256, 4096)),),
    ),
    Family(
        name="phi3", preset="microsoft/Phi-3-mini-4k-instruct", tasks=DECODER, depth=(2, 20),
        width=(768, 2304), head_widths=(64, 96), grouped=True, choices=(("sliding_window", (256, 2047)),),
    ),
    Family(
        name="vit", preset="google/vit-large-patch16-224", tasks=(Task.IMAGE_CLASSIFICATION,), depth=(4, 28),
        width=(256, 1536), choices=(("image_size", (160, 224, 384)), ("patch_size", (14, 16, 32))),
        vocabulary="",
    ),
    Family(
        name="whisper", preset="openai/whisper-medium", tasks=(Task.SPEECH_TO_TEXT,), depth=(2, 16),
        width=(256, 1280), longest=448, keys=_SPEECH, choices=(("num_mel_bins", (80, 128)),),
    ),
)  # fmt: skip
"""Draws cycle through them, in an order that the seed shuffles."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The drawn sizes of one model."""

    depth: int
    """Number of layers, of the encoder and of the decoder each."""
    width: int
    """Of the hidden state."""
    heads: int
    """Number of query heads."""
    inner: int
    """Width of the feed-forward layer."""
    vocabulary: int
    """Rows of the embedding table; 0 without one."""
    experts: int
    """Number of feed-forward layers side by side."""
    image_positions: int
    """Patches of a picture, or frames of sound; 0 for text."""


def draw_config(
    family: Family, facts: dict[str, Any], rng: random.Random
) -> tuple[dict[str, Any], ModelSizes]:
    """The preset's config `facts` in a drawn size, and that size."""
    low, high = family.width
    head = rng.choice(family.head_widths)
    heads = rng.randint(-(-low // head), high // head)
    width = heads * head
    if family.free_heads:
        width = rng.randrange(low, high + 1, 64)
        heads = rng.choice([n for n in range(1, 65) if width % n == 0 and 0.6 <= n * head / width <= 1.5])
    inner = round(width * rng.uniform(2, 4)) // 64 * 64
    drawn = {"depth": rng.randint(*family.depth), "width": width, "heads": heads, "inner": inner}
    config = dict(facts)
    for size, keys in family.keys:
        config |= dict.fromkeys(keys, drawn[size])
    config |= {key: head for key in (family.free_heads, "head_dim") if key in facts}
    if family.grouped:
        config["num_key_value_heads"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    config |= {key: rng.choice(values) for key, values in family.choices}
    if family.vocabulary and rng.random() < 0.4:
        _cut_vocabulary(config, family.vocabulary, rng.randint(4_000, 100_000))
    sizes = ModelSizes(
        **drawn,
        vocabulary=config.get(family.vocabulary, 0),
        experts=config.get("num_local_experts", 1),
        image_positions=_positions(config),
    )
    return config, sizes


def _cut_vocabulary(config: dict[str, Any], key: str, size: int) -> None:
    """Sets the size of the vocabulary, and maps the special tokens into it."""
    config[key] = size
    for name, value in config.items():
        if name.endswith("_token_id") and isinstance(value, int):
            config[name] = value % size


def _positions(config: dict[str, Any]) -> int:
    if "image_size" in config:
        return int((config["image_size"] // config["patch_size"]) ** 2 + 1)
    return int(config.get("max_source_positions", 0))
