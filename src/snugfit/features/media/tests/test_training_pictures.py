"""Pictures: from files, folders, datasets and memory to the model's input; each error names its file."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_media import SIDE, pets, picture, picture_job, pixels, vit

from small_runs import assert_same_weights, losses
from snugfit.cli.main import run
from snugfit.data.row_sources import read_rows
from snugfit.errors import UsageError
from snugfit.features.media import pictures
from snugfit.features.media.samples import MediaSamples, load_processor, media_samples
from snugfit.frontends.own import options_of, train
from snugfit.training.run.dataset import data_of, stack
from snugfit.training.run.run import Data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model and its image processor."""
    return vit(tmp_path_factory.mktemp("vit"))


def made(source: Any, folder: Path, *, columns: dict[str, str] | None = None, **job: Any) -> MediaSamples:
    wanted = picture_job(folder, **job)
    return media_samples(read_rows(source, columns=columns), wanted, load_processor(folder, wanted))


def data(source: Any, folder: Path, *, processor: Any = None, like: Data | None = None, **job: Any) -> Data:
    return data_of(
        source,
        picture_job(folder, **job),
        None,
        processor=processor,
        columns=None,
        pack=False,
        collate=None,
        options=options_of({}),
        like=like,
    )


def by_hand(seed: int) -> torch.Tensor:
    """Return a picture processed by hand: resized by Pillow, to [0, 1], less 0.5, over 0.25."""
    small = Image.fromarray(pixels(seed)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return torch.from_numpy((np.asarray(small, dtype=np.float32) / 255 - 0.5) / 0.25).permute(2, 0, 1)


def _lines(at: Path) -> Any:
    rows = [{"image": f"pets/{name}/0.png", "label": name} for name in ("cat", "dog")]
    (at / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return at / "rows.jsonl"


def _metadata(at: Path) -> Any:
    (at / "pets" / "metadata.csv").write_text("file_name,label\ncat/0.png,cat\ndog/0.png,dog\n")
    return at / "pets"


def _saved(at: Path) -> Any:
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    content = {"image": [str(at / "pets" / name / "0.png") for name in ("cat", "dog")], "label": [0, 1]}
    datasets.Dataset.from_dict(content, features=features).save_to_disk(str(at / "saved"))
    return at / "saved"


def _loaded(at: Path) -> Any:
    import datasets

    return datasets.load_from_disk(str(_saved(at)))


def _parquet(at: Path) -> Any:
    _loaded(at).to_parquet(str(at / "rows.parquet"))
    return at / "rows.parquet"


def _memory(value: Callable[[int], Any]) -> Callable[[Path], Any]:
    return lambda at: [{"image": value(seed), "label": seed // 10} for seed in (0, 10)]


SOURCES: dict[str, Callable[[Path], Any]] = {
    "a folder of folders": lambda at: at / "pets",
    "lines with paths": _lines,
    "a folder with metadata": _metadata,
    "a saved dataset": _saved,
    "a loaded dataset": _loaded,
    "Parquet": _parquet,
    "PIL images": _memory(lambda seed: Image.fromarray(pixels(seed))),
    "arrays": _memory(pixels),
    "arrays of channels first": _memory(lambda seed: pixels(seed).transpose(2, 0, 1)),
    "tensors": _memory(lambda seed: torch.from_numpy(pixels(seed))),
    "lists": _memory(lambda seed: pixels(seed).tolist()),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_source_says_the_same(name: str, tmp_path: Path, folder: Path) -> None:
    pets(tmp_path / "pets", each=1)
    samples = made(SOURCES[name](tmp_path), folder)
    assert len(samples) == 2
    for sample, seed in zip(samples, (0, 10), strict=True):
        torch.testing.assert_close(sample["pixel_values"], by_hand(seed), atol=1e-6, rtol=0)
        assert sample["label"] == seed // 10
    again = pickle.loads(pickle.dumps(samples))
    assert torch.equal(again.sample(1, epoch=7)["pixel_values"], samples[1]["pixel_values"])


def test_pictures_come_in_the_channels_of_the_model(tmp_path: Path, folder: Path) -> None:
    for mode in ("L", "P", "RGBA", "CMYK"):
        file = picture(tmp_path / f"{mode}.{'tif' if mode == 'CMYK' else 'png'}", mode=mode)
        assert made([{"image": file, "label": 0}], folder)[0]["pixel_values"].shape == (3, SIDE, SIDE)
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    Image.fromarray(pixels(0)).rotate(180).save(tmp_path / "turned.png", exif=turned)
    sample = made([{"image": tmp_path / "turned.png", "label": 0}], folder)[0]
    torch.testing.assert_close(sample["pixel_values"], by_hand(0), atol=1e-6, rtol=0)


def test_labels_are_those_of_text_classification(tmp_path: Path, folder: Path) -> None:
    pets(tmp_path)
    train_data = data(tmp_path, folder, labels=3)
    assert train_data.samples.label_names == ("cat", "dog")
    held_out = data([{"image": pixels(0), "label": "dog"}], folder, labels=3, like=train_data)
    assert held_out.samples[0]["label"] == 1
    assert made([{"image": pixels(0), "label": "0.5"}], folder, labels=1)[0]["label"] == 0.5
    named = made([{"photo": pixels(0), "kind": 1}], folder, columns={"image": "photo", "label": "kind"})
    assert named[0]["label"] == 1
    with pytest.raises(UsageError, match=r"label 'cat' is not a finite number.*a regression"):
        data(tmp_path, folder, labels=1)
    with pytest.raises(UsageError, match="label 'elk' is not one of cat, dog"):
        data([{"image": pixels(0), "label": "elk"}], folder, like=train_data)


def _truncated(file: Path) -> None:
    file.write_bytes(picture(file).read_bytes()[:-40])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no picture": (lambda file: file.write_bytes(b"nothing"), r"\(not a format that Pillow knows\)"),
    "empty": (lambda file: file.write_bytes(b""), "this image cannot be read"),
    "truncated": (_truncated, "this image cannot be read"),
    "16 bits": (
        lambda file: Image.fromarray(pixels(0)[:, :, 0].astype(np.uint16) * 256).save(file),
        "pixels have more than 8 bits",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in BROKEN), ("truncated", 1)])
def test_a_broken_picture_is_one_error_with_its_file(
    name: str, workers: int, tmp_path: Path, folder: Path
) -> None:
    """The same holds in a worker process, whose own error would be its traceback."""
    pets(tmp_path / "pets", each=1)
    file = tmp_path / "pets" / "dog" / "broken.png"
    BROKEN[name][0](file)
    with pytest.raises(UsageError) as told:
        train(
            picture_job(folder, batch_size=3),
            f"workers({workers})" if workers else "plain",
            tmp_path / "pets",
            output_dir=tmp_path / "out",
            weights="random",
            max_steps=1,
            device="cpu",
        )
    assert str(told.value).startswith(f"{file}: ")
    assert told.match(BROKEN[name][1])
    assert "\n" not in str(told.value)


def test_what_is_missing_is_told_before_the_first_step(tmp_path: Path, folder: Path) -> None:
    pets(tmp_path / "pets", each=1)
    lines = _lines(tmp_path)
    (tmp_path / "pets" / "dog" / "0.png").unlink()
    with pytest.raises(UsageError, match=rf"rows.jsonl, line 2: {tmp_path}/pets/dog/0.png: no such file"):
        made(lines, folder)
    with pytest.raises(UsageError, match=r"row 1: https:/.*Nothing is downloaded"):
        made([{"image": "https://example.org/cat.png", "label": 0}], folder)


def test_a_path_begins_at_its_file_and_not_where_one_is(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets(tmp_path / "pets", each=1)
    (tmp_path / "rows").mkdir()
    lines = _lines(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError,
        match=r"no such file; correct the path. The current directory has one, but .* folder .*rows",
    ):
        made(shutil.move(lines, tmp_path / "rows"), folder)


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, r"an array \(H, W, C\) of uint8, not nothing \(null\)"),
    "numbers in [0, 1]": (pixels(0) / 255, "one of float64 and the shape"),
    "a row of pixels": (pixels(0).ravel(), r"uint8 and the shape \(360,\)"),
    "five channels": (pixels(0, size=(6, 6, 5)), r"of the shape \(6, 6, 5\)"),
    "a number": (7, "not of type int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_picture_in_memory(name: str, folder: Path) -> None:
    value, says = WRONG[name]
    with pytest.raises(UsageError, match=says):
        made([{"image": value, "label": 0}], folder)


def test_a_processor_must_fit_the_model(tmp_path: Path, folder: Path) -> None:
    rows = [{"image": pixels(0), "label": 0}]
    wider = vit(tmp_path / "wider", size={"height": SIDE, "width": SIDE + 1})
    with pytest.raises(UsageError, match=r"makes 3 x 8 x 9 of it, but the job was planned for 3 x 8 x 8"):
        data(rows, folder, processor=wider)
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "bare")
    with pytest.raises(UsageError, match=r"needs the model's processor.*--processor FOLDER"):
        data(rows, tmp_path / "bare")
    for given, says in (
        (tmp_path / "bare", "this folder has no image processor"),
        ("./nowhere", "nowhere: the processor is a folder with a preprocessor_config.json"),
        (object(), "The processor is of type object"),
    ):
        with pytest.raises(UsageError, match=says):
            data(rows, folder, processor=given)
    (folder_of_nobody := tmp_path / "nobody").mkdir()
    (folder_of_nobody / "preprocessor_config.json").write_text('{"image_processor_type": "Nobody"}')
    with pytest.raises(UsageError, match="transformers cannot load its image processor"):
        data(rows, folder, processor=folder_of_nobody)
    given = load_processor(folder, picture_job(folder))
    assert data(rows, tmp_path / "bare", processor=given).samples[0]["label"] == 0


def test_pictures_have_no_texts_to_pack_or_lengths(folder: Path) -> None:
    rows = [{"image": pixels(0), "label": 0}]
    for pack, options, says in (
        (True, {}, "Packing joins texts"),
        (False, {"train_sampling_strategy": "group_by_length"}, "have no lengths here"),
    ):
        with pytest.raises(UsageError, match=says):
            data_of(rows, picture_job(folder), None, columns=None, pack=pack, collate=None,
                    options=options_of(options))  # fmt: skip


def test_a_fingerprint_decodes_nothing(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a picture, a label or the processor changes it."""
    samples = data(pets(tmp_path / "pets"), folder)
    others = [
        data(tmp_path / "pets", folder, processor=vit(tmp_path / "vit", image_mean=[0.5, 0.5, 0.4])),
        data([{"image": row["image"], "label": "dog"} for row in samples.samples.media], folder),
    ]
    monkeypatch.setattr(pictures, "open_picture", None)
    before = samples.fingerprint()
    assert samples.fingerprint() == data_again(samples).fingerprint() == before
    picture(tmp_path / "pets" / "cat" / "1.png", 99)
    assert before not in {samples.fingerprint(), *(other.fingerprint() for other in others)}


def data_again(of: Data) -> Data:
    return pickle.loads(pickle.dumps(of))


def test_samples_that_are_ready_are_hashed_by_their_bytes() -> None:
    def of(value: torch.Tensor) -> str:
        return Data(samples=[{"pixel_values": value, "labels": torch.tensor(1)}], collate=list).fingerprint()

    one = torch.rand(3, 4, 4)
    assert of(one) == of(one.clone())
    assert len({of(one), of(one.bfloat16()), of(one.reshape(3, 2, 8)), of(one + 1e-6)}) == 4


def steps(of: Path) -> Sequence[tuple[float, ...]]:
    return [losses(of)[step] for step in sorted(losses(of))]


@pytest.mark.whole
def test_pictures_are_trained_on_and_resumed(tmp_path: Path, folder: Path) -> None:
    """A run that was stopped sees the pictures that come next, with workers as without."""
    source = pets(tmp_path / "pets")

    def trained(out: str, recipe: str = "micro_batches(2)", **more: Any) -> Any:
        return train(
            picture_job(folder),
            recipe,
            source,
            evaluation=source,
            output_dir=tmp_path / out,
            weights="random",
            num_train_epochs=2,
            lr_scheduler_type="constant",
            eval_strategy="epoch",
            device="cpu",
            **more,
        )

    whole = trained("whole")
    assert whole.step == 4
    assert whole.evaluated.accuracy is not None
    trained("parts", max_steps=2)
    trained("parts")
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    trained("workers", "micro_batches(2) + workers(1)")
    assert steps(tmp_path / "workers") == steps(tmp_path / "whole")


@pytest.mark.whole
def test_pictures_from_the_command_line(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processor is in the model's folder, and ignored files of the data are reported."""
    pets(tmp_path / "pets")
    (tmp_path / "pets" / "cat" / "notes.md").write_text("")
    monkeypatch.chdir(tmp_path)
    asked = ["train", str(folder), "--task", "image-classification", "--dataset", "pets", "--max-steps", "1"]
    assert run([*asked, "--output-dir", "out", "--device", "cpu", "--from-scratch"]) == 0
    out, told = capsys.readouterr()
    assert out.startswith("finished after step 1")
    assert "1 files are not images and are ignored, the first is pets/cat/notes.md." in told
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "bare")
    asked[1] = "./bare"
    asked += ["--device", "cpu", "--from-scratch"]
    assert run([*asked, "--output-dir", "other", "--processor", str(folder)]) == 0
    assert run([*asked, "--output-dir", "other", "--processor", "./pets", "--device", "cpu"]) == 2
    assert "pets: this folder has no image processor" in capsys.readouterr().err


@pytest.mark.whole
def test_samples_in_memory_may_hold_numbers_and_arrays(tmp_path: Path) -> None:
    """Training on them equals training on tensors, bit for bit."""
    task = pytest.importorskip("snugfit.features.digits", reason="the feature digits is not there")
    tensors = task.digits()[0][:64]
    plain = [{"pixel_values": s["pixel_values"].numpy(), "labels": int(s["labels"])} for s in tensors]
    done = [
        train(task.digits_job(batch_size=16), "plain", samples, output_dir=tmp_path / name, max_steps=2)
        for name, samples in (("tensors", tensors), ("plain", plain))
    ]
    assert_same_weights(done[0].model, done[1].model)


def test_what_cannot_be_stacked_is_told_in_a_line() -> None:
    one, other = torch.zeros(1, 8, 8), torch.zeros(1, 9, 9)
    assert stack([{"x": one, "labels": 0.5, "switch": True}] * 2)["labels"].dtype is torch.float32
    with pytest.raises(UsageError, match=r"cannot be stacked.*equal size.*collate=function"):
        stack([{"x": one}, {"x": other}])
    with pytest.raises(UsageError, match="scale is not a tensor, and differs between samples"):
        stack([{"x": one, "scale": 1.0}, {"x": one, "scale": 2.0}])
    with pytest.raises(UsageError, match="cannot be stacked"):
        stack([(one, 1)])
