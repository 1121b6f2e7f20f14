"""Small pictures, sounds, and models that take them: files as users have them, written in the test."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from small_tokenizers import tokenizer
from snugfit.job.job import Job, Task
from snugfit.job.model import Model

SIDE, RATE = 8, 16_000

VIT = {
    "model_type": "vit", "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
    "num_hidden_layers": 1, "image_size": SIDE, "patch_size": 4,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 16,
    "vocab_size": 96, "decoder_start_token_id": 5, "bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 0,
}  # fmt: skip
"""Config of a Whisper model that takes one second of sound: 50 positions of two frames."""


def pixels(seed: int, *, size: tuple[int, ...] = (12, 10, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8)


def picture(file: Path, seed: int = 0, *, mode: str = "RGB", size: tuple[int, int] = (12, 10)) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, size=(*size, 3))).convert(mode).save(file)
    return file


def pets(folder: Path, each: int = 3) -> Path:
    """Write `cat/0.png` ... `dog/2.png`, all different."""
    for number, name in enumerate(("cat", "dog")):
        for count in range(each):
            picture(folder / name / f"{count}.png", 10 * number + count)
    return folder


def tone(seconds: float = 0.5, hertz: float = 440.0, *, rate: int = RATE) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate).astype(np.float32)


def sound(file: Path, heard: np.ndarray | None = None, *, rate: int = RATE, width: int = 2) -> Path:
    """Write a PCM .wav of one channel, or of those in (N, C)."""
    heard = tone() if heard is None else heard
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = np.round(heard.astype(np.float64) * ((1 << (8 * width - 1)) - 1)).astype(np.int64)
    if width == 1:
        whole += 128
    little = whole.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width]
    with wave.open(str(file), "wb") as out:
        out.setparams((heard.shape[1] if heard.ndim == 2 else 1, width, rate, 0, "NONE", ""))
        out.writeframes(little.tobytes())
    return file


def vit(folder: Path, **changes: Any) -> Path:
    """Write a folder with a model's config and its image processor's."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(VIT))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def whisper(folder: Path, **changes: Any) -> Path:
    """Write a folder with a model's config, its feature extractor's, and a tokenizer."""
    tokenizer("t5").save_pretrained(str(folder))
    settings = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 16,
        "chunk_length": 1,
        "sampling_rate": RATE,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(WHISPER))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture_job(folder: Path, **changes: Any) -> Job:
    given = {"batch_size": 4, "labels": 2} | changes
    return Job(model=Model.find(folder), task=Task.IMAGE_CLASSIFICATION, **given)


def speech_job(folder: Path, **changes: Any) -> Job:
    given = {"batch_size": 2, "target_length": 8} | changes
    return Job(model=Model.find(folder), task=Task.SPEECH_TO_TEXT, **given)
