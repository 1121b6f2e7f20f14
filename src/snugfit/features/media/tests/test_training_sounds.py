"""Sounds and their spoken text as a speech model's input; errors for wrong rates, lengths and files."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_media import RATE, sound, speech_job, tone, whisper

from small_runs import losses
from small_tokenizers import tokenizer
from snugfit.data.collate import Collate
from snugfit.data.row_sources import read_rows
from snugfit.errors import UsageError
from snugfit.features.media.files import MediaEntry
from snugfit.features.media.samples import MediaCollate, MediaSamples, load_processor, media_samples
from snugfit.features.media.sounds import SoundPreprocessor
from snugfit.frontends.own import options_of, train
from snugfit.job.model import Model
from snugfit.training.run.dataset import data_of
from snugfit.training.run.run import Data

HEARD = (tone(0.5), tone(0.25, 880))
SAID = ("one two", "three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of one second's input, its feature extractor and its tokenizer."""
    return whisper(tmp_path_factory.mktemp("whisper"))


def made(source: Any, folder: Path, words: str = "t5", **job: Any) -> MediaSamples:
    wanted = speech_job(folder, **job)
    return media_samples(read_rows(source), wanted, load_processor(folder, wanted), tokenizer(words))


def data(source: Any, folder: Path, **more: Any) -> Data:
    given = {"tokenizer": folder, **more}
    return data_of(
        source, speech_job(folder), columns=None, pack=False, collate=None, options=options_of({}), **given
    )


def files(at: Path) -> list[Path]:
    return [sound(at / f"{number}.wav", heard) for number, heard in enumerate(HEARD)]


def _metadata(at: Path) -> Any:
    files(at / "clips")
    rows = [{"file_name": f"{number}.wav", "transcription": text} for number, text in enumerate(SAID)]
    (at / "clips" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return at / "clips"


def _table(at: Path) -> Any:
    files(at / "clips")
    (at / "rows.csv").write_text(f"path,sentence\nclips/0.wav,{SAID[0]}\nclips/1.wav,{SAID[1]}\n")
    return at / "rows.csv"


def _dataset(at: Path) -> Any:
    import datasets

    content = {"audio": list(map(str, files(at))), "text": list(SAID)}
    return datasets.Dataset.from_dict(content).cast_column("audio", datasets.Audio(sampling_rate=RATE))


def _saved(at: Path) -> Any:
    _dataset(at).save_to_disk(str(at / "saved"))
    return at / "saved"


def _rows(*values: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"audio": value, "text": text, **more} for value, text in zip(values, SAID, strict=False)]


