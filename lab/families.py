"""The model families of drawn jobs, with the range of each size."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.job.job import Task

TEXT_HEADS = (Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
ENCODER = (*TEXT_HEADS, Task.MASKED_LM)
DECODER = (*TEXT_HEADS, Task.CAUSAL_LM)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture, with the config keys of its sizes and the range of each."""

    name: str
    """Name in the draw."""

    preset: str
    """The bundled preset that is resized."""

    tasks: tuple[Task, ...]
    """Heads for the draw."""

    depth: tuple[int, int]
    """Fewest and most layers."""

    width: tuple[int, int]
    """Narrowest and widest hidden state."""

    head_widths: tuple[int, ...] = (64,)
    """Widths of one attention head; the hidden width is a multiple of one."""

    longest: int = 2048
    """Longest drawn sequence, at most the model's positions."""

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
    """True if queries may share keys and values, several heads to one."""

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
