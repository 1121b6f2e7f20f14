"""Semantic segmentation and video classification: batches, rows of datasets, training, and a real step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_media import picture, pixels

from aligned import peak
from cpu_scratch import compared
from reported import foreseen, reports
from small_runs import losses
from snugfit.data.row_sources import read_rows
from snugfit.errors import JobError, UsageError
from snugfit.features.media.inputs import UNLABELLED, SegmentedPictures
from snugfit.features.media.samples import MediaSamples, load_processor, media_samples
from snugfit.frontends.own import options_of, train
from snugfit.job.batch import label_items, synthetic
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.rehearsal.device.policy import CpuPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.training.run.dataset import data_of
from test_batch import evaluated, job_of, loss_of
from test_law_rehearsed_equals_real import hold_to_reports
from tiers import slow_but

MAPS, VIDEOS = Task("semantic-segmentation"), Task("video-classification")

_WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SEGFORMER = {
    "model_type": "segformer", "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "image_size": 32, "architectures": ["Segformer"],
}  # fmt: skip
MOBILENET = {"model_type": "mobilenet_v2", "image_size": 64, "depth_multiplier": 0.35, "min_depth": 8}
VIVIT = {
    "model_type": "vivit", **_WIDTHS, "image_size": 32, "tubelet_size": [2, 16, 16], "num_frames": 4,
}  # fmt: skip
VIDEOMAE = {"model_type": "videomae", **_WIDTHS, "image_size": 32, "patch_size": 16, "num_frames": 4}
TIMESFORMER = {"model_type": "timesformer", **_WIDTHS, "image_size": 32, "num_frames": 4}
VJEPA2 = {
    "model_type": "vjepa2", **_WIDTHS, "hidden_size": 96, "crop_size": 32, "frames_per_clip": 4,
    "pred_hidden_size": 96, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 1,
    "num_pooler_layers": 1,
}  # fmt: skip

SHAPES: list[tuple[dict[str, Any], Task, dict[str, tuple[int, ...]]]] = [
    (SEGFORMER, MAPS, {"pixel_values": (3, 3, 32, 32), "labels": (3, 32, 32)}),
    (VIDEOMAE, VIDEOS, {"pixel_values": (3, 4, 3, 32, 32), "labels": (3,)}),
    (TIMESFORMER, VIDEOS, {"pixel_values": (3, 4, 3, 32, 32), "labels": (3,)}),
    (VJEPA2, VIDEOS, {"pixel_values_videos": (3, 4, 3, 32, 32), "labels": (3,)}),
]


@pytest.mark.parametrize(("config", "task", "shapes"), SHAPES)
def test_a_batch_has_its_shapes_and_pieces_give_its_loss(
    config: dict[str, Any], task: Task, shapes: dict[str, tuple[int, ...]]
) -> None:
    job = job_of(config, task, labels=5)
    batch, model = synthetic(job, 3), evaluated(job)
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    if task == MAPS:
        batch["labels"][0, :20] = UNLABELLED
    pieces = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    weighed = sum(loss_of(model, piece) * label_items(job, piece) for piece in pieces)
    assert weighed / label_items(job, batch) == pytest.approx(loss_of(model, batch), rel=1e-4)


def test_names_of_the_hub_and_a_single_class() -> None:
    job = job_of(SEGFORMER, "image-segmentation", labels=1)  # type: ignore[arg-type]
    assert job.task is MAPS
    with pytest.raises(JobError, match="needs 2 classes or more"):
        synthetic(job, 1)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("config", "recipe"),
    slow_but([(VIVIT, "micro_batches(2)"), (TIMESFORMER, "every_layer"), (VJEPA2, "plain")], 2),
)
def test_a_real_step_on_videos_allocates_what_its_trace_says(config: dict[str, Any], recipe: str) -> None:
    hold_to_reports(job_of(config, VIDEOS, labels=5), Recipe.parse(recipe))


@pytest.mark.whole
def test_a_real_step_on_maps_has_the_peak_of_its_trace() -> None:
    """Events differ: a CPU's convolutions and upsampling copy between layouts, and those of CUDA do not."""
    job = job_of(MOBILENET, MAPS, labels=5)
    trace = compared(foreseen(rehearse(job, Setup(), CpuPolicy())))
    assert peak(compared(reports(job, Setup()))) == peak(trace)


# ---- rows --------------------------------------------------------------------------------------------------


def folder_of(at: Path, config: dict[str, Any], **processor: Any) -> Path:
    at.mkdir()
    (at / "config.json").write_text(json.dumps(config))
    (at / "preprocessor_config.json").write_text(json.dumps(processor))
    return at


def segformer(at: Path) -> Path:
    size = {"height": 32, "width": 32}
    return folder_of(at, SEGFORMER, image_processor_type="SegformerImageProcessor", size=size)


def videomae(at: Path) -> Path:
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    return folder_of(at, VIDEOMAE, image_processor_type="VideoMAEImageProcessor", **sizes)