def _decoder(heard: np.ndarray) -> Any:
    """Return a decoder like torchcodec's: (C, N), and its rate."""
    found = SimpleNamespace(data=torch.from_numpy(np.stack([heard, heard])), sample_rate=RATE)
    return SimpleNamespace(get_all_samples=lambda: found)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "a folder with metadata": _metadata,
    "a table": _table,
    "a dataset": _dataset,
    "a saved dataset": _saved,
    "bytes": lambda at: _rows(*(file.read_bytes() for file in files(at))),
    "arrays": lambda at: _rows(*({"array": heard, "sampling_rate": RATE} for heard in HEARD)),
    "arrays and a column": lambda at: _rows(*HEARD, sampling_rate=np.int64(RATE)),
    "16 bits": lambda at: _rows(
        *(np.round(heard * 32767).astype(np.int16) for heard in HEARD), sampling_rate=RATE
    ),
    "decoders of datasets": lambda at: _rows(*map(_decoder, HEARD)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_source_says_the_same(name: str, tmp_path: Path, folder: Path) -> None:
    samples = made(SOURCES[name](tmp_path), folder)
    extractor = load_processor(folder, speech_job(folder))
    for sample, heard, asked in zip(samples, HEARD, ([7, 8, 6], [9, 6]), strict=True):
        by_hand = extractor(heard, sampling_rate=RATE, return_tensors="np")["input_features"][0]
        assert sample["input_features"].shape == (16, 100)
        np.testing.assert_allclose(sample["input_features"], by_hand, atol=5e-3)
        assert sample["labels"] == asked


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_of_pcm_and_every_number_of_channels(width: int, tmp_path: Path) -> None:
    heard = np.stack([tone(0.1), 0.5 * tone(0.1), 0 * tone(0.1)], axis=1)
    file = sound(tmp_path / "a.wav", heard, width=width)
    found = raw().input_of(MediaEntry(value=file, location="row 1", folder=Path()))
    assert np.abs(found - heard.mean(axis=1)).max() < 1 / (1 << (8 * width - 2)) + 1e-6


def raw() -> SoundPreprocessor:
    """Return the preprocessor of a model with raw sound input of any length."""
    from transformers import Wav2Vec2FeatureExtractor

    extractor = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    return SoundPreprocessor(extractor=extractor, shape=None)


def test_the_start_token_is_the_models_to_write(tmp_path: Path, folder: Path) -> None:
    """It is removed if a tokenizer adds it (Whisper's), because the model adds it before the labels."""
    config = {**Model.find(folder).config, "decoder_start_token_id": 2}
    job = replace(
        speech_job(folder, target_length=4), model=Model.from_config(config, name="starts with [CLS]")
    )
    rows = [*_rows(HEARD[0], sampling_rate=RATE), {**_rows(HEARD[0])[0], "text": "one two three four five"}]
    rows[1]["sampling_rate"] = RATE
    extractor = load_processor(folder, job)
    samples = media_samples(read_rows(rows), job, extractor, tokenizer("bert"))
    assert [sample["labels"] for sample in samples] == [[7, 8, 3], [7, 8, 9, 3]]
    assert (samples.cut, samples.cut_tokens) == (1, 2)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another rate": (
        lambda at: sound(at / "a.wav", rate=44_100),
        r"a.wav: 44,100 samples per second, but the model takes 16,000. .*resample.*ffmpeg .* -ar 16000",
    ),
    "too long": (
        lambda at: sound(at / "a.wav", tone(1.2)),
        "a.wav: 1.2 seconds, but the model takes at most 1.0. Cut the audio and its text",
    ),
    "the audio is empty": (lambda at: sound(at / "a.wav", tone(0.0)), "a.wav: the audio is empty"),
    "missing": (lambda at: at / "a.wav", r"a.wav: no such file"),
    "empty": (lambda at: written(at / "a.wav", b""), "a.wav: the file is empty"),
    "cut off": (lambda at: written(at / "a.wav", sound(at / "b.wav").read_bytes()[:-3]), "7,998 of 8,000"),
    "half a head": (lambda at: written(at / "a.wav", b"RIFF\x00\x00"), "a.wav: this .wav is broken"),
    "another kind": (lambda at: written(at / "a.flac", b"fLaC"), "needs soundfile.*pip install soundfile"),
    "without a rate": (lambda at: tone(), "audio in memory needs its sampling rate"),
    "two dimensions": (lambda at: {"array": np.zeros((2, 9)), "sampling_rate": RATE}, r"shape \(2, 9\)"),
    "whole numbers": (lambda at: {"array": np.arange(9), "sampling_rate": RATE}, "one of int64"),
    "nothing": (lambda at: None, "not NoneType"),
}


def written(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


@pytest.fixture
def without_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def absent(name: str, *more: Any) -> Any:
        if name == "soundfile":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", absent)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_heard_is_told(
    name: str, tmp_path: Path, folder: Path, without_soundfile: None
) -> None:
    value, says = WRONG[name]
    with pytest.raises(UsageError, match=says) as told:
        made(_rows(value(tmp_path)), folder)
    assert str(told.value).startswith("the dataset, row 1: ")


def test_other_files_are_read_by_soundfile(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(file: Any, *, dtype: str, always_2d: bool) -> Any:
        if file.read() != b"fLaC":
            raise RuntimeError("Error opening: Format not recognised.")
        return np.stack([HEARD[0], HEARD[0]], axis=1), RATE

    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(read=read))
    (sample,) = made(_rows(written(tmp_path / "a.flac", b"fLaC")), folder)
    (same,) = made(_rows({"array": HEARD[0], "sampling_rate": RATE}), folder)
    assert np.array_equal(sample["input_features"], same["input_features"])
    with pytest.raises(UsageError, match=r"b.flac: this audio cannot be read \(Error opening"):
        made(_rows(written(tmp_path / "b.flac", b"mp3?")), folder)


def test_texts_are_told_too(folder: Path, tmp_path: Path) -> None:
    rows = _rows(*HEARD, sampling_rate=RATE)
    for text, says in ((None, r"row 2: 'text' is nothing \(null\)"), (7, "row 2: 'text' is 7")):
        with pytest.raises(UsageError, match=says):
            made([rows[0], {**rows[1], "text": text}], folder)
    with pytest.raises(UsageError, match="row 2: 'text' is empty"):
        made([rows[0], {**rows[1], "text": ""}], folder, "gpt2")
    with pytest.raises(UsageError, match=r"no tokenizer was found.*--tokenizer FOLDER"):
        data(rows, folder, tokenizer=None, processor=load_processor(folder, speech_job(folder)))


