"""Synthetic pictures and sounds have the shapes that transformers' models take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from snugfit.errors import JobError
from snugfit.job.batch import IGNORED, SyntheticDataset, label_items, synthetic
from snugfit.job.job import Task
from test_batch import S, T, evaluated, job_of, loss_of

VIT = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": [16, 32], "patch_size": 8,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 300,
    "num_mel_bins": 4, "max_source_positions": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip

CASES: list[tuple[dict[str, Any], Task, dict[str, tuple[int, ...]]]] = [
    (VIT, Task.IMAGE_CLASSIFICATION, {"pixel_values": (3, 3, 16, 32), "labels": (3,)}),
    (WHISPER, Task.SPEECH_TO_TEXT, {"input_features": (3, 4, 16), "labels": (3, T)}),
]


@pytest.mark.parametrize(("config", "task", "shapes"), CASES, ids=["pictures", "sounds"])
def test_a_batch_has_its_shapes_and_pieces_give_its_loss(
    config: dict[str, Any], task: Task, shapes: dict[str, tuple[int, ...]]
) -> None:
    """The dataset collates to the same shapes, and pieces are weighed by their labels."""
    job = job_of(config, task)
    batch, model = synthetic(job, 3), evaluated(job)
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    floats = {name for name, value in batch.items() if value.dtype is torch.float32}
    assert floats == batch.keys() - {"labels"}
    if batch["labels"].dim() == 2:
        batch["labels"][0, 2:] = IGNORED
    pieces = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    weighed = sum(loss_of(model, piece) * label_items(job, piece) for piece in pieces)
    assert weighed / label_items(job, batch) == pytest.approx(loss_of(model, batch), rel=1e-5)
    (whole, rest) = DataLoader(SyntheticDataset(job, 4), batch_size=3)  # type: ignore[arg-type]
    assert {name: tuple(value.shape) for name, value in whole.items()} == shapes
    assert len(rest["labels"]) == 1


def test_padding_is_of_the_target_alone() -> None:
    job = job_of(WHISPER, Task.SPEECH_TO_TEXT, padding=0.5)
    batch = synthetic(job, 3)
    assert "attention_mask" not in batch
    assert (batch["labels"] == IGNORED).sum(1).tolist() == [T // 2] * 3
    with pytest.raises(JobError, match="the task image-classification have no padding"):
        job_of(VIT, Task.IMAGE_CLASSIFICATION, padding=0.5)


def test_networks_without_a_picture_size_get_the_usual_one() -> None:
    job = job_of({"model_type": "resnet", "num_channels": 1}, Task.IMAGE_CLASSIFICATION)
    assert synthetic(job, 2)["pixel_values"].shape == (2, 1, 224, 224)


def test_a_model_that_does_not_hear_is_refused() -> None:
    with pytest.raises(JobError, match=r"cannot make synthetic audio.*Model\.from_module"):
        synthetic(job_of({"model_type": "dia"}, Task.SPEECH_TO_TEXT), 1)


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 16, "vocab_size": 300,
}  # fmt: skip
EAR = {
    "hidden_size": 32, "d_model": 32, "encoder_layers": 1, "num_hidden_layers": 1, "num_attention_heads": 2,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 128, "intermediate_size": 128, "num_mel_bins": 8,
}  # fmt: skip
HEARING: list[tuple[dict[str, Any], Task, dict[str, tuple[int, ...]]]] = [
    (
        {"model_type": "voxtral", "audio_config": {"model_type": "voxtral_encoder", **EAR},
         "text_config": LLAMA},
        Task.SPEECH_TO_TEXT,
        {"input_features": (2, 8, 3000), "input_ids": (2, 375 + T), "labels": (2, 375 + T)},
    ),
    (
        {"model_type": "glmasr", "audio_config": {"model_type": "glmasr_encoder", **EAR}, "audio_token_id": 7,
         "text_config": LLAMA},
        Task.SEQ2SEQ_LM,
        {"input_features": (2, 8, 3000), "input_features_mask": (2, 3000), "input_ids": (2, 375 + S + T),
         "labels": (2, 375 + S + T)},
    ),
    (
        {"model_type": "speech_to_text", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "conv_channels": 32,
         "decoder_attention_heads": 2, "vocab_size": 300, "input_feat_per_channel": 8},
        Task.SPEECH_TO_TEXT,
        {"input_features": (2, 3000, 8), "labels": (2, T)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "task", "shapes"), HEARING, ids=lambda value: str(value)[16:24])
def test_models_that_hear_take_thirty_seconds(
    config: dict[str, Any], task: Task, shapes: dict[str, tuple[int, ...]]
) -> None:
    """A language model with sound input counts the tokens that a sound replaces, and refuses other
    numbers."""
    job = job_of(config, task)
    batch = synthetic(job, 2)
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    evaluated(job)(**batch).loss.backward()
    assert label_items(job, batch) == 2 * T
    padded = synthetic(job_of(config, task, padding=0.5), 2)
    assert label_items(job, padded) == T
    assert padded["labels"].shape == batch["labels"].shape


SIGLIP2 = {
    "model_type": "siglip2", "text_config": {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 300,
    "intermediate_size": 32, "num_attention_heads": 2},
    "vision_config": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32,
    "num_attention_heads": 2, "num_patches": 16, "patch_size": 4},
}  # fmt: skip


def test_pictures_are_as_large_as_the_part_that_sees_them() -> None:
    for name in ("clip", "siglip"):
        sized = {"model_type": name, "vision_config": {"image_size": 336}}
        assert synthetic(job_of(sized, Task.IMAGE_CLASSIFICATION), 1)["pixel_values"].shape[2:] == (336, 336)
    job = job_of(SIGLIP2, Task.IMAGE_CLASSIFICATION)
    batch = synthetic(job, 3)
    assert batch["pixel_values"].shape == (3, 16, 3 * 4 * 4)
    assert batch["spatial_shapes"].tolist() == [[4, 4]] * 3
    evaluated(job)(**batch).loss.backward()