def scenes(at: Path, count: int = 4, classes: int = 3) -> Path:
    for number in range(count):
        picture(at / f"{number}.png", number)
        classes_of = pixels(100 + number, size=(12, 10)) % classes
        Image.fromarray(classes_of).save(at / f"map{number}.png")
    lines = [f"{number}.png,map{number}.png\n" for number in range(count)]
    (at / "rows.csv").write_text("image,annotation\n" + "".join(lines))
    return at / "rows.csv"


def clips(at: Path, count: int = 4) -> Path:
    for number in range(count):
        for frame in range(6):
            picture(at / f"clip{number}" / f"{frame}.png", 10 * number + frame)
    lines = [f"clip{number},{'up' if number % 2 else 'down'}\n" for number in range(count)]
    (at / "rows.csv").write_text("video,label\n" + "".join(lines))
    return at / "rows.csv"


def job_in(folder: Path, task: Task, **more: Any) -> Job:
    return Job(model=Model.find(folder), task=task, **{"batch_size": 2, "labels": 3, **more})


def made(source: Any, folder: Path, task: Task, **more: Any) -> MediaSamples:
    job = job_in(folder, task, **more)
    return media_samples(read_rows(source), job, load_processor(folder, job))


def test_maps_are_resized_with_their_pictures(tmp_path: Path) -> None:
    folder = segformer(tmp_path / "model")
    job = job_in(folder, MAPS)
    data = data_of(
        scenes(tmp_path / "scenes"), job, None, columns=None, pack=False, collate=None,
        options=options_of({}), processor=folder,
    )  # fmt: skip
    batch = data.collate([data.samples[0], data.samples[1]])
    assert batch["labels"].shape == (2, 32, 32)
    assert set(batch["labels"].unique().tolist()) == {0, 1, 2}
    assert torch.isfinite(torch.tensor(loss_of(evaluated(job), batch)))
    before = data.fingerprint()
    Image.fromarray(np.zeros((12, 10), np.uint8)).save(tmp_path / "scenes" / "map0.png")
    assert data.fingerprint() != before


def test_wrong_maps_are_refused(tmp_path: Path) -> None:
    folder = segformer(tmp_path / "model")
    source = scenes(tmp_path / "scenes", classes=5)
    with pytest.raises(UsageError, match=r"a pixel has the class [34], but the job has 3 labels"):
        made(source, folder, MAPS)
    rows = [{"image": pixels(0), "annotation": pixels(1)}]
    with pytest.raises(UsageError, match=r"one channel, as large as its image.*3 channels"):
        made(rows, folder, MAPS)


def test_each_source_of_a_video_gives_the_same_frames(tmp_path: Path) -> None:
    folder, source = videomae(tmp_path / "model"), clips(tmp_path / "clips", 1)
    frames = [Image.open(file).copy() for file in sorted((tmp_path / "clips" / "clip0").iterdir())]
    frames[0].save(tmp_path / "clip.png", save_all=True, append_images=frames[1:])  # an APNG is lossless
    others: list[Any] = [
        frames,
        np.stack([np.asarray(frame) for frame in frames]),
        str(tmp_path / "clip.png"),
    ]
    (first,) = made(source, folder, VIDEOS, labels=2)
    assert first["pixel_values"].shape == (4, 3, 32, 32)
    for other in others:
        (sample,) = made([{"video": other, "label": 0}], folder, VIDEOS, labels=2)
        assert torch.equal(sample["pixel_values"], first["pixel_values"])
    with pytest.raises(UsageError, match="not of type int"):
        made([{"video": 7, "label": 0}], folder, VIDEOS, labels=2)


@pytest.mark.whole
@pytest.mark.parametrize("task", [MAPS, VIDEOS])
def test_a_run_from_files_is_resumed(task: Task, tmp_path: Path) -> None:
    is_map = task == MAPS
    folder = (segformer if is_map else videomae)(tmp_path / "model")
    source = (scenes if is_map else clips)(tmp_path / "data")

    def run(out: str, **more: Any) -> Any:
        return train(
            job_in(folder, task), "plain", source, evaluation=source, output_dir=tmp_path / out,
            weights="random", device="cpu", eval_strategy="epoch", num_train_epochs=1,
            lr_scheduler_type="constant", processor=folder, **more,
        )  # fmt: skip

    whole = run("whole")
    assert whole.step == 2
    run("parts", max_steps=1)
    run("parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_labelled_pixels_are_counted_at_the_size_of_the_map() -> None:
    labels = torch.tensor([[[0, 0, 1, 1], [0, 1, 1, 255]]])
    logits = torch.nn.functional.one_hot(torch.tensor([[[0, 1]]]), 2).permute(0, 3, 1, 2).float()
    correct = SegmentedPictures().correct(SimpleNamespace(logits=logits), {"labels": labels})
    assert correct.tolist() == [True, True, True, True, True, False, True]
