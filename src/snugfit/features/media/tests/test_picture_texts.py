"""Language models with pictures: batches, rows of datasets, training, and the law of a real step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_media import picture, pixels

from small_runs import losses
from small_tokenizers import tokenizer
from snugfit.errors import JobError, UsageError
from snugfit.features.media.picture_texts import LAYOUTS
from snugfit.frontends.own import options_of, train
from snugfit.job.batch import IGNORED, label_items, synthetic
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.batches import collator, dataset
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.training.run.dataset import data_of
from snugfit.training.run.run import Data
from test_batch import evaluated, job_of, loss_of
from test_law_rehearsed_equals_real import hold_to_reports
from tiers import slow_but

TASK = Task("image-text-to-text")

_WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_LLAMA = {"model_type": "llama", **_WIDTHS, "num_key_value_heads": 2, "vocab_size": 300}
_TOWER = {**_WIDTHS, "image_size": 32, "patch_size": 8}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
_QWEN_IDS = {
    "image_token_id": 25, "vision_start_token_id": 8, "vision_end_token_id": 9, "video_token_id": 10,
}  # fmt: skip

LLAVA = {
    "model_type": "llava", "text_config": _LLAMA, "image_token_id": 25, "vision_feature_layer": -2,
    "vision_config": {"model_type": "clip_vision_model", **_TOWER},
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "image_token_id": 25, "mm_tokens_per_image": 4,
    "text_config": {**_LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 16},
    "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
}  # fmt: skip
IDEFICS3 = {
    "model_type": "idefics3", "text_config": _LLAMA, "vision_config": _TOWER, "image_token_id": 25,
    "scale_factor": 2,
}  # fmt: skip
INTERNVL = {
    "model_type": "internvl", "text_config": {**_LLAMA, "model_type": "qwen2"}, "image_token_id": 25,
    "image_seq_length": 4,
    "vision_config": {
        "model_type": "internvl_vision", **_TOWER, "image_size": [32, 32], "patch_size": [8, 8],
    },
}  # fmt: skip
QWEN2_VL = {
    "model_type": "qwen2_vl", "text_config": {**_LLAMA, **_ROPE, "model_type": "qwen2_vl_text"}, **_QWEN_IDS,
    "vision_config": {"embed_dim": 64, "depth": 2, "num_heads": 4, "hidden_size": 64, "patch_size": 112},
}  # fmt: skip
"""Config of a small Qwen2-VL. Its patches are large, so that a picture of 448 x 448 pixels has 16 of them."""

SHAPES: list[tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = [
    (LLAVA, {"pixel_values": (6, 3, 32, 32)}),
    (GEMMA3, {"pixel_values": (6, 3, 32, 32), "token_type_ids": (3, 48)}),
    (IDEFICS3, {"pixel_values": (3, 2, 3, 32, 32)}),
    (INTERNVL, {"pixel_values": (6, 3, 32, 32)}),
    (
        QWEN2_VL,
        {"pixel_values": (6 * 16, 3 * 2 * 112**2), "image_grid_thw": (6, 3), "mm_token_type_ids": (3, 48)},
    ),
]


@pytest.mark.parametrize(("config", "shapes"), SHAPES)
def test_pictures_of_all_samples_are_joined(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    """A batch of the loader, on a device and in a simulation, is like one that is made at once."""
    job = job_of(config, TASK, sequence_length=48, images=2, padding=0.1)
    batch = synthetic(job, 3)
    shapes = {"input_ids": (3, 48), "labels": (3, 48), "attention_mask": (3, 48), **shapes}
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    assert label_items(job, batch) == int((batch["labels"][:, 1:] != IGNORED).sum())
    assert torch.isfinite(torch.tensor(loss_of(evaluated(job), batch)))
    for device in map(torch.device, ("cpu", "meta")):
        samples = dataset(job, Setup(), device)
        collated = collator(job, device)([samples[index] for index in range(3)])
        assert {name: tuple(value.shape) for name, value in collated.items()} == shapes


def test_pictures_need_room_and_a_known_architecture() -> None:
    with pytest.raises(JobError, match=r"too short for 3 images of 18 tokens and text.*above 54"):
        synthetic(job_of(LLAVA, TASK, sequence_length=48, images=3), 1)
    with pytest.raises(JobError, match=f"It can for {', '.join(LAYOUTS)}"):
        synthetic(job_of({"model_type": "fuyu"}, TASK, sequence_length=48), 1)


def test_text_models_keep_their_task() -> None:
    """Gemma 3 has the same class for text alone."""
    named = {**GEMMA3, "architectures": ["Gemma3ForConditionalGeneration"]}
    assert Model.from_config(named, name="gemma3").task == "causal-lm"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("config", "images", "recipe"),
    slow_but(
        [
            (IDEFICS3, 2, "every_layer"), (QWEN2_VL, 2, "micro_batches(2)"), (LLAVA, 1, "plain"),
            (INTERNVL, 2, "plain"),
        ],
        2,
    ),
)  # fmt: skip
def test_a_real_step_allocates_what_its_trace_says(config: dict[str, Any], images: int, recipe: str) -> None:
    job = job_of(config, TASK, sequence_length=48, images=images, batch_size=4)
    hold_to_reports(job, Recipe.parse(recipe))


# ---- rows --------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small LLaVA with its processor."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    at = tmp_path_factory.mktemp("llava")
    words = tokenizer("t5")
    words.add_special_tokens({"additional_special_tokens": [f"<{n}>" for n in range(3)] + ["<image>"]})
    assert words.convert_tokens_to_ids("<image>") == 25
    size = {"height": 32, "width": 32}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size), words, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip
    processor.save_pretrained(str(at))
    (at / "config.json").write_text(json.dumps(LLAVA))
    return at


def llava_job(folder: Path, **more: Any) -> Job:
    return Job(model=Model.find(folder), task=TASK, **{"batch_size": 2, "sequence_length": 48, **more})


def data(rows: Any, folder: Path, **more: Any) -> Data:
    return data_of(
        rows, llava_job(folder, **more), None, columns=None, pack=False, collate=None,
        options=options_of({}), processor=folder,
    )  # fmt: skip


def test_rows_of_texts_and_of_messages(folder: Path) -> None:
    """The second sample has two pictures, and its text names them itself."""
    rows = [
        {"images": [pixels(0)], "text": "one two"},
        {"images": [pixels(1), pixels(2)], "text": "<image> three <image> four"},
    ]
    read = data(rows, folder)
    batch = read.collate([read.samples[0], read.samples[1]])
    assert batch["pixel_values"].shape == (3, 3, 32, 32)
    assert (batch["input_ids"] == 25).sum(1).tolist() == [16, 32]
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [3, 3]
    assert torch.isfinite(torch.tensor(loss_of(evaluated(llava_job(folder)), batch)))
    content = [{"type": "image"}, {"type": "text", "text": "one two"}]
    chat = data([{"images": [pixels(0)], "messages": [{"role": "user", "content": content}]}], folder)
    assert chat.samples[0]["input_ids"].tolist() == read.samples[0]["input_ids"].tolist()


def test_wrong_rows_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"row 1: the processor fails.*one image token for each image"):
        data([{"image": pixels(0), "text": "<image> one <image>"}], folder)
    with pytest.raises(UsageError, match=r"row 1: 19 tokens with those of its images.*planned for 18"):
        data([{"image": pixels(0), "text": "one two"}], folder, sequence_length=18)


@pytest.mark.whole
def test_a_run_from_files_is_resumed(folder: Path, tmp_path: Path) -> None:
    lines = []
    for number in range(4):
        picture(tmp_path / "data" / f"{number}.png", number)
        lines.append(
            json.dumps({"image": f"{number}.png", "caption": "one two three"[: 3 + 4 * (number % 2)]})
        )
    source = tmp_path / "data" / "rows.jsonl"
    source.write_text("\n".join(lines))

    def run(out: str, **more: Any) -> Any:
        return train(
            llava_job(folder), "micro_batches(2)", source, evaluation=source, output_dir=tmp_path / out,
            weights="random", device="cpu", eval_strategy="epoch", num_train_epochs=1,
            lr_scheduler_type="constant", processor=folder, **more,
        )  # fmt: skip

    assert run("whole").step == 2
    run("parts", max_steps=1)
    run("parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