def test_noise_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = whisper(tmp_path / "noisy", dither=1e-3)
    with pytest.raises(
        UsageError, match=r"dither: 0.001, which adds different noise .* 0.0 in preprocessor_config"
    ):
        made(_rows(HEARD[0], sampling_rate=RATE), folder)


def test_a_processor_must_fit_the_model(tmp_path: Path, folder: Path) -> None:
    rows = _rows(HEARD[0], sampling_rate=RATE)
    longer = whisper(tmp_path / "longer", chunk_length=2)
    with pytest.raises(UsageError, match="makes 16 x 200 of it, but the model takes 16 x 100"):
        data(rows, folder, processor=longer)
    with pytest.raises(UsageError, match="for speech-to-text it must be transformers' feature extractor"):
        data(rows, folder, processor=tokenizer("t5"))
    parts = SimpleNamespace(
        feature_extractor=load_processor(folder, speech_job(folder)), tokenizer=tokenizer("t5")
    )
    for given in (
        {"processor": parts, "tokenizer": None},
        {"tokenizer": parts},
        {"tokenizer": tokenizer("t5")},
    ):
        assert data(rows, folder, **given).samples[0]["labels"] == [7, 8, 6]


def test_sounds_of_several_lengths_are_filled_up_by_the_extractor(folder: Path) -> None:
    targets = Collate(speech_job(folder), 0, pad_to_multiple_of=4)
    samples = [
        {"input_values": heard, "labels": labels}
        for heard, labels in zip(HEARD, ([7, 8, 6], [9, 6]), strict=True)
    ]
    batch = pickle.loads(pickle.dumps(MediaCollate(preprocessor=raw(), targets=targets)))(samples)
    assert batch["input_values"].shape == (2, 8_000)
    assert batch["attention_mask"].sum(dim=1).tolist() == [8_000, 4_000]
    assert batch["labels"].tolist() == [[7, 8, 6, -100], [9, 6, -100, -100]]


def test_a_fingerprint_knows_sound_text_and_extractor(tmp_path: Path, folder: Path) -> None:
    one = files(tmp_path)
    of = [
        data(rows, folder).fingerprint()
        for rows in (_rows(*one), _rows(*one), _rows(one[1], one[0]), _rows(*HEARD, sampling_rate=RATE))
    ]
    assert of[0] == of[1]
    assert len({*of, data([{**row, "text": "one"} for row in _rows(*one)], folder).fingerprint()}) == 4


@pytest.mark.whole
def test_speech_is_trained_on_and_resumed(tmp_path: Path, folder: Path) -> None:
    source = _metadata(tmp_path)

    def trained(out: str, recipe: str = "plain", **more: Any) -> Any:
        given = {"num_train_epochs": 3, "lr_scheduler_type": "constant", "eval_strategy": "epoch", **more}
        return train(
            speech_job(folder),
            recipe,
            source,
            evaluation=source,
            output_dir=tmp_path / out,
            weights="random",
            device="cpu",
            **given,
        )

    assert trained("whole").step == 3
    trained("parts", max_steps=1)
    trained("parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    trained("workers", "workers(1)")
    assert losses(tmp_path / "workers") == losses(tmp_path / "whole")


@pytest.mark.whole
def test_half_weights_hear_in_their_own_dtype(tmp_path: Path, folder: Path) -> None:
    """Nothing casts the features of a model that is bfloat16 throughout, so they come in it."""
    source = _metadata(tmp_path)
    done = train(
        speech_job(folder),
        "bf16_pure",
        source,
        evaluation=source,
        output_dir=tmp_path / "out",
        weights="random",
        max_steps=1,
        eval_strategy="epoch",
        device="cpu",
    )
    assert done.evaluated is not None
    assert done.step == 1


def test_a_column_with_a_rate_is_left_to_datasets_where_it_can_hear(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchcodec `datasets` cannot decode it, and the error names the row."""
    import datasets

    source = _dataset(tmp_path)
    monkeypatch.setattr(datasets.config, "TORCHCODEC_AVAILABLE", True)
    assert read_rows(source.cast_column("audio", datasets.Audio()))[0]["audio"]["bytes"] is None
    if importlib.util.find_spec("torchcodec") is None:
        with pytest.raises(UsageError, match=r"row 1: the datasets library cannot read this .*torchcodec"):
            made(source, folder)
