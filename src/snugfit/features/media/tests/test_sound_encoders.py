"""Audio classification and CTC: batches, rows of datasets, training, and the law of a real step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_media import RATE, sound, tone

from small_runs import losses
from small_tokenizers import tokenizer
from snugfit.data.row_sources import read_rows
from snugfit.errors import JobError, UsageError
from snugfit.features.media.samples import load_processor, media_samples
from snugfit.frontends.own import options_of, train
from snugfit.job.batch import IGNORED, label_items, synthetic
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.dataset import data_of
from test_batch import T, evaluated, job_of, loss_of
from test_law_rehearsed_equals_real import hold_to_reports
from tiers import slow_but

CLASSES, CTC = Task("audio-classification"), Task("ctc")

_WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
WAV2VEC2 = {
    "model_type": "wav2vec2", **_WIDTHS, "conv_dim": [32, 32, 32], "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 8, 4], "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "vocab_size": 40, "ctc_loss_reduction": "sum",
    "ctc_zero_infinity": True, "mask_time_length": 5,
}  # fmt: skip
"""Config of a small wav2vec 2.0. Its masks are short, since torch finds them at another time in a real
`index_put`. The law compares blocks from 512 bytes on.
"""
AST = {
    "model_type": "audio-spectrogram-transformer", **_WIDTHS, "max_length": 64, "num_mel_bins": 32,
}  # fmt: skip
WAV2VEC2_BERT = {
    "model_type": "wav2vec2-bert", **_WIDTHS, "feature_projection_input_dim": 160, "vocab_size": 40,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "num_mel_bins": 16, "max_source_positions": 24, "vocab_size": 50300,
}  # fmt: skip

SHAPES: list[tuple[dict[str, Any], Task, dict[str, tuple[int, ...]]]] = [
    (WAV2VEC2, CLASSES, {"input_values": (3, RATE), "labels": (3,)}),
    (AST, CLASSES, {"input_values": (3, 64, 32), "labels": (3,)}),
    (WHISPER, CLASSES, {"input_features": (3, 16, 48), "labels": (3,)}),
    (WAV2VEC2, CTC, {"input_values": (3, RATE), "labels": (3, T)}),
    (WAV2VEC2_BERT, CTC, {"input_features": (3, 50, 160), "labels": (3, T)}),
]


@pytest.mark.parametrize(("config", "task", "shapes"), SHAPES)
def test_a_batch_has_its_shapes_and_pieces_give_its_loss(
    config: dict[str, Any], task: Task, shapes: dict[str, tuple[int, ...]]
) -> None:
    job = job_of(config, task, seconds=1.0)
    batch, model = synthetic(job, 3), evaluated(job)
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    if task == CTC:
        batch["labels"][0, 2:] = IGNORED
    pieces = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    weighed = sum(loss_of(model, piece) * label_items(job, piece) for piece in pieces)
    assert weighed / label_items(job, batch) == pytest.approx(loss_of(model, batch), rel=1e-4)


def test_the_name_of_the_hub_depends_on_the_model() -> None:
    named = "automatic-speech-recognition"
    assert job_of(WAV2VEC2, named).task is CTC  # type: ignore[arg-type]
    assert job_of(WHISPER, named).task is Task.SPEECH_TO_TEXT  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "10", 4_000])
def test_seconds_are_above_zero_and_below_an_hour(seconds: Any) -> None:
    with pytest.raises(JobError, match=r"seconds is .*above 0, up to 3,600"):
        job_of(WAV2VEC2, CTC, seconds=seconds)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("config", "task", "recipe"),
    slow_but(
        [(WAV2VEC2, CTC, "plain"), (AST, CLASSES, "every_layer"), (WHISPER, CLASSES, "plain"),
         (WAV2VEC2, CLASSES, "micro_batches(2)")],
        3,
    ),
)  # fmt: skip
def test_a_real_step_allocates_what_its_trace_says(config: dict[str, Any], task: Task, recipe: str) -> None:
    job = job_of(config, task, seconds=0.5, batch_size=2, target_length=8, padding=0.25 * (task == CTC))
    hold_to_reports(job, Recipe.parse(recipe))


# ---- rows --------------------------------------------------------------------------------------------------

HEARD = (tone(0.5), tone(0.25, 880), tone(0.4, 660), tone(0.3, 550))


def folder_of(at: Path, config: dict[str, Any], **extractor: Any) -> Path:
    """Write a folder with a model's config, its feature extractor's, and a tokenizer."""
    tokenizer("t5").save_pretrained(str(at))
    settings = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": RATE, **extractor}
    (at / "config.json").write_text(json.dumps(config))
    (at / "preprocessor_config.json").write_text(json.dumps(settings))
    return at


def rows_of(at: Path) -> Path:
    for number, heard in enumerate(HEARD):
        sound(at / "clips" / f"{number}.wav", heard)
    (at / "rows.csv").write_text(
        "path,sentence,label\nclips/0.wav,one two,up\nclips/1.wav,three,down\n"
        "clips/2.wav,four,up\nclips/3.wav,five six,down\n"
    )
    return at / "rows.csv"


def sound_job(folder: Path, task: Task, **more: Any) -> Job:
    given = {"batch_size": 2, "target_length": 8, "seconds": 1.0, **more}
    return Job(model=Model.find(folder), task=task, **given)


@pytest.mark.parametrize("masks", [False, True])
def test_waves_are_padded_as_the_extractor_says(tmp_path: Path, masks: bool) -> None:
    folder = folder_of(tmp_path / "model", WAV2VEC2, return_attention_mask=masks)
    job = sound_job(folder, CTC)
    data = data_of(
        rows_of(tmp_path), job, folder, columns=None, pack=False, collate=None, options=options_of({})
    )
    batch = data.collate([data.samples[0], data.samples[1]])
    assert batch["input_values"].shape == (2, RATE // 2)
    assert ("attention_mask" in batch) == masks
    assert batch["labels"].tolist() == [[7, 8, 6], [9, 6, IGNORED]]
    assert torch.isfinite(torch.tensor(loss_of(evaluated(job), batch)))


def test_a_sound_longer_than_the_job_s_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", WAV2VEC2)
    job = sound_job(folder, CLASSES, seconds=0.2)
    with pytest.raises(UsageError, match=r"0.5 seconds, but the job was planned for 0.2.*seconds: 1"):
        media_samples(read_rows(rows_of(tmp_path)), job, load_processor(folder, job))


@pytest.mark.whole
@pytest.mark.parametrize("task", [CLASSES, CTC])
def test_a_run_from_files_is_resumed(task: Task, tmp_path: Path) -> None:
    folder, source = folder_of(tmp_path / "model", WAV2VEC2), rows_of(tmp_path)

    def run(out: str, **more: Any) -> Any:
        return train(
            sound_job(folder, task), "plain", source, evaluation=source, output_dir=tmp_path / out,
            weights="random", device="cpu", eval_strategy="epoch", num_train_epochs=1,
            lr_scheduler_type="constant", tokenizer=folder, **more,
        )  # fmt: skip

    whole = run("whole")
    assert whole.step == 2
    assert (whole.evaluated.accuracy is not None) == (task == CLASSES)
    run("parts", max_steps=1)
    run("parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
