"""Jobs at random of the tasks that features add: answers, sounds, pictures, videos and preferences.

A family has a config of transformers with drawn sizes and the tasks of its heads. Families of text reuse the
sizes of `families.py`. `draw_runs.py --tasks` draws recipes for these jobs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from families import FAMILIES, Family

from snugfit.job.config import check_facts
from snugfit.job.job import Job, Task
from snugfit.job.model import Model

OF_PAIRS = ("reward", "dpo", "orpo", "simpo", "kto")
"""Tasks on pairs of answers."""

OF_TEXTS: Mapping[str, tuple[str, ...]] = {
    "bert": ("question-answering", "multiple-choice", "text-embedding"),
    "roberta": ("question-answering", "multiple-choice", "text-embedding"),
    "modernbert": ("question-answering", "multiple-choice"),
    "llama": OF_PAIRS, "qwen2": OF_PAIRS, "mistral": OF_PAIRS, "gemma2": OF_PAIRS,
    "phi3": OF_PAIRS, "gpt2": OF_PAIRS,
}  # fmt: skip
"""Tasks by the name of a family of texts."""


@dataclass(frozen=True, kw_only=True)
class MediaFamily:
    """An architecture for sounds, pictures or videos."""

    name: str
    """The model type in transformers."""

    tasks: tuple[str, ...]
    """Heads for the draw."""

    config: Callable[[random.Random], dict[str, Any]]
    """Drawn keys of the config; the others keep the defaults of their class."""

    batch: int
    """Largest batch."""


def _encoder(rng: random.Random, *, heads: int = 16, layers: int = 20) -> dict[str, Any]:
    """Return the sizes of a stack of encoder layers whose heads have 64 columns."""
    drawn = rng.randint(4, heads)
    return {
        "hidden_size": 64 * drawn, "num_attention_heads": drawn, "num_hidden_layers": rng.randint(2, layers),
        "intermediate_size": 64 * rng.randint(2 * drawn, 4 * drawn),
    }  # fmt: skip


def _wav2vec2(rng: random.Random) -> dict[str, Any]:
    stable = rng.random() < 0.5
    return _encoder(rng) | {
        "do_stable_layer_norm": stable, "feat_extract_norm": "layer" if stable else "group",
        "conv_bias": stable, "ctc_loss_reduction": "mean",
    }  # fmt: skip


def _segformer(rng: random.Random) -> dict[str, Any]:
    """Return the sizes of one of SegFormer's published variants, b0 to b4 (arXiv 2105.15203, table 6)."""
    small = {"hidden_sizes": [32, 64, 160, 256], "decoder_hidden_size": 256}
    large = {"hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": rng.choice((256, 768))}
    depths = rng.choice(([2, 2, 2, 2], [3, 4, 6, 3], [3, 4, 18, 3], [3, 8, 27, 3]))
    return rng.choice((small, large)) | {"depths": depths}


def _video(rng: random.Random) -> dict[str, Any]:
    return _encoder(rng, heads=12, layers=14) | {"num_frames": rng.choice((8, 16))}


def _llama(rng: random.Random, **more: Any) -> dict[str, Any]:
    heads = rng.choice((8, 12, 16))
    return {
        "model_type": "llama", "hidden_size": 128 * heads, "num_attention_heads": heads,
        "num_key_value_heads": heads // 4, "num_hidden_layers": rng.randint(2, 12),
        "intermediate_size": 64 * rng.randint(4 * heads, 7 * heads), "vocab_size": 32_064, **more,
    }  # fmt: skip


def _llava(rng: random.Random) -> dict[str, Any]:
    tower = _encoder(rng) | {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    return {"text_config": _llama(rng), "vision_config": tower, "image_token_id": 32_000}


def _idefics3(rng: random.Random) -> dict[str, Any]:
    tower = _encoder(rng) | {"model_type": "idefics3_vision", "image_size": 364, "patch_size": 14}
    return {"text_config": _llama(rng), "vision_config": tower, "image_token_id": 32_000, "scale_factor": 2}


def _qwen2_vl(rng: random.Random) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    text = _llama(rng, model_type="qwen2_vl_text", rope_parameters=rope, vocab_size=152_064)
    heads = rng.randint(4, 16)
    return {
        "text_config": text,
        "vision_config": {
            "embed_dim": 80 * heads, "num_heads": heads, "depth": rng.randint(4, 24),
            "hidden_size": text["hidden_size"],
        },
    }  # fmt: skip


OF_MEDIA = (
    MediaFamily(name="wav2vec2", tasks=("ctc", "audio-classification"), config=_wav2vec2, batch=16),
    MediaFamily(name="hubert", tasks=("ctc", "audio-classification"), config=_wav2vec2, batch=16),
    MediaFamily(name="wav2vec2-bert", tasks=("ctc", "audio-classification"), config=_encoder, batch=16),
    MediaFamily(
        name="audio-spectrogram-transformer", tasks=("audio-classification",), config=_encoder, batch=16
    ),
    MediaFamily(name="segformer", tasks=("semantic-segmentation",), config=_segformer, batch=12),
    MediaFamily(name="dpt", tasks=("semantic-segmentation",), config=lambda rng: {}, batch=6),
    MediaFamily(name="videomae", tasks=("video-classification",), config=_video, batch=8),
    MediaFamily(name="timesformer", tasks=("video-classification",), config=_video, batch=6),
    MediaFamily(name="llava", tasks=("image-text-to-text",), config=_llava, batch=6),
    MediaFamily(name="idefics3", tasks=("image-text-to-text",), config=_idefics3, batch=6),
    MediaFamily(name="qwen2_vl", tasks=("image-text-to-text",), config=_qwen2_vl, batch=4),
)


def families() -> list[Family | MediaFamily]:
    """Return the families in their order before a seed shuffles them."""
    return [*(family for family in FAMILIES if family.name in OF_TEXTS), *OF_MEDIA]


def media_job(family: MediaFamily, rng: random.Random) -> Job:
    """Draw a training job of this family."""
    from transformers import AutoConfig

    config = json.loads(
        AutoConfig.for_model(family.name, **family.config(rng)).to_json_string(use_diff=False)
    )
    name = f"{family.name}-drawn"
    return Job(
        dtype="float32",
        model=Model.from_config(check_facts(config, where=name), name=name, origin="drawn"),
        task=Task(rng.choice(family.tasks)),
        batch_size=rng.randint(1, family.batch),
        sequence_length=64 * rng.randint(20, 28),
        target_length=rng.randint(16, 64),
        seconds=rng.randint(2, 14),
        labels=rng.choice((2, 19, 150)),
        clip=rng.choice((None, None, None, 1.0)),
    )
